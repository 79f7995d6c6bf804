# SPDX-License-Identifier: Apache-2.0
"""Adds up a gradient over tokens, with the rounding of a kernel's chunks and ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from lossgate.numerics.rounded_arithmetic import RoundedRun, SumOfProducts

_AT_ONCE = 1 << 20
"""Numbers of a gradient that are rounded at once. The gradient of a whole lm-head takes hundreds of
megabytes, and to round it at once would need several tensors of that size."""


def by_rows(like: Tensor, compute: Callable[[slice], Tensor]) -> Tensor:
    """Computes a large tensor some rows at a time, and others at once.

    Args:
        like: a tensor of the same shape and dtype, ``[members, rows, columns]``.
        compute: returns some rows.
    """
    if like.dim() < 3 or like.numel() <= _AT_ONCE:
        return compute(slice(None))
    found, at_once = torch.empty_like(like), max(1, _AT_ONCE // like.shape[-1])
    for start in range(0, like.shape[1], at_once):
        rows = slice(start, start + at_once)
        found[:, rows] = compute(rows)
    return found


class TokenSum:
    """The gradient of a leaf that has no token dim, such as the weight.

    Each rank adds up the products of its own tokens chunk by chunk, and rounds the sum. The caller
    of the kernel adds the ranks' sums.
    """

    def __init__(self, run: RoundedRun) -> None:
        """Begins with no tokens.

        Args:
            run: the rounded runs.
        """
        self._run, self._chunk = run, SumOfProducts(run)
        self._of_rank: Tensor | None = None
        self._total: Tensor | None = None

    def add(self, dlogits: Tensor, factor: Tensor) -> None:
        """Adds tokens to the current chunk.

        Args:
            dlogits: the gradients of the tokens' logits, ``[members, tokens, vocab]``.
            factor: the tensor with which ``dlogits`` is multiplied, ``[tokens, width]``.
        """
        self._chunk.add(dlogits.transpose(-1, -2), factor)

    def end_chunk(self, one_of: int) -> None:
        """Adds the current chunk to the sum of the rank, rounds the sum, and begins a new chunk.

        Args:
            one_of: the number of chunks of the rank. The sum of several chunks is rounded at each
                step, and these errors outweigh the errors inside a chunk, which are left out.
        """
        if one_of == 1:
            self._of_rank = by_rows(self._chunk.exact, self._chunk.rounded)
        else:
            self._of_rank = self._run.added(self._of_rank, self._chunk.exact, self._run.stages.accumulate)
        self._chunk = SumOfProducts(self._run)

    def end_rank(self) -> None:
        """Rounds the sum of the current rank, and adds it to the total. A rank without tokens adds
        nothing.
        """
        if self._of_rank is not None:
            of_rank, to = self._of_rank, self._run.stages.gradients
            part = by_rows(of_rank, lambda rows: self._run.noise.round(of_rank[:, rows], to))
            self._total = part if self._total is None else self._total + part
        self._of_rank = None

    @property
    def total(self) -> Tensor:
        """The sum of all ranks, ``[members, vocab, width]``."""
        assert self._total is not None, "no rank has a token"
        return self._total
