# SPDX-License-Identifier: Apache-2.0
"""Candidates that are right on the CPU and wrong on any other device, each in one way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import lossgate

Total = Callable[[Tensor, Tensor], Tensor]
"""Adds up the numbers ``[tokens]`` where the mask holds."""


def nll(total: Total) -> Callable[..., Tensor]:
    """Returns a kernel whose sum over tokens is ``total``."""

    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        given = {x.device.type for x in vars(inputs).values() if isinstance(x, Tensor)}
        assert given == {mesh.device_type}, "on one device alone, no mistake would be seen"
        logprobs = inputs.logits.float().log_softmax(-1).gather(1, inputs.labels[:, None]).squeeze(1)
        return -total(logprobs, inputs.mask) / inputs.valid_tokens.clamp(min=1)

    return kernel


def declared(total: Total) -> lossgate.Candidate:
    return lossgate.candidate("nll", head="logits", name=total.__name__)(nll(total))


@declared
def no_mistake(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs, 0.0).sum()


@declared
def tensor_on_the_cpu(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs, torch.zeros(len(mask))).sum()


@declared
def item(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs[: mask.sum().item()].sum()


@declared
def branch(logprobs: Tensor, mask: Tensor) -> Tensor:
    return (torch.where(mask, logprobs, 0.0) if mask.any() else 0.0 * logprobs).sum()


@declared
def boolean_index(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs[mask].sum()


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, mask: Tensor, in_backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.in_backward = in_backward
        return torch.where(mask, logprobs, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return ctx.in_backward(upstream * mask), None, None


@declared
def tensor_on_the_cpu_in_backward(logprobs: Tensor, mask: Tensor) -> Tensor:
    return _Summed.apply(logprobs, mask, lambda grad: grad + torch.zeros(len(grad)))  # type: ignore[return-value]


@declared
def item_in_backward(logprobs: Tensor, mask: Tensor) -> Tensor:
    return _Summed.apply(logprobs, mask, lambda grad: grad * grad.abs().amax().item())  # type: ignore[return-value]
