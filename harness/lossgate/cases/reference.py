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
"""A part of a loss: its weight, and the fields that it has in place of the batch's."""


@dataclass(frozen=True)
class LossStage:
    """The results of the reference's loss stage, which starts from the values per token."""

    outputs: Mapping[Output, Tensor]
    """The outputs except gradients."""
    upstream: Mapping[str, Tensor]
    """The gradients of the values per token, by their names in ``TokenValues``."""
    logprobs: Tensor | None
    """The log-probabilities of ``TokenValues``; None if the loss does not use them."""


class DenseRun:
    """The reference on one batch, with any options.

    The stages up to the values per token are run once for all options that share them. So options
    that differ only in the loss cost little.
    """

    def __init__(self, batch: GlobalBatch, head: str) -> None:
        """Prepares to run the reference.

        Args:
            batch: the whole batch.
            head: where the kernel starts.
        """
        self._batch, self._head = batch, head
        self._leaves = {name: leaf.detach().requires_grad_() for name, leaf in batch.leaves.items()}
        self._values: dict[str, TokenValues] = {}
        self._stages: dict[str, LossStage] = {}

    def outputs(self, bound: BoundSpec) -> dict[Output, Tensor]:
        """Computes the outputs, and the gradient of each leaf.

        Args:
            bound: the spec with options, and with the outputs that will be compared.
        """
        return self._down_to_leaves(self.loss_stage(bound), bound)

    def in_parts(self, bound: BoundSpec, parts: Sequence[Part]) -> dict[Output, Tensor]:
        """Computes the same as ``outputs``, without metrics, for a loss that is a sum of parts.

        Args:
            bound: the spec with options.
            parts: the parts, whose weighted sum is the loss.
        """
        return self._down_to_leaves(self._run_loss(bound, parts), bound)

    def _down_to_leaves(self, stage: LossStage, bound: BoundSpec) -> dict[Output, Tensor]:
        """Returns the outputs of a loss stage with the gradients of the leaves."""
        values, leaves = self.token_values(bound), self._leaves
        roots = [values.given[name] for name in stage.upstream]
        found = torch.autograd.grad(roots, list(leaves.values()), list(stage.upstream.values()), retain_graph=True)
        gradients = dict(zip(HEADS[self._head].gradients(leaves).values(), found, strict=True))
        return {**stage.outputs, **gradients}

    def loss_stage(self, bound: BoundSpec) -> LossStage:
        """Computes the outputs except gradients of leaves, and the gradients of the values per
        token.
        """
        key = f"{bound.options} {bound.returned}"
        if key not in self._stages:
            self._stages[key] = self._run_loss(bound)
        return self._stages[key]

    def _run_loss(self, bound: BoundSpec, parts: Sequence[Part] | None = None) -> LossStage:
        with_graph = self.token_values(bound)
        given = with_graph.given
        per_token = {name: value.detach().requires_grad_() for name, value in given.items() if value.requires_grad}
        values = with_graph.replace(**per_token)
        outputs: dict[Output, Tensor] = {LOGPROBS: values.logprobs} if "logprobs" in bound.spec.outputs else {}
        if "token_entropy" in bound.spec.outputs and "entropy" in given:
            outputs[TOKEN_ENTROPY] = values.entropy
        if bound.spec.reference is not None:
            loss, metrics = self._loss(bound, values, parts)
            outputs |= {LOSS: loss, **{metric_output(name): metric for name, metric in metrics.items()}}
        roots = [_finite(_with_graph(outputs[bound.spec.output(name)], name, bound)) for name in self._batch.cotangents]
        cotangents = list(self._batch.cotangents.values())
        found = torch.autograd.grad(roots, list(per_token.values()), cotangents, allow_unused=True)
        gradients = zip(per_token, found, strict=True)
        upstream = {name: g for name, g in gradients if g is not None}  # pyright: ignore[reportUnnecessaryComparison]
        logprobs = with_graph.logprobs.detach() if "logprobs" in given else None
        return LossStage({output: tensor.detach() for output, tensor in outputs.items()}, upstream, logprobs)

    def _loss(
        self, bound: BoundSpec, values: TokenValues, parts: Sequence[Part] | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        known = self._batch.known
        if parts is None:
            return bound.loss(values, known)
        weighted = [weight * bound.loss(values, {**known, **own})[0] for weight, own in parts]
        return torch.stack(weighted).sum(), {}

    def token_stage(self, bound: BoundSpec) -> str:
        """Returns a name of the stages before the loss. Options with the same name share the values
        per token.
        """
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
            f"spec {bound.spec.name!r}: its reference returned a {name} without a gradient to the values per token; "
            "compute it from values, with torch, and do not detach"
        )
    return x


def _finite(x: Tensor) -> Tensor:
    """Returns ``x`` with zeros in place of numbers that are not finite.

    These are the log-probabilities -inf of labels that a filter leaves out. They have no gradient.
    """
    return torch.where(x.isfinite(), x, 0.0)
