# SPDX-License-Identifier: Apache-2.0
"""Tiled heads with the bugs that such heads have had. The checks must see each of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distributed_tests.wrappers.losses import TILES, Metrics, Way, dense_logprobs, grpo, weight_of
from distributed_tests.wrappers.model import Batch
from fused_losses import linear_logprobs, run_in_forward
from fused_losses.wrappers import wrapped_module


class _Direct(torch.autograd.Function):
    """Adds gradients of parameters to ``.grad`` in backward, where wrappers do not see them.

    Autograd accumulates only those of the first ``accumulated`` tiles, and its hooks fire then.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: nn.Module, labels: Tensor, accumulated: int) -> Tensor:
        ctx.head, ctx.labels, ctx.accumulated = head, labels, accumulated
        ctx.save_for_backward(hidden)
        tiles = zip(hidden.tensor_split(TILES), labels.tensor_split(TILES), strict=True)
        return torch.cat([dense_logprobs(head.forward, x, y) for x, y in tiles])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        trained = [parameter for parameter in ctx.head.parameters() if parameter.requires_grad]
        rows = []
        tiles = (tensor.tensor_split(TILES) for tensor in (hidden, ctx.labels, upstream))
        for tile, (x, labels, u) in enumerate(zip(*tiles, strict=True)):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                logprobs = dense_logprobs(ctx.head.forward, x, labels)
            if tile < ctx.accumulated:
                torch.autograd.backward(logprobs, u)
                rows.append(x.grad)
                continue
            of_x, *grads = torch.autograd.grad(logprobs, [x, *trained], u)
            rows.append(of_x)
            for parameter, grad in zip(trained, grads, strict=True):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return torch.cat(rows), None, None, None


def _direct(accumulated: int) -> Way:
    def way(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
        def logprobs(head: nn.Module, hidden: Tensor) -> Tensor:
            return _Direct.apply(hidden, head, batch.labels, accumulated)  # type: ignore[return-value]

        return grpo(run_in_forward(head, logprobs, hidden), batch, tokens)

    return way


def _without_adapters(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    """Computes the right loss, but takes the adapters for constants."""

    def logprobs(head: Any, hidden: Tensor) -> Tensor:
        weight = head.base_layer.weight + head.get_delta_weight("default").detach()
        return dense_logprobs(lambda x: x @ weight.T, hidden, batch.labels)

    return grpo(run_in_forward(head, logprobs, hidden), batch, tokens)


def _gathering_in_every_tile(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    """Calls the head for every tile, so that its hooks gather and reduce for every tile."""
    tiles = zip(hidden.tensor_split(TILES), batch.labels.tensor_split(TILES), strict=True)
    return grpo(torch.cat([dense_logprobs(head, x, labels) for x, labels in tiles]), batch, tokens)


def _outside(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    """Uses the weight without calling the wrapper of the head, which nothing can see."""
    inner = wrapped_module(head)
    assert inner is not None
    return grpo(linear_logprobs(hidden, weight_of(inner), batch.labels).logprobs, batch, tokens)


def _dense_outside(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    inner = wrapped_module(head)
    assert inner is not None
    return grpo(dense_logprobs(inner, hidden, batch.labels), batch, tokens)


BUGS: Mapping[str, Way] = {
    "gradients bypass autograd": _direct(0),
    "the reducer sees the first tile alone": _direct(1),
    "the adapters' gradients are dropped": _without_adapters,
    "weights are gathered in every tile": _gathering_in_every_tile,
    "the head's wrapper is not called": _outside,
    "the dense head's wrapper is not called": _dense_outside,
}
