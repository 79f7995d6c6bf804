# SPDX-License-Identifier: Apache-2.0
"""Shows what a kernel gave beside what is right."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.cases.case import Case
from lossgate.specs.outputs import Output

_OUTPUTS = 3
"""So many of the outputs that disagree are shown."""
_ENTRIES = 2
"""So many entries of each, those that are farthest off."""


def side_by_side(case: Case) -> tuple[str, ...]:
    """Returns lines with the entries of a case that are farthest off: what was got, and what is
    wanted.

    Entries are those of whole outputs, with ranks put together and padding dropped.
    """
    wrong = [comparison.output for comparison in case.comparisons if not comparison.agrees and comparison.values]
    return tuple(line for output in wrong[:_OUTPUTS] for line in _entries(case, output))


def _entries(case: Case, output: Output) -> Iterator[str]:
    got, want, counted = case.result.outputs[output], case.oracle.reference[output], case.oracle.compared(output)
    off = (got - want).abs().nan_to_num(nan=torch.inf)
    off = off.masked_fill((got == want) | (got.isnan() & want.isnan()), 0.0)
    if counted is not None:
        off = off * counted
    for number in off.flatten().topk(min(_ENTRIES, off.numel())).indices.sort().values:
        if off.flatten()[number] > 0:
            numbers = f"got {float(got.flatten()[number]):.9g}, want {float(want.flatten()[number]):.9g}"
            yield f"{_entry(output, number, off)}: {numbers}"


def _entry(output: Output, number: Tensor, of: Tensor) -> str:
    """Returns an entry in words, such as "grad of weight, vocab 3, hidden 0"."""
    at = torch.unravel_index(number, of.shape) if of.dim() else ()
    return ", ".join([str(output), *(f"{dim} {int(index)}" for dim, index in zip(output.dims, at, strict=True))])
