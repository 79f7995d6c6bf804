# SPDX-License-Identifier: Apache-2.0
"""The loss of rounded runs, as the reference has it, and the gradients of what it uses.

Every operation that torch dispatches is rounded, forward and backward.
"""

from typing import Any

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
    """The stage from values per token to the loss."""

    def __init__(self, batch: GlobalBatch, bound: BoundSpec, run: RoundedRun) -> None:
        """Prepares the stage.

        Args:
            batch: the tensors of the unsharded problem.
            bound: the spec with options, and with the outputs that will be compared.
            run: the members, and how they round.
        """
        self.batch, self.bound, self.spec, self.run = batch, bound, bound.spec, run

    def outputs(self, values: TokenValues) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
        """Returns every output that is no gradient, and the upstream gradient of each value per
        token.
        """
        outputs: dict[Output, Tensor] = {LOGPROBS: values.logprobs} if "logprobs" in self.spec.outputs else {}
        if "token_entropy" in self.spec.outputs and "entropy" in values.given:
            outputs[TOKEN_ENTROPY] = values.entropy
        upstream: dict[str, Tensor] = {}
        if self.spec.reference is not None:
            scalars, upstream = self._scalars(values)
            outputs |= scalars
        outputs = {output: self._returned(output, tensor) for output, tensor in outputs.items()}
        for name, value in {"logprobs": "logprobs", "token_entropy": "entropy"}.items():
            if (cotangent := self.batch.cotangents.get(name)) is not None:
                total = cotangent.expand(self.run.members, -1) + upstream.get(value, 0.0)
                upstream[value] = self.run.noise.round(total, self.run.stages.loss)
        return outputs, upstream

    def _returned(self, output: Output, x: Tensor) -> Tensor:
        """Rounds an output to the dtype in which it is returned; loss and metrics to that of the
        loss's arithmetic before.

        Log-probabilities and entropies are made before the loss. If they are not said to be
        returned in another dtype, they are in that of its arithmetic.
        """
        to = self.run.stages.returned_in(output.name)
        if output.kind == "token value":
            return self.run.noise.round(x, to)
        x = self.run.noise.round(x, self.run.stages.loss)
        return x if to.unit <= self.run.stages.loss.unit else self.run.noise.round(x, to)

    def _scalars(self, values: TokenValues) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
        """Computes loss and metrics ``[M]``, and the gradients of the values per token."""
        # Everything is expanded, so that each member rounds what it meets for itself.
        upstream = self.batch.cotangents.get("loss", torch.zeros((), dtype=torch.float64)).expand(self.run.members)
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
        """Computes loss and metrics ``[M]``, in another way in each member, as far as there are."""
        ways = min(len(self.bound.ways), self.run.members)

        def in_way(way: int) -> tuple[Tensor, dict[str, Tensor]]:
            def one_member(*given: Any) -> tuple[Tensor, dict[str, Tensor]]:
                extremes, own, primals, errors = given
                with RoundNumbers(errors, rounding):
                    return self.bound.loss(TokenValues(**extremes, **primals), {**self.batch.known, **own}, way)

            given = (extremes, own, primals, errors)
            if ways == 1:
                return torch.vmap(one_member)(*given)
            return torch.vmap(one_member)(*tree_map(lambda of_all: of_all[way::ways], given))

        found = [in_way(way) for way in range(ways)]
        loss, metrics = found[0]
        if ways == 1:
            return loss, metrics
        in_turn = torch.cat([torch.arange(way, self.run.members, ways) for way in range(ways)]).argsort()

        def together(*parts: Tensor) -> Tensor:
            return torch.cat(parts)[in_turn]

        return together(*(one for one, _ in found)), {
            name: together(*(others[name] for _, others in found)) for name in metrics
        }

    def _entering(self, value: Tensor) -> Tensor:
        """Returns values per token as the loss gets them, in the dtype of its arithmetic."""
        if self.run.stages.loss == FLOAT32:
            return value
        return torch.where(value.isfinite(), self.run.noise.round(value, self.run.stages.loss), value)

    def _cast(self, field: Tensor) -> Tensor:
        """Returns a field as the loss meets it, ``[M, *shape]``.

        A loss in a coarse dtype may cast a field, or compute with it as it is.
        """
        # Everything is expanded, so that each member rounds what it meets for itself.
        of_all = field.expand(self.run.members, *field.shape)
        if self.run.stages.loss == FLOAT32 or not field.is_floating_point():
            return of_all
        return torch.where(self.run.coins(of_all.dim()), self.run.stages.loss.nearest(field), of_all)
