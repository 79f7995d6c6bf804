# SPDX-License-Identifier: Apache-2.0
"""A gradient that is a sum over tokens, as ranks and chunks of a kernel make it."""

from collections.abc import Callable

import torch
from torch import Tensor

from lossgate.numerics.rounded_arithmetic import RoundedRun, SumOfProducts

_AT_ONCE = 1 << 20
"""Numbers of a gradient that are rounded at once: one of a whole lm-head takes hundreds of
megabytes, and rounding it needs several like it."""


def by_rows(like: Tensor, compute: Callable[[slice], Tensor]) -> Tensor:
    """Computes a tensor some rows at a time.

    Args:
        like: of its shape, ``[members, rows, columns]``.
        compute: gives some rows.
    """
    if like.dim() < 3 or like.numel() <= _AT_ONCE:
        return compute(slice(None))
    found, at_once = torch.empty_like(like), max(1, _AT_ONCE // like.shape[-1])
    for start in range(0, like.shape[1], at_once):
        rows = slice(start, start + at_once)
        found[:, rows] = compute(rows)
    return found


class TokenSum:
    """The gradient of a leaf without tokens: each rank multiplies the gradients of its own logits,
    chunk by chunk, and rounds; the caller adds the ranks' parts.
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
        """Adds tokens of a chunk.

        Args:
            dlogits: the gradients of their logits, ``[members, tokens, vocab]``.
            factor: what these are multiplied with, ``[tokens, width]``.
        """
        self._chunk.add(dlogits.transpose(-1, -2), factor)

    def end_chunk(self, one_of: int) -> None:
        """Ends a chunk.

        Args:
            one_of: how many chunks the rank has. The sum of several is rounded at each step, which
                outweighs the errors of a chunk's own sum.
        """
        if one_of == 1:
            self._of_rank = by_rows(self._chunk.exact, self._chunk.rounded)
        else:
            self._of_rank = self._run.added(self._of_rank, self._chunk.exact, self._run.stages.accumulate)
        self._chunk = SumOfProducts(self._run)

    def end_rank(self) -> None:
        """Ends a rank. One without tokens adds nothing."""
        if self._of_rank is not None:
            of_rank, to = self._of_rank, self._run.stages.inputs
            part = by_rows(of_rank, lambda rows: self._run.noise.round(of_rank[:, rows], to))
            self._total = part if self._total is None else self._total + part
        self._of_rank = None

    @property
    def total(self) -> Tensor:
        """The sum of all ranks, ``[members, vocab, width]``."""
        assert self._total is not None, "no rank has a token"
        return self._total
