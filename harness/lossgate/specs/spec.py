# SPDX-License-Identifier: Apache-2.0
"""What a spec is: a reference, its options and inputs, and the goals that problems must reach.

Every loss composes: loss(token values(logits(hidden))). A spec brings the last stage. The stages
before it are shared, and a kernel may start at any of them: its head.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from dense_losses import softcapped
from lossgate.errors import UsageError
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import VOCAB_SPLITS, Dims
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.coverage import CoverageGoal, Covered
from lossgate.specs.heads import HEADS
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import Option
from lossgate.specs.outputs import RETURNED, Output, metric_output
from lossgate.specs.sharding_goals import SHARDING_GOALS
from lossgate.specs.token_values import TokenStage, TokenValues, label_values
from lossgate.spelling import nearest

LossStage = Callable[[TokenValues, Mapping[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]]
"""``(token values, fields of the batch, options) -> (loss, metrics)``."""

ExtraMetrics = Callable[[TokenValues, Mapping[str, Tensor]], dict[str, Tensor]]
"""``(token values, fields of the batch) -> metrics``."""

COMMON_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "bias": Option(
            name="bias", meaning="the lm-head has a bias (head hidden)", default=False, choices=(False, True)
        ),
        "vocab_split": Option(
            name="vocab_split",
            meaning="how tp splits the vocabulary: " + "; ".join(f"{k}: {v}" for k, v in VOCAB_SPLITS.items()),
            default="balanced",
            choices=tuple(VOCAB_SPLITS),
        ),
    }
)
"""What a candidate of any spec may support or not, beside the options of its spec."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A scalar that a candidate may return."""

    meaning: str
    reduction: Literal["sum", "min", "max"] = "sum"
    """How the parts of ranks that share a batch make the whole."""
    uses_entropy: bool = False
    """It is computed from the entropies of tokens, which kernels compute in two ways."""


@dataclass(frozen=True, kw_only=True)
class FieldContext:
    """What a spec makes its further fields from.

    T tokens of the sequences end to end, without padding; S sequences. Padding is added later, for
    each layout.
    """

    batch: GlobalBatch
    options: Any
    streams: RandomStreams
    scenario: Mapping[str, str]
    """The choice of each of ``Spec.scenarios``."""
    logprobs: Tensor
    """``[T]``: the reference's log-probabilities of the labels, or what the head gives in their
    place; without the filter where that leaves a label out. Only for specs with scenarios."""
    unfiltered: Tensor
    """``[T]``: the same without any filter."""
    logits: Callable[[], Tensor]
    """Computes the reference's logits ``[T, vocab]``."""

    @property
    def tokens(self) -> int:
        return self.batch.partition.tokens

    @property
    def sequences(self) -> int:
        return len(self.batch.partition.lengths)


MakeFields = Callable[[FieldContext], dict[str, Tensor]]
CountTokens = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""``fields of the batch -> `` the fields that count what is trained."""


def count_by_mask(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Counts the tokens that the mask trains."""
    return {"valid_tokens": fields["mask"].sum()}


