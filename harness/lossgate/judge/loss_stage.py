# SPDX-License-Identifier: Apache-2.0
"""Computes the loss of rounded runs with the reference's code, and its gradients.

Every operation that torch dispatches is rounded, forward and backward.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.round_every_operation import ERRORS, RoundEveryOperation, RoundNumbers
from lossgate.numerics.rounded_arithmetic import RoundedRun
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.outputs import LOGPROBS, LOSS, TOKEN_ENTROPY, Output, metric_output
from lossgate.specs.token_values import TokenValues


class RoundedLoss:
    """The stage from the values per token to the loss."""

    def __init__(self, batch: GlobalBatch, bound: BoundSpec, run: RoundedRun) -> None:
        """Prepares the stage.

        Args:
            batch: the tensors of the unsharded problem.
            bound: the spec with options, and with the outputs that will be compared.
            run: the members, and how they round.
        """
        self.batch, self.bound, self.spec, self.run = batch, bound, bound.spec, run

    def outputs(self, values: TokenValues) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
        """Returns every output except gradients, and the gradient of each value per token."""
        outputs: dict[Output, Tensor] = {LOGPROBS: values.logprobs} if "logprobs" in self.spec.outputs else {}
        if "token_entropy" in self.spec.outputs and "entropy" in values.given:
            outputs[TOKEN_ENTROPY] = values.entropy
        upstream: dict[str, Tensor] = {}
        if self.spec.reference is not None:
            scalars, upstream = self._scalars(values)
            outputs |= scalars
        outputs = {output: self._returned(output, tensor) for output, tensor in outputs.items()}
        for name, value in (("logprobs", "logprobs"), ("token_entropy", "entropy")):
            if (cotangent := self.batch.cotangents.get(name)) is not None:
                total = cotangent.expand(self.run.members, -1) + upstream.get(value, 0.0)
                upstream[value] = self.run.noise.round(total, self.run.stages.loss)
        return outputs, upstream

    def _returned(self, output: Output, x: Tensor) -> Tensor:
        """Rounds an output to the dtype in which it is returned.

        Loss and metrics come from the loss's arithmetic, so they are first rounded to its dtype.
        Log-probabilities and entropies are made before the loss.
        """
        to, arithmetic = self.run.stages.returned_in(output.name), self.run.stages.loss
        if output.kind == "token value":
            return self.run.noise.round(x, to)
        x = self.run.noise.round(x, arithmetic)
        return self.run.noise.round(x, to) if to.unit > arithmetic.unit else x

    def _scalars(self, values: TokenValues) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
        """Computes loss and metrics ``[M]``, and the gradients of the values per token."""
        # All inputs are expanded, so that each member rounds for itself.
        cotangent = self.batch.cotangents.get("loss", torch.zeros((), dtype=torch.float64))
        upstream = cotangent.expand(self.run.members)
        own = {name: self._cast(field) for name, field in self.batch.numbers.items()}
        given = {name: self._entering(value.detach()) for name, value in values.given.items()}
        extremes = {name: given.pop(name) for name in ("lowest", "highest") if name in given}
        primals = {name: value.requires_grad_() for name, value in given.items()}
        errors = self.run.noise.uniform(torch.Size((self.run.members, ERRORS)))
        with RoundEveryOperation(
            self.run.noise, self.run.stages.loss, log_softmax=self.run.stages.logprobs
        ) as rounding:
            loss, metrics = self._written_in_all_ways(rounding, extremes, own, primals, errors)
            found = torch.autograd.grad(loss, list(primals.values()), upstream, allow_unused=True)
        gradients = {name: g for name, g in zip(primals, found, strict=True) if g is not None and bool(g.any())}  # pyright: ignore[reportUnnecessaryComparison]
        scalars = {LOSS: loss, **{metric_output(name): metric for name, metric in metrics.items()}}
        return {output: tensor.detach() for output, tensor in scalars.items()}, gradients

    def _written_in_all_ways(
        self,
        rounding: RoundEveryOperation,
        extremes: dict[str, Tensor],
        own: dict[str, Tensor],
        primals: dict[str, Tensor],
        errors: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes loss and metrics ``[M]``.

        If the spec writes the loss in several ways, the members take turns: member i computes way
        ``i % ways``.
        """
        ways = min(len(self.bound.ways), self.run.members)

        def one_member(
            way: int, extremes: dict[str, Tensor], own: dict[str, Tensor], primals: dict[str, Tensor], errors: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            with RoundNumbers(errors, rounding):
                return self.bound.loss(TokenValues(**extremes, **primals), {**self.batch.known, **own}, way)

        def in_way(way: int) -> tuple[Tensor, dict[str, Tensor]]:
            members: Callable[..., tuple[Tensor, dict[str, Tensor]]] = torch.vmap(partial(one_member, way))
            given = (extremes, own, primals, errors)
            if ways == 1:
                return members(*given)
            return members(*tree_map(lambda of_all: of_all[way::ways], given))

        found = [in_way(way) for way in range(ways)]
        if ways == 1:
            return found[0]
        order = torch.cat([torch.arange(way, self.run.members, ways) for way in range(ways)]).argsort()
        loss = torch.cat([of_way for of_way, _ in found])[order]
        metrics = {name: torch.cat([of_way[name] for _, of_way in found])[order] for name in found[0][1]}
        return loss, metrics

    def _entering(self, value: Tensor) -> Tensor:
        """Returns values per token as the loss gets them: in the dtype of its arithmetic."""
        if self.run.stages.loss == FLOAT32:
            return value
        return torch.where(value.isfinite(), self.run.noise.round(value, self.run.stages.loss), value)

    def _cast(self, field: Tensor) -> Tensor:
        """Returns a field as the loss uses it, ``[M, *shape]``.

        A loss in a coarse dtype may cast the field, or compute with it as it is.
        """
        of_all = field.expand(self.run.members, *field.shape)
        if self.run.stages.loss == FLOAT32 or not field.is_floating_point():
            return of_all
        return torch.where(self.run.coins(of_all.dim()), self.run.stages.loss.nearest(field), of_all)
