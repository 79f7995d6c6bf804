# SPDX-License-Identifier: Apache-2.0
"""The problems on which a reference is checked, and what it gives on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.dense_candidates import dense_candidate
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues

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
