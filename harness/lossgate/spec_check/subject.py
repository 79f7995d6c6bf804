# SPDX-License-Identifier: Apache-2.0
"""What is checked: a spec, problems of it, and what its reference gives on them or their halves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.dense_candidates import dense_candidate
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.record import fields_of
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


@dataclass(frozen=True)
class Subject:
    """A spec that is checked, and problems of it."""

    spec: Spec
    problems: Sequence[BoundProblem]
    """Ordinary problems, of every head."""

    @property
    def with_loss(self) -> Sequence[BoundProblem]:
        """The problems, if the spec has a loss."""
        return self.problems if self.spec.reference is not None else ()


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a spec."""

    seen: str
    """What was seen."""
    change: str
    """What to change."""
    problem: str = ""
    """A problem that shows it, in words; empty if it is not a matter of one problem."""


@dataclass(frozen=True)
class Check:
    """Something that a spec must hold to."""

    name: str
    asks: str
    """What must hold, in words."""
    find: Callable[[Subject], Iterator[Finding]]
    """Yields what does not hold."""
    needed: bool = False
    """If it fails, the checks after it say nothing."""


@dataclass(frozen=True)
class Outcome:
    """One check, done."""

    check: Check
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def on(bound: BoundProblem) -> str:
    """Describes a problem."""
    return bound.problem.describe()


_STD = 3.0
"""The largest standard deviation of logits: ordinary problems, on which everything is finite."""


def ordinary_problems(spec: Spec, count: int) -> Iterator[BoundProblem]:
    """Draws problems of a spec, as many at each head."""
    for head in spec.inputs:
        for rich in (True, False):
            seed = f"spec check {head} {rich}"
            for problem in Draws(dense_candidate(spec, head), "float32", seed, -(-count // 2), rich=rich).all():
                yield BoundProblem(spec, replace(problem, outliers=(), logit_std=min(problem.logit_std, _STD)))


@dataclass(frozen=True)
class Evaluated:
    """What a reference gives."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """Of each value per token that has one."""

    @property
    def named(self) -> dict[str, Tensor]:
        """Everything, by what people call it."""
        gradients = {f"the gradient of values.{name}": gradient for name, gradient in self.gradients.items()}
        return {"the loss": self.loss, **{f"metric {k!r}": v for k, v in self.metrics.items()}, **gradients}


def values_of(bound: BoundProblem) -> TokenValues:
    """Returns a problem's values per token, without a graph."""
    given = bound.dense.token_values(bound.bound_spec).given
    return TokenValues(**{name: value.detach() for name, value in given.items()})


def evaluate(bound: BoundSpec, values: TokenValues, fields: Mapping[str, Any], way: int = 0) -> Evaluated:
    """Runs the reference, or the same loss as it is also written.

    Args:
        bound: the spec with its options.
        values: of each token.
        fields: of the batch.
        way: which of ``bound.ways``.

    Raises:
        UsageError: if it raises, or returns something else than a loss that has a gradient.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in values.differentiable.items()}
    loss, metrics = bound.loss(values.replace(**leaves), fields, way)
    if not loss.requires_grad:
        raise UsageError(
            f"spec {bound.spec.name!r}: {bound.ways[way]} returned a loss that no value per token leads to; "
            "compute it from values, with torch, and detach nothing"
        )
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient  # pyright: ignore[reportUnnecessaryComparison]
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return Evaluated(loss.detach(), {name: metric.detach() for name, metric in metrics.items()}, gradients)


def evaluated(bound: BoundProblem) -> Evaluated:
    """Runs the reference on a problem."""
    return evaluate(bound.bound_spec, values_of(bound), bound.batch.known)


def unlike(one: Evaluated, other: Evaluated) -> str:
    """Returns the name of the first result that differs by more than float64 rounds; empty if none
    does.
    """
    for name, tensor in one.named.items():
        another = other.named.get(name)
        if another is None or not same(tensor, another):
            return name
    return ""


def same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal up to the rounding of float64.

    Sums in another order differ by some 1e-15 of their terms, and terms may cancel; 1e-9 is far
    from that, and from any mistake.
    """
    if one.shape != other.shape:
        return False
    scale = float(torch.nan_to_num(one.double()).abs().max()) if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9 * scale + 1e-12, equal_nan=True)


def another(tensor: Tensor) -> Tensor:
    """Returns another tensor of the same shape and kind."""
    if tensor.dtype is torch.bool:
        return ~tensor
    if tensor.is_floating_point():
        return torch.where(tensor.isfinite(), -0.75 * tensor - 0.25, tensor)
    return tensor.flip(0) if tensor.dim() else 2 * tensor + 1


def halves(bound: BoundProblem) -> list[range]:
    """Returns the sequences of both halves; nothing if there is a single group of them."""
    count, group = len(bound.batch.partition.lengths), bound.spec.group_size
    middle = count // group // 2 * group
    return [range(middle), range(middle, count)] if 0 < middle < count else []


def part_of(bound: BoundProblem, values: TokenValues, own: range) -> tuple[TokenValues, dict[str, Any], Tensor]:
    """Returns the values per token and the fields of some sequences, and which tokens (or
    sequences, where the head gives values of these) they are.

    What counts the whole batch stays that of the whole batch.
    """
    known = bound.batch.known
    sequences = torch.tensor(list(own), dtype=torch.int64)
    tokens = torch.isin(known["sequence"], sequences)
    held = sequences if HEADS[bound.problem.head].gives == "sequence" else tokens.nonzero().squeeze(1)
    taken = TokenValues(**{name: value[held] for name, value in values.given.items()})
    return taken, _fields_of_part(bound, known, own, tokens, sequences), held


def _fields_of_part(
    bound: BoundProblem, known: Mapping[str, Any], own: range, tokens: Tensor, sequences: Tensor
) -> dict[str, Any]:
    part = dict(known)
    for name, field in fields_of(bound.spec.batch_type).items():
        tensor: Any = known.get(name)
        for axis, dim in enumerate(field.dims):
            if dim in ("token", "sequence"):
                index = tokens.nonzero().squeeze(1) if dim == "token" else sequences
                tensor = tensor.index_select(axis, index)
        part[name] = tensor
    starts = known["cu_seqlens"][own.start : own.stop + 1]
    part |= {"sequence": known["sequence"][tokens] - own.start}
    part |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), starts - starts[0])
    if LOGIT_FILTER in known:
        part[LOGIT_FILTER] = known[LOGIT_FILTER][tokens]
    return part
