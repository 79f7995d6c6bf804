# SPDX-License-Identifier: Apache-2.0
"""One rank's rows of an lm-head: logits, and gradients of hidden states, weight and bias."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.numerics import check_temperature
from fused_losses.wrappers import check_parameter

# Newer versions of torch warn about the second names, older ones lack the first.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # pyright: ignore[reportDeprecated]

_ROWS = 4096
"""Rows of the weight's gradient that are computed at a time.

This applies if the matrix product itself cannot accumulate them in float32.
"""


def _unit(hidden: Tensor) -> Tensor | None:
    """Returns the divisor ``[1]`` that keeps sums over tokens in the range of float16.

    Args:
        hidden: ``[n, hidden]``.

    Returns:
        A number of at least 1 such that a sum of n rows of ``hidden / divisor`` cannot overflow;
        None for other dtypes and for empty tensors.
    """
    if hidden.dtype != torch.float16 or not hidden.numel():
        return None
    return (len(hidden) * hidden.abs().amax().float() / torch.finfo(torch.float16).max).clamp(min=1).reshape(1)


@dataclass(frozen=True)
class LmHead:
    """The lm-head ``z = softcap(hidden weight^T + bias) / temperature``.

    ``softcap(x) = cap tanh(x / cap)`` is that of Gemma 2 (arXiv:2408.00118). Matrix products run in
    ``matmul_dtype``, everything else in float32 (float64 for float64 inputs).
    """

    weight: Tensor
    """``[rows, hidden]``, in its own dtype."""
    bias: Tensor | None
    """``[rows]``, in its own dtype."""
    temperature: float
    softcap: float | None
    matmul_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def cast(self, x: Tensor) -> Tensor:
        """Converts to the dtype of matrix products."""
        return x.to(self.matmul_dtype)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Computes logits.

        Args:
            hidden: ``[n, hidden]``, already ``cast``.
            weight: ``[rows, hidden]``, already ``cast``.

        Returns:
            ``[n, rows]``, a new tensor in the compute dtype.
        """
        z = (hidden @ weight.T).to(self.dtype)
        if self.bias is not None:
            z += self.bias
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.temperature) if self.temperature != 1.0 else z

    def uncap_(self, dz: Tensor, z: Tensor) -> None:
        """Backpropagates through the soft-cap, in place.

        Args:
            dz: ``[n, rows]``, the gradient of the soft-cap's output; becomes that of its input.
            z: ``[n, rows]`` logits; overwritten.
        """
        assert self.softcap is not None
        dz *= z.mul_(self.temperature / self.softcap).square_().neg_().add_(1)


class HeadGradients:
    """Accumulates the gradients of weight and bias over chunks of tokens.

    Sums are float32 (float64 for float64 inputs) for every input dtype and chunk size.
    """

    def __init__(self, head: LmHead, weight: bool, bias: bool) -> None:
        self._head = head
        self.weight = torch.zeros(head.weight.shape, dtype=head.dtype, device=head.weight.device) if weight else None
        self.bias = torch.zeros(len(head.weight), dtype=head.dtype, device=head.weight.device) if bias else None

    def add(self, dlogits: Tensor, hidden: Tensor, rounded: Tensor) -> None:
        """Adds the gradients from one chunk of tokens.

        Args:
            dlogits: ``[n, rows]``, in the compute dtype.
            hidden: ``[n, hidden]``, in the dtype of matrix products.
            rounded: ``dlogits`` in the dtype of matrix products.
        """
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
    """Disables autocast inside a forward or backward.

    These passes choose their dtypes themselves. Autocast is on in forward but not in backward, so
    it would make the two disagree.
    """

    @wraps(pass_)
    def as_written(ctx: Any, *given: Any) -> Any:
        device = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return pass_(ctx, *given)

    return as_written


def chunks_of(tokens: int, chunk: int) -> Iterator[slice]:
    """Yields consecutive slices of at most ``chunk`` tokens."""
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def default_chunk(weight: Tensor) -> int:
    """Returns a number of tokens whose logits take about a quarter of the weight's gradient."""
    return max(64, weight.shape[1] // 4)


def gather_tokens(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers every rank's ``[tokens / tp, hidden]`` into ``[tokens, hidden]``: one all-gather."""
    whole = hidden.new_empty(len(hidden) * group.size(), hidden.shape[1])
    _all_gather(whole, hidden.contiguous(), group=group)
    return whole


def scatter_tokens(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums ``[tokens, hidden]`` over ranks and returns this rank's ``[tokens / tp, hidden]``.

    It takes one reduce-scatter.
    """
    part = grad.new_empty(len(grad) // group.size(), grad.shape[1])
    _reduce_scatter(part, grad, group=group)
    return part


def padded(grad: Tensor, like: Tensor) -> Tensor:
    """Converts a gradient to the dtype of ``like`` and appends zero rows up to its shape.

    The appended rows are the gradient of padding rows.
    """
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
    """Checks the arguments of kernels that start from hidden states.

    ``rows`` is the argument ``vocab_rows``; ``ranks`` is the number of ranks among which the tokens
    of hidden are split.

    Raises:
        ValueError: A shape, dtype or number does not fit, or a wrapper of the model has not
            gathered weight or bias; the message names it.
    """
    check_parameter("weight", weight, piece=weight.dim() == 1)
    if bias is not None:
        check_parameter("bias", bias)
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
    check_temperature(temperature)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap {softcap}: expected a positive number, or None for no cap")
    if rows is not None and not 0 <= rows <= weight.shape[0]:
        raise ValueError(
            f"vocab_rows {rows}: weight has {weight.shape[0]} rows; expected 0 to {weight.shape[0]}, or None for all"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk}: expected a positive number of tokens, or None to choose one")
