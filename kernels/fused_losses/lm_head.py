# SPDX-License-Identifier: Apache-2.0
"""A rank's rows of an lm-head: logits of some tokens, and their gradients back to hidden states, weight and bias."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer versions of torch warn of the second names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # pyright: ignore[reportDeprecated]

_ROWS = 4096
"""Rows of the weight's gradient that are made at a time where it is not the matrix product itself that adds them up."""


def _unit(hidden: Tensor) -> Tensor | None:
    """``[1]``: by which to divide ``hidden [n, H]``, lest a sum of n of its rows is more than float16 holds; None for other dtypes."""
    if hidden.dtype != torch.float16 or not hidden.numel():
        return None
    return (len(hidden) * hidden.abs().amax().float() / torch.finfo(torch.float16).max).clamp(min=1).reshape(1)


@dataclass(frozen=True)
class LmHead:
    """``z = softcap(hidden weight^T + bias) / temperature``, where ``softcap(x) = cap tanh(x / cap)`` (Gemma 2, arXiv:2408.00118).

    Matrix products in ``matmul_dtype``, everything else in float32 (float64 for float64 inputs).
    """

    weight: Tensor
    """``[rows, H]``, in its own dtype."""
    bias: Tensor | None
    temperature: float
    softcap: float | None
    matmul_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of computation."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def cast(self, x: Tensor) -> Tensor:
        """To the dtype of matrix products."""
        return x.to(self.matmul_dtype)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """``[n, rows]``, a new tensor. ``hidden [n, H]`` and ``weight [rows, H]``: both ``cast``."""
        z = (hidden @ weight.T).to(self.dtype)
        if self.bias is not None:
            z += self.bias
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.temperature) if self.temperature != 1.0 else z

    def uncap_(self, dz: Tensor, z: Tensor) -> None:
        """Make ``dz``, the gradient of what comes out of the soft-cap, that of what goes in. ``z``: the logits, which are overwritten."""
        assert self.softcap is not None
        dz *= z.mul_(self.temperature / self.softcap).square_().neg_().add_(1)


class HeadGradients:
    """Adds up the gradients of weight and bias over chunks of tokens, in float32 whatever the inputs' dtype and the chunks."""

    def __init__(self, head: LmHead, weight: bool, bias: bool) -> None:
        self._head = head
        self.weight = torch.zeros(head.weight.shape, dtype=head.dtype, device=head.weight.device) if weight else None
        self.bias = torch.zeros(len(head.weight), dtype=head.dtype, device=head.weight.device) if bias else None

    def add(self, dlogits: Tensor, hidden: Tensor, rounded: Tensor) -> None:
        """Those of ``dlogits [n, rows]``, with ``rounded`` the same in the dtype of matrix products, and ``hidden [n, H]`` in that dtype too."""
        if self.bias is not None:
            self.bias += dlogits.sum(0)
        if self.weight is None:
            return
        if rounded.dtype == self.weight.dtype:
            self.weight.addmm_(rounded.T, hidden)
            return
        unit = _unit(hidden)
        if unit is not None:
            hidden = (hidden.float() / unit).half()
        for start in range(0, len(self.weight), _ROWS):
            rows = slice(start, start + _ROWS)
            product = rounded[:, rows].T @ hidden
            self.weight[rows] += product if unit is None else product.float().mul_(unit)


def without_autocast(pass_: Callable[..., Any]) -> Callable[..., Any]:
    """A forward or backward that says itself in which dtype it computes: autocast is on in the one, and not in the other."""

    @wraps(pass_)
    def as_written(ctx: Any, *given: Any) -> Any:
        device = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return pass_(ctx, *given)

    return as_written


def chunks_of(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def default_chunk(weight: Tensor) -> int:
    """Tokens, so that a chunk's logits take about a quarter of what the weight's gradient does."""
    return max(64, weight.shape[1] // 4)


def gather_tokens(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[T / tp, H] -> [T, H]``: one all-gather."""
    whole = hidden.new_empty(len(hidden) * group.size(), hidden.shape[1])
    _all_gather(whole, hidden.contiguous(), group=group)
    return whole


def scatter_tokens(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[T, H] -> [T / tp, H]``, summed over ranks: one reduce-scatter."""
    part = grad.new_empty(len(grad) // group.size(), grad.shape[1])
    _reduce_scatter(part, grad, group=group)
    return part


def padded(grad: Tensor, like: Tensor) -> Tensor:
    """In the dtype and with the rows of ``like``; those of padding are zero."""
    if grad.shape == like.shape:
        return grad.to(like.dtype)
    whole = torch.zeros_like(like)
    whole[: len(grad)] = grad
    return whole


def check_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    rows: int | None,
    chunk: int | None,
    ranks: int,
) -> None:
    """Raises ``ValueError`` that names the argument. ``ranks``: over which hidden's tokens are split."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [tokens, H] and [vocab, H]"
        )
    if labels.shape != (len(hidden) * ranks,):
        split = f" (hidden {list(hidden.shape)} on each of {ranks} ranks, with sequence_parallel)" if ranks > 1 else ""
        raise ValueError(f"labels {list(labels.shape)}: expected one for each of {len(hidden) * ranks} tokens{split}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: expected one dtype; cast one of them")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)}: expected one for each of {weight.shape[0]} rows of weight")
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: expected a positive number; for greedy decoding there is no log-probability"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap {softcap}: expected a positive number, or None for no cap")
    if rows is not None and not 0 <= rows <= weight.shape[0]:
        raise ValueError(f"vocab_rows {rows}: weight has {weight.shape[0]} rows")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk}: expected a positive number of tokens, or None to choose one")
