# SPDX-License-Identifier: Apache-2.0
"""Sums over the tokens of a sequence, which ranks of cp share: reduced in forward alone."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lossgate.counterfactuals.counterfactual import Counterfactual, split
from lossgate.counterfactuals.seams import RIGHT, Outputs, Seams, run, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def sequence_sums(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields what comes of an all-reduce that autograd does not see."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    yield Counterfactual(
        name="sums over sequences reduced in forward alone",
        sentence="what is summed over cp for a sequence has the gradient of each rank's own tokens and loss alone",
        kind="ranks",
        seams=RIGHT,
        applies=split("cp"),
        todo="sum over cp in backward, too: an all-reduce whose backward is an all-reduce",
        computed=_in_forward_alone,
    )


def _in_forward_alone(setting: Setting) -> Outputs:
    """Adds up the gradients that the ranks of each cp index give, each of its own tokens."""
    found = run(setting)
    gradients = [output for output in found if output.kind == "gradient"]
    cp, total = setting.size("cp"), {output: torch.zeros_like(found[output]) for output in gradients}
    for index in range(cp):
        tokens = [own for rank, own in enumerate(setting.token_shards) if rank % cp == index]
        own = setting.mask_of(torch.cat(tokens))
        of_rank = run(setting, Seams(values=_Own(own).values, loss=_Own(own).loss))
        total = {output: total[output] + of_rank[output] for output in gradients}
    return {**found, **total}


class _Own:
    """One rank's view of a loss: gradients come from its own tokens, and reach these alone."""

    def __init__(self, own: Tensor) -> None:
        self._own = own

    def values(self, setting: Setting, values: TokenValues) -> TokenValues:
        return values.replace(**{name: self._cut(x) for name, x in values.given.items()})

    def loss(self, bound: BoundSpec, values: TokenValues, fields: Fields) -> tuple[Tensor, dict[str, Tensor]]:
        with _CutSums(self._own, fields["sequence"]):
            return bound.loss(values, fields)

    def _cut(self, x: Tensor) -> Tensor:
        return torch.where(self._own.reshape(-1, *[1] * (x.dim() - 1)), x, x.detach())


class _CutSums(TorchFunctionMode):
    """Cuts the gradients between sums over sequences and the tokens of other ranks."""

    def __init__(self, own: Tensor, sequence: Tensor) -> None:
        super().__init__()
        self._own, self._sequence = own, sequence

    def __torch_function__(
        self, func: Any, types: Collection[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and args[1] is self._sequence:
            return torch.where(self._own, found, found.detach())
        if name == "index_add" and args[2] is self._sequence:
            return with_gradient_of(found, func(*args[:3], torch.where(self._own, args[3], args[3].detach())))
        return found
