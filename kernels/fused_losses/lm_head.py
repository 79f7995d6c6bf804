# SPDX-License-Identifier: Apache-2.0
"""One rank's rows of an lm-head: logits, and gradients of hidden states, weight and bias."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import check_flags, check_integer, check_label_dtype, check_setting
from fused_losses.numerics import check_temperature
from fused_losses.ranks import alone
from fused_losses.wrappers import check_parameter

# Newer versions of torch warn about the second names, and older versions lack the first names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # pyright: ignore[reportDeprecated]

_ROWS = 4096
"""Rows of the weight's gradient whose product is held at a time on a GPU."""

_PRODUCTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of matrix products."""


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
            dz: ``[n, rows]``, the gradient of the soft-cap's output. It becomes the gradient of the
                soft-cap's input.
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

        A product in a coarse dtype would round, once for each chunk. A GPU gives it in float32;
        elsewhere the factors are converted.

        Args:
            dlogits: ``[n, rows]``, in the compute dtype.
            hidden: ``[n, hidden]``, in the dtype of matrix products.
            rounded: ``dlogits`` in the dtype of matrix products.
        """
        if self.bias is not None:
            self.bias += dlogits.sum(0)
        if self.weight is None:
            return
        if hidden.is_cuda and rounded.dtype in (torch.float16, torch.bfloat16):
            for start in range(0, len(self.weight), _ROWS):
                rows = slice(start, start + _ROWS)
                self.weight[rows] += torch.mm(rounded[:, rows].T, hidden, out_dtype=torch.float32)
        elif rounded.dtype == self.weight.dtype:
            self.weight.addmm_(rounded.T, hidden)
        else:
            self.weight.addmm_(dlogits.T, hidden.to(self.weight.dtype))


def chunks_of(tokens: int, chunk: int) -> Iterator[slice]:
    """Yields consecutive slices of at most ``chunk`` tokens."""
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def default_chunk(weight: Tensor) -> int:
    """Returns an eighth of the hidden size, and at least 32 tokens.

    From hidden size 256 on, the float32 logits of a chunk then take a quarter of the memory of a
    bfloat16 weight.
    """
    return max(32, weight.shape[1] // 8)


def dtype_of_products(hidden: Tensor, weight: Tensor, matmul_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the caller's dtype of matrix products, or else autocast's, or that of the inputs."""
    return matmul_dtype or _dtype_of_autocast(hidden, weight) or weight.dtype


def _dtype_of_autocast(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast casts the inputs of ``F.linear``; None if to none."""
    device, cast = hidden.device.type, all(x.is_floating_point() and x.dtype != torch.float64 for x in (hidden, weight))
    return torch.get_autocast_dtype(device) if cast and torch.is_autocast_enabled(device) else None


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
    *,
    temperature: float,
    softcap: float | None,
    vocab_start: int | None,
    vocab_rows: int | None,
    tp_group: dist.ProcessGroup | None,
    matmul_dtype: torch.dtype | None,
    chunk: int | None,
) -> None:
    """Checks the arguments of kernels that start from hidden states.

    ``flatten_tokens`` has already checked that hidden states and labels fit each other.

    Raises:
        ValueError: A shape, dtype or number does not fit, or a wrapper of the model has not
            gathered weight or bias; the message names it.
    """
    check_parameter("weight", weight, piece=weight.dim() == 1)
    if bias is not None:
        check_parameter("bias", bias)
    if weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [tokens, H] and [vocab, H]"
        )
    check_label_dtype(labels)
    if hidden.dtype != weight.dtype and _dtype_of_autocast(hidden, weight) is None:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: expected one dtype; cast one of them, or enter "
            "torch.autocast"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)}: expected one for each of {weight.shape[0]} rows of weight")
    check_temperature(temperature)
    if softcap is not None:
        check_setting("softcap", softcap, above=0, otherwise="or None for no cap")
    if matmul_dtype is not None and matmul_dtype not in _PRODUCTS:
        expected = ", ".join(map(str, _PRODUCTS))
        raise ValueError(
            f"matmul_dtype {matmul_dtype!r}: expected {expected}, or None for the dtype of autocast or hidden"
        )
    if chunk is not None:
        check_integer("chunk", chunk, least=1, otherwise="or None to choose one")
    if tp_group is None and is_marked_as_shard(weight):
        raise ValueError(
            "weight is marked as a shard of tensor parallelism (tensor_model_parallel), but there is no tp_group; "
            "pass it, with vocab_start; a group of one rank will do if the vocabulary is whole here"
        )
    check_split(len(weight), "weight", "rows", vocab_start, vocab_rows, tp_group)


def ranks_of_tokens(sequence_parallel: bool, tp_group: dist.ProcessGroup | None) -> int:
    """Returns the number of ranks over which sequence parallelism splits the tokens; 1 without it.

    Raises:
        ValueError: There is no group of ranks that share the tokens.
    """
    check_flags(sequence_parallel=sequence_parallel)
    if sequence_parallel and tp_group is None:
        raise ValueError("sequence_parallel True: expected a tp_group, whose ranks share the tokens; or leave it out")
    return tp_group.size() if sequence_parallel and tp_group is not None else 1


def check_split(
    size: int,
    name: str,
    parts: str,
    vocab_start: int | None,
    vocab_rows: int | None,
    tp_group: dist.ProcessGroup | None,
) -> None:
    """Checks the arguments about the split of the vocabulary.

    Args:
        size: how many rows or columns this rank has.
        name: the name of the argument that has them.
        parts: "rows" or "columns".
        vocab_start: the argument of that name.
        vocab_rows: the argument of that name.
        tp_group: the argument of that name.

    Raises:
        ValueError: A number does not fit, or is missing.
    """
    if vocab_rows is not None:
        least = 0 if not alone(tp_group) else 1
        if type(vocab_rows) is not int or not least <= vocab_rows <= size:
            raise ValueError(
                f"vocab_rows {vocab_rows!r}: expected {least} to {size}, the number of {parts} of {name}, "
                "or None for all"
            )
    if alone(tp_group):
        if vocab_start not in (None, 0):
            raise ValueError(
                f"vocab_start {vocab_start!r}: expected 0 or None without other ranks in tp_group, since the whole "
                f"vocabulary is here; if {name} is a shard, pass the tp_group"
            )
    elif tp_group is not None and vocab_start is None:
        raise ValueError(
            f"vocab_start is missing: {name} is one of {tp_group.size()} shards of the vocabulary, so expected the id "
            f"of its first row; for shards of equal size pass tp_group.rank() * {size}, and if all of the vocabulary "
            "is here, leave tp_group out"
        )
    elif vocab_start is not None:
        check_integer("vocab_start", vocab_start, least=0)


def is_marked_as_shard(weight: Tensor) -> bool:
    """Returns whether Megatron has marked a weight as a part that belongs to this rank.

    Without other ranks the answer is no, because Megatron then marks whole weights, too.
    """
    others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return others and bool(getattr(weight, "tensor_model_parallel", False))