def trained_by_mask(fields: Mapping[str, Tensor]) -> Tensor:
    """Returns ``[T]`` bool: the tokens that the mask trains."""
    return fields["mask"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """One loss: what a kernel is given, what it must give back, and what problems must show."""

    name: str
    summary: str
    source: str
    """The projects or papers that the reference follows."""
    options_type: type
    options: tuple[Option, ...]
    option_groups: tuple[tuple[str, ...], ...] = ()
    """Options that are valid only together; drawn from the combinations that ``options_type``
    accepts."""
    inputs: Mapping[str, type]
    """The dataclass of a rank's inputs, for each head."""

    loss: LossStage | None
    token_values: TokenStage | None = None
    """What the loss needs of the logits; by default log-probabilities of the labels and entropies,
    after the temperature."""
    temperature: str | None = None
    """The option that divides the logits and does nothing else; None if there is none."""
    softcap: str | None = None
    """The option that bounds the logits and does nothing else; None if there is none."""
    token_options: tuple[str, ...] | None = None
    """The options that ``token_values`` depends on; None for all. They have no meaning for a head
    without logits."""
    outputs: tuple[str, ...] = ("loss", "logprobs")
    """What a candidate may return beside metrics. The first is required, and carries gradients by
    default."""
    metrics: Mapping[str, Metric]
    extra_metrics: ExtraMetrics | None = None
    """Metrics that cost more than the loss: they are computed only for a candidate that returns one
    of them."""

    fields: Mapping[str, Dims] = field(default_factory=dict)
    """Inputs beside those of ``PackedBatch`` and of the head, and how they are split.

    A bool for each token is a mask: it is false at padding.
    """
    unshifted: frozenset[str] = frozenset()
    """The fields that belong to a token itself, not to the prediction of the next one. A candidate
    that is given whole sequences finds them at their token, and all others one entry later."""
    scenarios: tuple[Option, ...] = ()
    """How the fields may be made: choices that problems draw."""
    make_fields: MakeFields | None = None
    counts: CountTokens = count_by_mask
    """The fields that count what is trained. They are computed again whenever a token is masked."""
    trained: Callable[[Mapping[str, Tensor]], Tensor] = trained_by_mask
    """``fields -> `` what counts for the loss: ``[T]`` bool of tokens, or ``[S]`` of sequences. If
    nothing does, the problem's scenario shows nothing."""
    trained_dim: Literal["token", "sequence"] = "token"
    """Whether ``trained`` tells of tokens or of sequences."""
    group_size: int = 1
    """Neighbouring sequences that dp keeps on one rank."""
    gathered_ids: str | None = None
    """The field ``[tokens, k]`` of vocabulary ids whose log-probabilities the loss needs, if not
    the labels'."""

    goals: Mapping[str, CoverageGoal] = field(default_factory=dict)
    covered: Covered
    """The goals that a problem reaches."""
    kinks: bool = False
    """The loss has clips and comparisons. Tokens that are too near to one of them, for the dtype,
    are masked."""
    tie_scenarios: Mapping[str, str] = field(default_factory=dict)
    """Scenarios in which every comparison is a tie that does not matter to loss and gradients:
    nothing is masked."""

    mistakes: tuple[Mistake, ...] = ()
    """What kernels of it have got wrong; the first is the plainest."""

    @cached_property
    def supported_options(self) -> dict[str, Option]:
        """Everything that a candidate's ``supports`` may name."""
        return {**COMMON_OPTIONS, **{option.name: option for option in self.options}}

    @property
    def all_unshifted(self) -> frozenset[str]:
        """What belongs to a token itself, ``PackedBatch`` included."""
        return self.unshifted | {"input_ids"}

    @property
    def all_goals(self) -> dict[str, CoverageGoal]:
        """The declared goals, those of layouts, and one for each choice of each scenario."""
        chosen = ((choice.name, value) for choice in self.scenarios for value in dict.fromkeys(choice.choices))
        by_scenario = {
            f"{name}: {value}": CoverageGoal(meaning=f"a problem with {name} {value!r}") for name, value in chosen
        }
        return {**self.goals, **SHARDING_GOALS, **by_scenario}

    def output(self, name: str) -> Output:
        """Returns the output of a name: "loss", "logprobs", "token_entropy" or a metric's.

        "loss", "logprobs", "token_entropy" or a metric's name.
        """
        return RETURNED[name] if name in RETURNED else metric_output(name)

    def uses_entropy(self, output: Output) -> bool:
        """Returns whether an output is computed from the entropies of tokens."""
        return output.name == "token_entropy" or (output.kind == "metric" and self.metrics[output.name].uses_entropy)

    def bind(self, values: Mapping[str, Any]) -> "BoundSpec":
        """Returns the spec with options.

        Args:
            values: the options that are not at their default.

        Raises:
            UsageError: if an option is unknown, or its value or their combination is not allowed.
        """
        known = {option.name: option for option in self.options}
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"problem: spec {self.name!r} has no option {name!r}; {nearest(name, known)}")
            if not known[name].allows(value):
                raise UsageError(f"problem: option {name} is {value!r}; spec {self.name!r} allows {known[name].domain}")
        try:
            options = self.options_type(**values)
        except ValueError as error:
            raise UsageError(f"problem: {error}") from None
        return BoundSpec(spec=self, values=values, options=options)

    def bind_options(self, options: Any) -> "BoundSpec":
        """Returns the spec with an object of ``options_type``."""
        given = {option.name: getattr(options, option.name) for option in self.options}
        changed = {o.name: given[o.name] for o in self.options if given[o.name] != o.default}
        return BoundSpec(spec=self, values=changed, options=options)

    def conflict(self, values: Mapping[str, Any]) -> str:
        """Returns why these options are not valid together; empty if they are."""
        try:
            self.options_type(**values)
        except ValueError as error:
            return str(error)
        return ""

    def with_choice(self, values: Mapping[str, Any], name: str, value: Any) -> dict[str, Any] | None:
        """Returns these options with another value of ``name``.

        If that value is not valid with the others of its group, as few of those as possible are
        changed. Returns None if no change makes it valid.
        """
        changed = {**values, name: value}
        if not self.conflict(changed):
            return changed
        group = next((group for group in self.option_groups if name in group), (name,))
        own = {n: values.get(n, self.supported_options[n].default) for n in group}
        choices = (
            [own[n], *(v for v in self.supported_options[n].choices if v != own[n])] if n != name else [value]
            for n in own
        )
        combinations = (dict(zip(own, combination, strict=True)) for combination in product(*choices))
        fewest_changes = sorted(combinations, key=lambda group: sum(group[n] != own[n] for n in own))
        return next((both for group in fewest_changes if not self.conflict(both := {**values, **group})), None)


