# SPDX-License-Identifier: Apache-2.0
"""Lengths of the sequences of a pack, checked on the host."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fused_losses.arguments import check_integer


@dataclass(frozen=True)
class PackedLengths:
    """Lengths of the sequences of a pack, and which of their tokens have an entry in a row.

    All numbers are on the host, so that nothing waits for the device to check a shape.
    """

    true: tuple[int, ...]
    """Length of each sequence as given."""
    padded: tuple[int, ...]
    """Length of each sequence with padding."""
    rows: int
    """Number of sequences that have a row; the sequences after them are a tail."""
    row_width: int | None
    """Declared width of rows. Beyond it there is only padding. None if not declared."""

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, tail: int, row_width: int | None
    ) -> "PackedLengths":
        """Reads and checks the arguments of ``Pack.of``, which waits for the device.

        Raises:
            ValueError: An argument does not fit; the message names it.
        """
        true = _lengths("cu_seqlens", cu_seqlens)
        padded = true if cu_seqlens_padded is None else _lengths("cu_seqlens_padded", cu_seqlens_padded)
        if len(true) != len(padded):
            raise ValueError(
                f"cu_seqlens of {len(true)} sequences and cu_seqlens_padded of {len(padded)}: "
                "expected [S + 1] for both, starting at 0"
            )
        sequences = len(true)
        check_integer("tail", tail, least=0)
        if tail > sequences:
            raise ValueError(
                f"tail {tail}: expected how many of the {sequences} sequences have no row, from 0 to {sequences}"
            )
        if row_width is not None:
            check_integer("row_width", row_width, least=0, otherwise="the number of columns of rows, or None")
        _check_padding(true, padded)
        return cls(true, padded, sequences - tail, row_width)

    @property
    def true_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(self.true)

    @property
    def padded_tokens(self) -> int:
        """Number of tokens with padding."""
        return sum(self.padded)

    @property
    def longest(self) -> int:
        """Number of columns that rows need."""
        longest = max(self.true[: self.rows], default=0)
        return longest if self.row_width is None else min(longest, self.row_width)

    def check_split(self, ranks: int, pieces: int, tokens: int | None) -> None:
        """Checks that ranks can share the padded lengths, and get as many tokens as expected.

        Raises:
            ValueError: A length is no multiple of ``pieces``, or a rank does not have ``tokens``.
        """
        for number, length in enumerate(self.padded):
            if length % pieces:
                raise ValueError(
                    f"cu_seqlens_padded: sequence {number} has {length} tokens, "
                    f"expected a multiple of {pieces}, twice the number of ranks of cp_group; pad it"
                )
        total = self.padded_tokens
        if tokens is not None and tokens != total // ranks:
            raise ValueError(
                f"tokens {tokens}: cu_seqlens_padded ends at {total}, "
                f"so each of {ranks} ranks has {total // ranks}; pass that number, or None"
            )

    def in_rows(self, cu_seqlens: Tensor) -> Tensor:
        """Returns how many tokens of each sequence have an entry in a row, ``[sequences]``.

        Args:
            cu_seqlens: as ``of`` was given. The result is on its device.
        """
        lengths = cu_seqlens.diff()
        if self.row_width is not None:
            lengths = lengths.clamp(max=self.row_width)
        lengths[self.rows :] = 0
        return lengths

    def check_rows(self, rows: Tensor, shift: int) -> None:
        """Checks that rows match the sequences.

        Args:
            rows: expected to be ``[rows, width, ...]``.
            shift: as ``Pack.from_rows`` was given.

        Raises:
            ValueError: The rows do not match the sequences.
        """
        shown = f"rows {list(rows.shape)}"
        if rows.dim() < 2 or rows.shape[0] != self.rows:
            of_each = "one for each sequence" + (" but the tail" if self.rows < len(self.true) else "")
            fewer = rows.dim() > 1 and rows.shape[0] < self.rows
            raise ValueError(
                f"{shown}: expected {self.rows} rows [{self.rows}, width, ...], {of_each}, or packed tokens [T, ...] "
                f"or [1, T, ...] with T={self.padded_tokens}, or {self.true_tokens} without padding"
                + ("; if sequences at the end have no row, declare Pack.of(..., tail=...)" if fewer else "")
            )
        if self.row_width is not None and rows.shape[1] != self.row_width:
            raise ValueError(f"{shown}: expected the width {self.row_width} that Pack.of was given as row_width")
        if rows.shape[1] < self.longest:
            predictions = shift == 0 and rows.shape[1] == self.longest - 1
            raise ValueError(
                f"{shown}: expected at least {self.longest} columns, as many as the longest sequence has tokens; "
                f"if lengths contain padding, declare Pack.of(..., row_width={rows.shape[1]})"
                + ("; if these are predictions, append a column: F.pad(rows, (0, 1))" if predictions else "")
            )


def _lengths(name: str, starts: Tensor) -> tuple[int, ...]:
    if starts.dim() != 1 or not len(starts) or starts.is_floating_point() or starts.dtype == torch.bool:
        raise ValueError(
            f"{name} {list(starts.shape)} of {starts.dtype}: expected [S + 1] integers for S sequences, starting at 0"
        )
    numbers: list[int] = starts.tolist()
    lengths = tuple(end - start for start, end in pairwise(numbers))
    if numbers[0] or min(lengths, default=0) < 0:
        raise ValueError(f"{name} {numbers}: expected 0 first, and then numbers that never decrease")
    return lengths


def _check_padding(true: tuple[int, ...], padded: tuple[int, ...]) -> None:
    for number, (without, with_padding) in enumerate(zip(true, padded, strict=True)):
        if with_padding < without:
            raise ValueError(
                f"cu_seqlens_padded: sequence {number} has {with_padding} tokens with padding and "
                f"{without} without; expected at least as many with padding"
            )
