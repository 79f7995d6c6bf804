# SPDX-License-Identifier: Apache-2.0
"""What makes a spec: a reference, its inputs and options, and the branches that problems must visit.

Every loss composes: loss(logprobs(logits(hidden))). A spec brings the last stage; the stages before it are shared,
and a kernel may start at any of them (its head).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from lossgate.declaration.candidate import ANY, Candidate
from lossgate.declaration.contract import Contract, Placements
from lossgate.errors import UsageError
from lossgate.problems.batch import Batch
from lossgate.problems.bits import Bits
from lossgate.problems.partition import VOCAB_SPLITS, Dims


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. Problems draw its values from ``choices``, or all numbers in ``interval``.

    A kernel may support numbers beside those of ``choices``, if there are any that are no counts.
    """

    name: str
    meaning: str
    default: Any
    choices: tuple[Any, ...] = ()
    interval: tuple[float, float] | None = None

    def allows(self, value: Any) -> bool:
        if self.interval:
            return isinstance(value, int | float) and self.interval[0] <= value <= self.interval[1]
        number = isinstance(value, int | float) and not isinstance(value, bool) and any(isinstance(choice, float) for choice in self.choices)
        return number or value in self.choices

    @property
    def domain(self) -> str:
        return f"{self.interval[0]:g} to {self.interval[1]:g}" if self.interval else " | ".join(map(str, dict.fromkeys(self.choices)))


@dataclass(frozen=True)
class Head:
    """Where a kernel starts: the differentiable inputs that it takes, and how they are split."""

    leaves: Mapping[str, Dims]
    meaning: str


HEADS: Mapping[str, Head] = MappingProxyType(
    {
        "hidden": Head(
            {"hidden": ("token", "hidden"), "weight": ("vocab", "hidden"), "bias": ("vocab",)},
            "from the last hidden states and the lm-head",
        ),
        "logits": Head({"logits": ("token", "vocab")}, "from the logits, before the temperature"),
        "logprobs": Head({"logprobs": ("token",)}, "from the labels' log-probabilities"),
        "values": Head({"values": ("token",)}, "from the value head's predictions"),
        "rewards": Head({"rewards": ("sequence",)}, "from the reward model's scores"),
    }
)

