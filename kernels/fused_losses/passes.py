# SPDX-License-Identifier: Apache-2.0
"""Decorators and checks for the forward and backward passes of our autograd functions."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def without_autocast(pass_: Callable[..., Any]) -> Callable[..., Any]:
    """Disables autocast inside a forward or backward.

    These passes choose their dtypes themselves: the caller has asked for that of autocast. Autocast
    is on in forward but not in backward, so with it the two passes would disagree.
    """

    @wraps(pass_)
    def as_written(ctx: Any, *given: Any) -> Any:
        device = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return pass_(ctx, *given)

    return as_written


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a second derivative raise instead of being wrong.

    Gradients are computed without a graph. If the caller asked for a graph (``create_graph``), they
    get one whose backward raises. Torch's decorator of this name does so only if the upstream
    gradients need a gradient themselves. The upstream gradient of a loss is the constant 1, so a
    gradient penalty through a backbone would be wrong silently.
    """

    @wraps(backward)
    def as_written(ctx: Any, *upstream: Any) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return gradients
        return tuple(None if g is None else _Final.apply(g.detach().requires_grad_()) for g in gradients)

    return as_written


class _Final(torch.autograd.Function):
    """A gradient that can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        raise RuntimeError(
            "fused_losses computes first derivatives only, and this is a second one (a gradient penalty, "
            "or create_graph=True); compute that loss from logits in plain torch"
        )


_is_transformed: Callable[[Tensor], bool] = getattr(torch._C, "_functorch").is_functorch_wrapped_tensor  # noqa: B009


def check_not_transformed(**tensors: Tensor | None) -> None:
    """Checks that arguments are tensors, and that no transform of ``torch.func`` is at work.

    Raises:
        ValueError: An argument is no tensor, or belongs to ``vmap``, ``grad`` or another transform.
    """
    for name, x in tensors.items():
        if x is not None and not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name} is a {type(x).__name__}: expected a tensor")
        if x is not None and not torch.compiler.is_compiling() and _is_transformed(x):
            raise ValueError(
                f"{name} belongs to a transform of torch.func (vmap, grad, jvp, ...), which these kernels do not "
                "support; use torch.autograd.grad, and a batch of tokens in place of vmap"
            )
