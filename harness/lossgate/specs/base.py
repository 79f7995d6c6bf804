# SPDX-License-Identifier: Apache-2.0
"""What makes a spec: a reference, its inputs and options, and the branches that problems must visit.

Every loss composes: loss(logprobs(logits(hidden))). A spec brings the last stage; the stages before it are shared,
and a kernel may start at any of them (its head).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lossgate.declaration.candidate import ANY, Candidate
from lossgate.errors import UsageError
from lossgate.problems.partition import VOCAB_SPLITS, Dims


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its values are either ``choices`` or all numbers in ``interval``."""

    name: str
    meaning: str
    default: Any
    choices: tuple[Any, ...] = ()
    interval: tuple[float, float] | None = None

    def allows(self, value: Any) -> bool:
        if self.interval:
            return isinstance(value, int | float) and self.interval[0] <= value <= self.interval[1]
        return value in self.choices

    @property
    def domain(self) -> str:
        return f"{self.interval[0]:g} to {self.interval[1]:g}" if self.interval else " | ".join(map(str, self.choices))


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
    """What the stages before the loss give it. All ``[tokens]``."""

    logprobs: Tensor
    entropy: Tensor


LossStage = Callable[[TokenValues, Mapping[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]]
"""``(token values, fields of the batch, options) -> (loss, metrics)``."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    name: str
    summary: str
    source: str
    loss: LossStage
    options_type: type
    options: tuple[Option, ...]
    inputs: Mapping[str, type]
    """The dataclass of a rank's inputs, for each head."""
    metrics: Mapping[str, str]
    """Metrics that a candidate may return, with their meaning; scalars."""
    branches: Mapping[str, str] = field(default_factory=dict)
    """The cases that problems must visit before a verdict counts, with their meaning."""
    visited: Callable[[Any], set[str]]
    """``(batch) -> `` the branches that it visits."""

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
        return self.options_type(**values)

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
        if "loss" not in candidate.differentiable or set(candidate.differentiable) - {"loss", "logprobs"}:
            raise UsageError(f"{who}: differentiable={candidate.differentiable!r}; expected ('loss',) or ('loss', 'logprobs')")

    def supported(self, candidate: Candidate, name: str) -> Any:
        """What ``candidate`` supports of option ``name``: ``ANY`` or a tuple of values."""
        values = candidate.supports.get(name, self.features[name].default)
        return values if values is ANY or isinstance(values, tuple) else (values,)