FEATURES: Mapping[str, Option] = MappingProxyType(
    {
        "bias": Option(name="bias", meaning="the lm-head has a bias (head hidden)", default=False, choices=(False, True)),
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
class TokenValues:
    """What the stages before the loss give it. ``[tokens]`` each; what needs the logits is None at heads without them."""

    logprobs: Tensor
    """Of the labels; ``[tokens, k]`` for a spec with ``Spec.columns``. At heads "values" and "rewards" those themselves."""
    entropy: Tensor | None
    lowest: Tensor | None = None
    """The least logit of each token, before the temperature; and the greatest."""
    highest: Tensor | None = None


LossStage = Callable[[TokenValues, Mapping[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]]
"""``(token values, fields of the batch, options) -> (loss, metrics)``."""


Statistics = Callable[[TokenValues, Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A scalar that a candidate may return."""

    meaning: str
    reduction: Literal["sum", "min", "max"] = "sum"
    """How the parts of ranks that share a batch make the whole."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A case that problems must visit before a verdict counts."""

    meaning: str
    barred_by: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """It can't be visited by a candidate that supports, of one of these options, nothing but these values."""
    heads: tuple[str, ...] = ()
    """It can be visited only there; empty for everywhere."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a spec makes its further fields from. T tokens of the padded pack, padding included; S sequences."""

    batch: Batch
    options: Any
    bits: Bits
    scenario: Mapping[str, str]
    """``Spec.scenario``, all of it."""
    logprobs: Tensor
    """``[T]``: of the labels, by the reference; what the head gives in their place at heads without labels. For specs with a scenario."""

    @property
    def tokens(self) -> int:
        return self.batch.partition.tokens

    @property
    def sequences(self) -> int:
        return len(self.batch.partition.lengths)


MakeFields = Callable[[Draft], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    name: str
    summary: str
    source: str
    loss: LossStage | None
    options_type: type
    options: tuple[Option, ...]
    inputs: Mapping[str, type]
    """The dataclass of a rank's inputs, for each head."""
    statistics: Statistics | None = None
    """``(token values, fields) -> `` metrics that are computed only for a candidate that returns one of them, since they cost more than the loss."""
    outputs: tuple[str, ...] = ("loss", "logprobs")
    """What a candidate may return beside metrics; the first is always owed, and carries gradients unless it declares others."""
    metrics: Mapping[str, Metric]
    branches: Mapping[str, Branch] = field(default_factory=dict)
    visited: Callable[[Batch], set[str]]
    """The branches that a batch visits."""
    fields: Mapping[str, Dims] = field(default_factory=dict)
    """Inputs beside those of ``PackedBatch`` and of the head, and how they are split."""
    make_fields: MakeFields | None = None
    scenario: tuple[Option, ...] = ()
    """How the fields may be made: choices that problems draw."""
    option_groups: tuple[tuple[str, ...], ...] = ()
    """Options that make sense only together; drawn from the combinations that ``options_type`` accepts."""
    together: int = 1
    """Neighbouring sequences that dp keeps on one rank."""
    columns: str | None = None
    """The field ``[tokens, k]`` of vocabulary ids whose log-probabilities the loss needs, if not the labels'."""
    kept: str | None = None
    """The field ``[tokens, vocab]`` that says which logits take part in the softmax, if not all."""
    kinks: bool = False
    """The loss has clips and comparisons: tokens too near to one of them, for the dtype, are masked."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Choices of the scenario in which every comparison is a tie, and of no account to loss and gradients: nothing is masked for it."""

    @property
    def features(self) -> dict[str, Option]:
        """Everything that ``supports`` may name."""
        return {**FEATURES, **{option.name: option for option in self.options}}

    def make_options(self, values: Mapping[str, Any]) -> Any:
        """The options of a problem, by name; others are at their default."""
        known = {option.name: option for option in self.options}
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"problem: {name!r} is no option of spec {self.name!r}; expected any of {', '.join(known)}")
            if not known[name].allows(value):
                raise UsageError(f"problem: option {name} is {value!r}; spec {self.name!r} allows {known[name].domain}")
        try:
            return self.options_type(**values)
        except ValueError as error:
            raise UsageError(f"problem: {error}") from None

    def run(
        self, values: TokenValues, fields: Mapping[str, Tensor], options: Any, wanted: Collection[str] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics; ``wanted`` names the outputs that will be compared, if not all."""
        assert self.loss is not None
        loss, metrics = self.loss(values, fields, options)
        if self.statistics is not None and (wanted is None or (set(wanted) & set(self.metrics)) - set(metrics)):
            metrics |= self.statistics(values, fields)
        return loss, metrics

    def allows(self, values: Mapping[str, Any]) -> bool:
        """Whether these options go together."""
        return not self.refusal(values)

    def refusal(self, values: Mapping[str, Any]) -> str:
        """Why these options do not go together; empty if they do."""
        try:
            self.options_type(**values)
        except ValueError as error:
            return str(error)
        return ""

    def differentiable(self, candidate: Candidate) -> tuple[str, ...]:
        return candidate.differentiable or self.outputs[:1]

    def metric_placements(self, contract: Contract, name: str) -> Placements:
        return contract.of_metric(name, self.metrics[name].reduction)

    def required(self, candidate: Candidate) -> dict[str, Branch]:
        """The branches that a verdict on ``candidate`` must have visited."""
        return {name: branch for name, branch in self.branches.items() if self._reaches(candidate, branch)}

    def _reaches(self, candidate: Candidate, branch: Branch) -> bool:
        if branch.heads and candidate.head not in branch.heads:
            return False
        supported = {name: self.supported(candidate, name) for name in branch.barred_by}
        return all(values is ANY or set(values) - set(branch.barred_by[name]) for name, values in supported.items())

    def check(self, candidate: Candidate) -> None:
        """Refuse a declaration that does not fit the spec."""
        who = f"candidate {candidate.name!r}"
        if candidate.head not in self.inputs:
            raise UsageError(f"{who}: spec {self.name!r} has no head {candidate.head!r}; expected one of {', '.join(self.inputs)}")
        for name, values in candidate.supports.items():
            option = self.features.get(name)
            if option is None:
                raise UsageError(f"{who}: supports[{name!r}] is no option of spec {self.name!r}; expected any of {', '.join(self.features)}")
            for value in () if values is ANY else values if isinstance(values, tuple) else (values,):
                if not option.allows(value):
                    raise UsageError(f"{who}: supports[{name!r}] allows {value!r}, which spec {self.name!r} does not; expected {option.domain}")
        if unknown := [metric for metric in candidate.contract.metrics if metric not in self.metrics]:
            raise UsageError(f"{who}: contract names metric {unknown[0]!r}; spec {self.name!r} has {', '.join(self.metrics)}")
        leaves = HEADS[candidate.head].leaves
        if unknown := [leaf for leaf in candidate.contract.grads if leaf not in leaves]:
            raise UsageError(f"{who}: contract names the gradient of {unknown[0]!r}; head {candidate.head!r} has {', '.join(leaves)}")
        if unknown := [dim for dim in candidate.tiles if dim not in ("token", "vocab", "hidden")]:
            raise UsageError(f"{who}: tiles names dim {unknown[0]!r}; expected token, vocab or hidden")
        differentiable = self.differentiable(candidate)
        if self.outputs[0] not in differentiable or set(differentiable) - set(self.outputs):
            raise UsageError(f"{who}: differentiable={differentiable!r}; expected {self.outputs[0]!r}, alone or with others of {self.outputs!r}")

    def supported(self, candidate: Candidate, name: str) -> Any:
        """What ``candidate`` supports of option ``name``: ``ANY`` or a tuple of values."""
        values = candidate.supports.get(name, self.features[name].default)
        return values if values is ANY or isinstance(values, tuple) else (values,)
