# SPDX-License-Identifier: Apache-2.0
"""Kernels with a fault mended from outside: they tell whether it breaks several properties."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lossgate.declaration.candidate import Candidate, Kernel, Outputs
from lossgate.specs.outputs import RETURNED


class _Copied(torch.autograd.Function):
    """The identity, which hands out copies: of a tensor in forward, of its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _copy(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _copy(gradient)


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor with the same strides, in memory of its own."""
    memory = tensor.detach().untyped_storage().clone()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def with_copies(candidate: Candidate) -> Kernel:
    """Returns a kernel that writes to copies of its inputs and of its upstream gradients."""

    def mended(inputs: Any, options: Any, mesh: Any) -> Outputs:
        given = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
        outputs = _outputs(candidate, replace(inputs, **_each(given, _Copied.apply)), options, mesh)
        return replace(outputs, **_each(_returned(outputs), _Copied.apply))

    return mended


def with_grad(candidate: Candidate) -> Kernel:
    """Returns a kernel that does not see ``torch.no_grad()``."""

    def mended(inputs: Any, options: Any, mesh: Any) -> Outputs:
        if torch.is_grad_enabled():
            return _outputs(candidate, inputs, options, mesh)
        with torch.enable_grad():
            outputs = _outputs(candidate, inputs, options, mesh)
        return replace(outputs, **_each(_returned(outputs), Tensor.detach))

    return mended


def with_something_trained(candidate: Candidate) -> Kernel:
    """Returns a kernel that computes 0 times a call with all tokens trained, if none is."""

    def mended(inputs: Any, options: Any, mesh: Any) -> Outputs:
        if bool(inputs.mask.any()):
            return _outputs(candidate, inputs, options, mesh)
        counts = {name: getattr(inputs, name).clamp(min=1) for name in candidate.spec.names_of_counts}
        trained = replace(inputs, mask=torch.ones_like(inputs.mask), **counts)
        outputs = _outputs(candidate, trained, options, mesh)
        return replace(outputs, **_each(_returned(outputs), lambda returned: 0.0 * returned))

    return mended


def with_zeros(candidate: Candidate) -> Kernel:
    """Returns a kernel whose inputs are 0 where the mask is false."""

    def mended(inputs: Any, options: Any, mesh: Any) -> Outputs:
        mask = inputs.mask
        floats = {
            name: value
            for name, value in vars(inputs).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == mask.shape
        }
        selected = _each(floats, lambda value: torch.where(mask, value, 0.0))
        return _outputs(candidate, replace(inputs, **selected), options, mesh)

    return mended


def _each(tensors: dict[str, Tensor], change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {name: change(tensor) for name, tensor in tensors.items()}


def _outputs(candidate: Candidate, inputs: Any, options: Any, mesh: Any) -> Outputs:
    returned = candidate.kernel(inputs, options, mesh)
    return returned if isinstance(returned, Outputs) else Outputs(loss=returned)


def _returned(outputs: Outputs) -> dict[str, Tensor]:
    """Returns the outputs that are no metrics, by name."""
    given = {name: getattr(outputs, name) for name in RETURNED}
    return {name: tensor for name, tensor in given.items() if tensor is not None}
