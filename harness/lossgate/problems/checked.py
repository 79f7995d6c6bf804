# SPDX-License-Identifier: Apache-2.0
"""Which problems there can be, whatever their spec and head.

A file may say anything. What no strategy would draw is refused here, before tensors are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lossgate.dtypes import DTYPES, nearest_dtype
from lossgate.errors import UsageError
from lossgate.numerics.float_formats import FLOAT_FORMATS, ROUNDED_TO
from lossgate.shape import MOST_ROWS, MOST_TOKENS
from lossgate.spelling import shown

if TYPE_CHECKING:
    from lossgate.problems.problem import Problem

_MOST_NUMBERS = 2**33
"""The most numbers of a tensor: no machine holds one that is much larger."""

RANGES = {"logit_std": (1e-9, 1000.0), "label_boost": (0.0, 100.0), "seed": (0, 2**32 - 1)}
"""What numbers may be. A spread of 0 has no label to boost, and float16 holds no logits that spread
more than 1000."""
MOST_OUTLIER = 1000.0
"""The largest outlier, of either sign."""


def check_problem(problem: Problem) -> None:
    """Refuses what no problem can be.

    Raises:
        UsageError: with what is wrong, and what was expected.
    """
    for check in (_check_sequences, _check_sizes, _check_dtype, _check_numbers, _check_places):
        check(problem)
    _ = problem.partition.vocab_shards  # raises where the layout is larger than the problem
    if (most := max(_numbers(problem))) > _MOST_NUMBERS:
        raise UsageError(
            f"problem: {_sizes(problem)}: a tensor of {most:,} numbers; expected {_MOST_NUMBERS:,} at most"
        )


def _sizes(problem: Problem) -> str:
    lengths = f"lengths={shown(problem.lengths)}"
    sizes = (f"{name}={shown(getattr(problem, name))}" for name in ("hidden", "vocab", "pad_to_multiple", "group_size"))
    return ", ".join((lengths, *sizes))


def _check_sequences(problem: Problem) -> None:
    masks, sequences = len(problem.masks), len(problem.lengths)
    if masks != sequences:
        raise UsageError(f"problem: {masks} masks for {sequences} sequences; give one for each")


def _check_sizes(problem: Problem) -> None:
    lengths, group = problem.lengths, problem.group_size
    sizes = (problem.hidden, problem.vocab, problem.pad_to_multiple, group)
    if sum(lengths) < 1 or min(lengths) < 0 or min(sizes) < 1:
        raise UsageError(
            f"problem: {_sizes(problem)}; expected at least one token, no negative length, and positive sizes"
        )
    if max(sizes) > MOST_ROWS or max(len(lengths), problem.partition.tokens) > MOST_TOKENS:
        raise UsageError(
            f"problem: {_sizes(problem)}; expected sizes of at most {MOST_ROWS:,}, and at most {MOST_TOKENS:,} tokens, "
            "with padding, and sequences"
        )
    if len(lengths) % group:
        raise UsageError(
            f"problem: group_size={group} does not divide {len(lengths)} sequences; add empty sequences (length 0)"
        )


def _numbers(problem: Problem) -> Iterator[int]:
    """Yields how many numbers tensors have: hidden states, weight and logits."""
    tokens = problem.partition.tokens
    yield tokens * problem.vocab
    if problem.head == "hidden":
        yield problem.hidden * max(tokens, problem.vocab)


def _check_dtype(problem: Problem) -> None:
    if problem.dtype not in DTYPES:
        raise UsageError(f"problem: unknown dtype {shown(problem.dtype)}; {nearest_dtype(problem.dtype)}")
    coarser = [name for name, one in ROUNDED_TO.items() if one.unit > FLOAT_FORMATS[problem.dtype].unit]
    if problem.rounded_to is not None and problem.rounded_to not in coarser:
        raise UsageError(
            f"problem: rounded_to={problem.rounded_to!r}; expected None, or a format that is coarser than "
            f"{problem.dtype}: {', '.join(coarser) or 'there is none'}"
        )


def _check_numbers(problem: Problem) -> None:
    for name, (low, high) in RANGES.items():
        if not low <= (value := getattr(problem, name)) <= high:
            raise UsageError(f"problem: {name}={shown(value)}; expected a number from {low:.15g} to {high:.15g}")
    if problem.bias and problem.vocab < 2:
        raise UsageError(
            "problem: a bias with vocab=1; expected two rows at least: the gradient of one is 0, and what a kernel "
            "gives is all rounding"
        )


def _check_places(problem: Problem) -> None:
    """Refuses labels and outliers at tokens, rows or columns that are not there."""
    tokens, columns = problem.tokens, problem.outlier_columns
    for token, row in problem.forced_labels:
        if not (0 <= token < tokens and 0 <= row < problem.vocab):
            raise UsageError(
                f"problem: forced_labels has {shown((token, row))}; expected a token below {tokens} and a row below "
                f"{problem.vocab}"
            )
    for token, column, value in problem.outliers:
        if not (0 <= token < tokens and 0 <= column < columns):
            raise UsageError(
                f"problem: outliers has {shown((token, column))}; expected a token below {tokens} and a column below "
                f"{columns}"
            )
        if not abs(value) <= MOST_OUTLIER:
            raise UsageError(
                f"problem: outliers has the value {value!r}; expected a number from {-MOST_OUTLIER:g} to "
                f"{MOST_OUTLIER:g}"
            )
