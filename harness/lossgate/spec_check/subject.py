# SPDX-License-Identifier: Apache-2.0
"""A spec that is checked, its problems, and the results of its reference on a problem or a part."""

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
    """A spec that is checked, with problems."""

    spec: Spec
    problems: Sequence[BoundProblem]
    """Ordinary problems, of every head."""

    @property
    def with_loss(self) -> Sequence[BoundProblem]:
        """The problems; none if the spec has no loss."""
        return self.problems if self.spec.reference is not None else ()


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a spec."""

    seen: str
    """What was seen."""
    change: str
    """What to change."""
    problem: str = ""
    """A problem that shows it, in words; empty if no single problem does."""


@dataclass(frozen=True)
class Check:
    """Something that must hold of a spec."""

    name: str
    asks: str
    """What must hold, in words."""
    find: Callable[[Subject], Iterator[Finding]]
    """Yields what is wrong; nothing if it holds."""
    needed: bool = False
    """Whether the later checks mean nothing if it fails."""


@dataclass(frozen=True)
class Outcome:
    """The findings of a check."""

    check: Check
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return not self.findings


def first_finding(
    problems: Sequence[BoundProblem], find: Callable[[BoundProblem], Finding | None]
) -> Iterator[Finding]:
    """Yields the finding of a function on the first problem on which it finds something."""
    for bound in problems:
        finding = find(bound)
        if finding is not None:
            yield replace(finding, problem=bound.problem.describe())
            return


_STD = 3.0
"""The largest standard deviation of logits, so that everything is finite."""


def ordinary_problems(spec: Spec, count: int) -> Iterator[BoundProblem]:
    """Draws problems of a spec for each head, half of them with many kinds of tokens.

    Args:
        spec: the spec.
        count: how many problems are drawn for each head. If it is odd, one more is drawn.
    """
    half = -(-count // 2)
    for head in spec.inputs:
        for rich in (True, False):
            draws = Draws(dense_candidate(spec, head), "float32", f"spec check {head} {rich}", half, rich=rich)
            for problem in draws.all():
                yield BoundProblem(spec, replace(problem, outliers=(), logit_std=min(problem.logit_std, _STD)))


@dataclass(frozen=True)
class Evaluated:
    """The results of a reference."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """The gradient of each differentiable value per token, by name."""

    @property
    def named(self) -> dict[str, Tensor]:
        """All results, by the names that findings use."""
        metrics = {f"metric {name!r}": metric for name, metric in self.metrics.items()}
        gradients = {f"the gradient of values.{name}": gradient for name, gradient in self.gradients.items()}
        return {"the loss": self.loss, **metrics, **gradients}


def values_of(bound: BoundProblem) -> TokenValues:
    """Returns the values per token of a problem, detached."""
    given = bound.dense.token_values(bound.bound_spec).given
    return TokenValues(**{name: value.detach() for name, value in given.items()})


def evaluate(bound: BoundSpec, values: TokenValues, fields: Mapping[str, Any], way: int = 0) -> Evaluated:
    """Runs the reference, or another function that computes the same loss.

    Args:
        bound: the spec with its options.
        values: the values per token.
        fields: the fields of the batch.
        way: the index of the function in ``bound.ways``; 0 is the reference.

    Raises:
        UsageError: if the function raises, or returns no loss with a gradient.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in values.differentiable.items()}
    loss, metrics = bound.loss(values.replace(**leaves), fields, way)
    if not loss.requires_grad:
        raise UsageError(
            f"spec {bound.spec.name!r}: {bound.ways[way]} returned a loss without a gradient to the values per "
            "token; compute it from values, with torch, and do not detach"
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
    """Returns the name of the first result in ``one`` that ``other`` lacks or has with another
    value, apart from rounding in float64; empty if there is none.
    """
    others = other.named
    for name, tensor in one.named.items():
        if name not in others or not same(tensor, others[name]):
            return name
    return ""


def same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal up to the rounding of float64.

    Sums in another order differ by about 1e-15 of their terms, and terms may cancel. 1e-9 is far
    above that, and far below what a mistake changes.
    """
    if one.shape != other.shape:
        return False
    scale = float(torch.nan_to_num(one.double()).abs().max()) if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9 * scale + 1e-12, equal_nan=True)


def another(tensor: Tensor) -> Tensor:
    """Returns a tensor with other entries, of the same shape and kind."""
    if tensor.dtype is torch.bool:
        return ~tensor
    if tensor.is_floating_point():
        return torch.where(tensor.isfinite(), -0.75 * tensor - 0.25, tensor)
    return tensor.flip(0) if tensor.dim() else 2 * tensor + 1


def halves(bound: BoundProblem) -> list[range]:
    """Returns the sequences of each half; nothing if there are fewer than two groups of these."""
    count, group = len(bound.batch.partition.lengths), bound.spec.group_size
    groups_in_half = count // group // 2
    middle = groups_in_half * group
    return [range(middle), range(middle, count)] if groups_in_half else []


def part_of(bound: BoundProblem, values: TokenValues, own: range) -> tuple[TokenValues, dict[str, Any], Tensor]:
    """Returns a batch of some of the sequences. Counts of the whole batch stay as they are.

    Returns:
        The values and the fields of these sequences, and the indices of these values in the whole
        batch: of tokens, or of sequences if the head gives a value for each sequence.
    """
    known = bound.batch.known
    sequences = torch.tensor(list(own), dtype=torch.int64)
    tokens = torch.isin(known["sequence"], sequences)
    gives_sequences = HEADS[bound.problem.head].gives == "sequence"
    held = sequences if gives_sequences else tokens.nonzero().squeeze(1)
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
