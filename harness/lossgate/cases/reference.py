# SPDX-License-Identifier: Apache-2.0
"""Runs the dense reference of a spec in float64 on the whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import LOGPROBS, LOSS, TOKEN_ENTROPY, Output, metric_output
from lossgate.specs.token_values import TokenValues

Part = tuple[float, Mapping[str, Any]]
"""A weight, and the fields that a part of the loss sees in place of the batch's."""


@dataclass(frozen=True)
class LossStage:
    """The reference from the values per token on."""

    outputs: Mapping[Output, Tensor]
    """Values and metrics."""
    upstream: Mapping[str, Tensor]
    """The gradient of each of the values per token, by its name in ``TokenValues``."""
    logprobs: Tensor | None
    """Of ``TokenValues``, if the loss uses them."""


class DenseRun:
    """The reference on one batch, with any options.

    The stages up to the values per token are run once for all options that share them. Others that
    differ in the loss alone then cost little.
    """

    def __init__(self, batch: GlobalBatch, head: str) -> None:
        """Prepares runs.

        Args:
            batch: the whole batch.
            head: where the kernel starts.
        """
        self._batch, self._head = batch, head
        self._leaves = {name: leaf.detach().requires_grad_() for name, leaf in batch.leaves.items()}
        self._values: dict[str, TokenValues] = {}
        self._stages: dict[str, LossStage] = {}

    def outputs(self, bound: BoundSpec) -> dict[Output, Tensor]:
        """Computes values, metrics, and the gradient of each leaf.

        Args:
            bound: the spec with options, and with the outputs that will be compared.
        """
        return self._down_to_leaves(self.loss_stage(bound), bound)

    def in_parts(self, bound: BoundSpec, parts: Sequence[Part]) -> dict[Output, Tensor]:
        """Computes the same as ``outputs`` with a loss that is put together of parts, and without
        metrics.

        Args:
            bound: the spec with options.
            parts: the loss is their weighted sum.
        """
        return self._down_to_leaves(self._run_loss(bound, parts), bound)

    def _down_to_leaves(self, stage: LossStage, bound: BoundSpec) -> dict[Output, Tensor]:
        values, leaves = self.token_values(bound), self._leaves
        roots = [values.given[name] for name in stage.upstream]
        gradients = torch.autograd.grad(roots, list(leaves.values()), list(stage.upstream.values()), retain_graph=True)
        return {**stage.outputs, **dict(zip(HEADS[self._head].gradients(leaves).values(), gradients, strict=True))}

    def loss_stage(self, bound: BoundSpec) -> LossStage:
        """Computes values and metrics, and the gradients of the values per token."""
        key = f"{bound.options} {bound.returned}"
        if key not in self._stages:
            self._stages[key] = self._run_loss(bound)
        return self._stages[key]

    def _run_loss(self, bound: BoundSpec, parts: Sequence[Part] | None = None) -> LossStage:
        whole = self.token_values(bound)
        given = whole.given
        per_token = {name: value.detach().requires_grad_() for name, value in given.items() if value.requires_grad}
        values = whole.replace(**per_token)
        outputs: dict[Output, Tensor] = {LOGPROBS: values.logprobs} if "logprobs" in bound.spec.outputs else {}
        if "token_entropy" in bound.spec.outputs and "entropy" in given:
            outputs[TOKEN_ENTROPY] = values.entropy
        if bound.spec.reference is not None:
            loss, metrics = self._loss(bound, values, parts)
            outputs |= {LOSS: loss, **{metric_output(name): metric for name, metric in metrics.items()}}
        roots = [_finite(_with_graph(outputs[bound.spec.output(name)], name, bound)) for name in self._batch.cotangents]
        cotangents = list(self._batch.cotangents.values())
        gradients = torch.autograd.grad(roots, list(per_token.values()), cotangents, allow_unused=True)
        found = {output: tensor.detach() for output, tensor in outputs.items()}
        found_of = zip(per_token, gradients, strict=True)
        upstream = {name: g for name, g in found_of if g is not None}  # pyright: ignore[reportUnnecessaryComparison]
        logprobs = whole.logprobs.detach() if "logprobs" in given else None
        return LossStage(found, upstream, logprobs)

    def _loss(
        self, bound: BoundSpec, values: TokenValues, parts: Sequence[Part] | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        known = self._batch.known
        if parts is None:
            return bound.loss(values, known)
        return torch.stack([weight * bound.loss(values, {**known, **own})[0] for weight, own in parts]).sum(), {}

    def token_stage(self, bound: BoundSpec) -> str:
        """Names what the values per token are computed with: options of one name share them."""
        return bound.token_stage if HEADS[self._head].has_logits else ""

    def token_values(self, bound: BoundSpec) -> TokenValues:
        """Computes the values per token."""
        name = self.token_stage(bound)
        if name not in self._values:
            self._values[name] = bound.token_values(self._head, self._leaves, self._batch.fields)
        return self._values[name]


def _with_graph(x: Tensor, name: str, bound: BoundSpec) -> Tensor:
    if not x.requires_grad:
        raise UsageError(
            f"spec {bound.spec.name!r}: its reference returned a {name} that no value per token leads to; "
            "compute it from values, with torch, and detach nothing"
        )
    return x


def _finite(x: Tensor) -> Tensor:
    """Returns ``x`` with zeros in place of the log-probabilities of labels that a filter left out.

    They are -inf, which no gradient can move.
    """
    return torch.where(x.isfinite(), x, 0.0)
