# SPDX-License-Identifier: Apache-2.0
"""Reduces the tensors of several ranks, rounding at every step in their own dtype.

Real libraries add in an order that depends on topology and size. A kernel must be right in all.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.base import CollectiveMisuse

_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def op_name(op: Any) -> str:
    """Returns the name of a reduce op, such as ``"SUM"``.

    Args:
        op: a ``ReduceOp`` or a ``ReduceOp.RedOpType``. Torch passes both.
    """
    return getattr(op, "op", op).name


def reduce_tensors(parts: Sequence[Tensor], op: Any, order: ReductionOrder, seed: int) -> Tensor:
    """Reduces one tensor from each rank to a new tensor.

    Args:
        parts: tensors of one shape and dtype, by rank.
        op: the reduce op, a ``ReduceOp`` or a ``ReduceOp.RedOpType``.
        order: the order in which ``SUM`` and ``AVG`` add. Other ops combine in the order of ranks.
        seed: the seed of the permutation, if ``order`` is ``"permuted"``.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        CollectiveMisuse: the op can't be simulated.
    """
    name = op_name(op)
    if pairwise := _PAIRWISE.get(name):
        return _one_by_one(parts, pairwise)
    if name not in ("SUM", "AVG"):
        raise CollectiveMisuse(f"reduce op {name} can't be simulated; use SUM, AVG, {', '.join(_PAIRWISE)}")
    total = _SUMS[order](parts, seed)
    return total / len(parts) if name == "AVG" else total


def _one_by_one(parts: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = combine(total, part)
    return total


def _sum_by_rank(parts: Sequence[Tensor], seed: int) -> Tensor:
    return _one_by_one(parts, torch.add)


def _sum_permuted(parts: Sequence[Tensor], seed: int) -> Tensor:
    shuffled = list(parts)
    random.Random(seed).shuffle(shuffled)
    return _one_by_one(shuffled, torch.add)


def _sum_tree(parts: Sequence[Tensor], seed: int) -> Tensor:
    level = list(parts)
    while len(level) > 1:
        pairs = [torch.add(*level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0].clone()


def _sum_ring(parts: Sequence[Tensor], seed: int) -> Tensor:
    """Adds as gloo's ring does, bit for bit (see ``distributed_tests/test_ring_order.py``).

    There is one piece per rank, with ceil(n / ranks) elements, rounded up to an even number. Piece
    c is summed from rank c - 1 downwards, and rank c comes last.
    """
    ranks, flat = len(parts), [part.reshape(-1) for part in parts]
    count = flat[0].numel()
    size = (count + ranks - 1) // ranks
    size += size % 2
    total = torch.empty_like(flat[0])
    for piece in range(ranks):
        span = slice(min(piece * size, count), min((piece + 1) * size, count))
        order = [(piece - step) % ranks for step in range(1, ranks + 1)]
        total[span] = _one_by_one([flat[rank][span] for rank in order], torch.add)
    return total.view(parts[0].shape)


_SUMS: dict[ReductionOrder, Callable[[Sequence[Tensor], int], Tensor]] = {
    "rank": _sum_by_rank,
    "permuted": _sum_permuted,
    "tree": _sum_tree,
    "ring": _sum_ring,
}
