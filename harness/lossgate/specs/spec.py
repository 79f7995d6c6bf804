# SPDX-License-Identifier: Apache-2.0
"""What makes a spec: a reference, its inputs and options, and the branches that problems must visit.

Every loss composes: loss(logprobs(logits(hidden))). A spec brings the last stage; the stages before it are shared,
and a kernel may start at any of them (its head).
"""

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from lossgate.declaration.candidate import ANY, Candidate
from lossgate.declaration.contract import Contract, Placements
from lossgate.errors import UsageError
from lossgate.layout import Axis, Layout
from lossgate.problems.batch import Batch
from lossgate.problems.partition import VOCAB_SPLITS, Dims
from lossgate.problems.random_streams import Bits


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
        number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and any(isinstance(choice, float) for choice in self.choices)
        )
        return number or value in self.choices

    @property
    def drawn(self) -> tuple[Any, ...]:
        """The values that problems draw: ``choices``; of an interval the default and tenths, exact in every dtype, so that rounding the option
        itself is no error."""
        if self.interval is None:
            return self.choices
        low, high = self.interval
        exact = [
            float(torch.tensor(n / 10, dtype=torch.bfloat16)) for n in range(round(10 * low), round(10 * high) + 1)
        ]
        return tuple(sorted({self.default, *(min(max(x, low), high) for x in exact)}))

    @property
    def domain(self) -> str:
        return (
            f"{self.interval[0]:g} to {self.interval[1]:g}"
            if self.interval
            else " | ".join(map(str, dict.fromkeys(self.choices)))
        )


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


class AtLeast(Container[Any]):
    """All numbers from ``least`` on."""

    def __init__(self, least: float) -> None:
        self._least = least

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and value >= self._least


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A case that problems must visit before a verdict counts."""

    meaning: str
    barred_by: Mapping[str, Container[Any]] = field(default_factory=dict)
    """It can't be visited by a candidate that supports, of one of these options, nothing but these values."""
    heads: tuple[str, ...] = ()
    """It can be visited only there; empty for everywhere."""
    axes: tuple[Axis, ...] = ()
    """It can be visited only on a layout that splits one of these; empty for all."""


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
    """Those of ``branches`` that a batch visits."""
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
                raise UsageError(
                    f"problem: {name!r} is no option of spec {self.name!r}; expected any of {', '.join(known)}"
                )
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

    def with_choice(self, values: Mapping[str, Any], name: str, value: Any) -> dict[str, Any] | None:
        """These options with another value of ``name``, and where that does not go with the others of its group, with as few of those changed as
        can be; None if nothing helps."""
        changed = {**values, name: value}
        if self.allows(changed):
            return changed
        own = {
            n: values.get(n, self.features[n].default)
            for n in next((group for group in self.option_groups if name in group), (name,))
        }
        choices = (
            [own[n], *(v for v in self.features[n].choices if v != own[n])] if n != name else [value] for n in own
        )
        groups = sorted(
            (dict(zip(own, c, strict=True)) for c in product(*choices)),
            key=lambda group: sum(group[n] != own[n] for n in own),
        )
        return next((both for group in groups if self.allows(both := {**values, **group})), None)

    def differentiable(self, candidate: Candidate) -> tuple[str, ...]:
        return candidate.differentiable or self.outputs[:1]

    def metric_placements(self, contract: Contract, name: str) -> Placements:
        return contract.of_metric(name, self.metrics[name].reduction)

    @property
    def every_branch(self) -> dict[str, Branch]:
        """Those that are declared, and one for each choice of the scenario."""
        chosen = ((choice.name, value) for choice in self.scenario for value in dict.fromkeys(choice.choices))
        return {
            **self.branches,
            **{f"{name}: {value}": Branch(meaning=f"a problem with {name} {value!r}") for name, value in chosen},
        }

    def visited_by(self, batch: Batch) -> set[str]:
        """The branches that a batch visits. Of its scenario, if anything is trained."""
        seen, chosen = self.visited(batch), batch.problem.scenario
        if "trained token" in seen or "pair that counts" in seen:
            seen |= {f"{choice.name}: {chosen.get(choice.name, choice.default)}" for choice in self.scenario}
        return seen

    def required(self, candidate: Candidate, layout: Layout) -> dict[str, Branch]:
        """The branches that a verdict on ``candidate`` on ``layout`` must have visited."""
        return {name: branch for name, branch in self.every_branch.items() if self._reaches(candidate, layout, branch)}

    def _reaches(self, candidate: Candidate, layout: Layout, branch: Branch) -> bool:
        if (branch.heads and candidate.head not in branch.heads) or (
            branch.axes and not set(branch.axes) & set(layout.axes)
        ):
            return False
        supported = {name: self.supported(candidate, name) for name in branch.barred_by}
        return all(
            values is ANY or any(value not in branch.barred_by[name] for value in values)
            for name, values in supported.items()
        )

    def check(self, candidate: Candidate) -> None:
        """Refuse a declaration that does not fit the spec."""
        who = f"candidate {candidate.name!r}"
        if candidate.head not in self.inputs:
            raise UsageError(
                f"{who}: spec {self.name!r} has no head {candidate.head!r}; expected one of {', '.join(self.inputs)}"
            )
        for name, values in candidate.supports.items():
            option = self.features.get(name)
            if option is None:
                raise UsageError(
                    f"{who}: supports[{name!r}] is no option of spec {self.name!r}; expected any of {', '.join(self.features)}"
                )
            for value in () if values is ANY else values if isinstance(values, tuple) else (values,):
                if not option.allows(value):
                    raise UsageError(
                        f"{who}: supports[{name!r}] allows {value!r}, which spec {self.name!r} does not; expected {option.domain}"
                    )
                if name in {o.name for o in self.options} and self.with_choice({}, name, value) is None:
                    raise UsageError(
                        f"{who}: supports[{name!r}] allows {value!r}, which goes with no other options: {self.refusal({name: value})}"
                    )
        if unknown := [metric for metric in candidate.contract.metrics if metric not in self.metrics]:
            raise UsageError(
                f"{who}: contract names metric {unknown[0]!r}; spec {self.name!r} has {', '.join(self.metrics)}"
            )
        leaves = HEADS[candidate.head].leaves
        if unknown := [leaf for leaf in candidate.contract.grads if leaf not in leaves]:
            raise UsageError(
                f"{who}: contract names the gradient of {unknown[0]!r}; head {candidate.head!r} has {', '.join(leaves)}"
            )
        if unknown := [dim for dim in candidate.tiles if dim not in ("token", "vocab", "hidden")]:
            raise UsageError(f"{who}: tiles names dim {unknown[0]!r}; expected token, vocab or hidden")
        differentiable = self.differentiable(candidate)
        if self.outputs[0] not in differentiable or set(differentiable) - set(self.outputs):
            raise UsageError(
                f"{who}: differentiable={differentiable!r}; expected {self.outputs[0]!r}, alone or with others of {self.outputs!r}"
            )

    def supported(self, candidate: Candidate, name: str) -> Any:
        """What ``candidate`` supports of option ``name``: ``ANY`` or a tuple of values."""
        values = candidate.supports.get(name, self.features[name].default)
        return values if values is ANY or isinstance(values, tuple) else (values,)