@dataclass(frozen=True, kw_only=True)
class BoundSpec:
    """A spec with the options of one problem."""

    spec: Spec
    values: Mapping[str, Any]
    """The options that are not at their default."""
    options: Any
    """The same as an object of ``Spec.options_type``."""
    returned: frozenset[Output] | None = None
    """The outputs that will be compared; None for all."""

    def returning(self, outputs: Collection[Output]) -> "BoundSpec":
        """Returns the same, for a candidate that returns these outputs."""
        return replace(self, returned=frozenset(outputs))

    @property
    def temperature(self) -> float:
        """The number that divides the logits."""
        return 1.0 if self.spec.temperature is None else float(getattr(self.options, self.spec.temperature))

    @property
    def softcap(self) -> float | None:
        """The bound of logits; None for no bound."""
        return None if self.spec.softcap is None else getattr(self.options, self.spec.softcap)

    def capped(self, logits: Tensor) -> Tensor:
        """Returns logits after the soft-cap."""
        return logits if self.softcap is None else softcapped(logits, self.softcap)

    @property
    def compares_entropy(self) -> bool:
        """Whether any output that will be compared is computed from entropies."""
        return self.returned is None or any(self.spec.uses_entropy(output) for output in self.returned)

    @property
    def token_stage(self) -> str:
        """Names what the values per token are computed with: options of one name share them."""
        named = self.spec.token_options
        if named is None and self.spec.token_values is not None:
            return repr(self.options)
        return repr([getattr(self.options, name) for name in named or filter(None, [self.spec.temperature])])

    def token_values(self, head: str, leaves: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> TokenValues:
        """Returns the reference's values per token, from a head's inputs."""
        start = HEADS[head]
        if not start.has_logits:
            return TokenValues(logprobs=start.logits(leaves))
        logits = self.capped(start.logits(leaves))
        if self.spec.token_values is None:
            return label_values(logits, fields["labels"], self.temperature)
        return self.spec.token_values(logits, fields, self.options)

    def loss(self, values: TokenValues, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the reference's loss and metrics. For specs that have a loss."""
        assert self.spec.loss is not None
        loss, metrics = self.spec.loss(values, fields, self.options)
        if self.spec.extra_metrics is not None and self._wants_more_than(metrics):
            metrics |= self.spec.extra_metrics(values, fields)
        return loss, metrics

    def _wants_more_than(self, metrics: Collection[str]) -> bool:
        return self.returned is None or any(o.kind == "metric" and o.name not in metrics for o in self.returned)
