# SPDX-License-Identifier: Apache-2.0
"""A factor that is a whole number, another one in other problems: as many as there are chunks, or
micro-batches, of a size that nobody declared.
"""

from collections.abc import Sequence

from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.observed import Observed

_LARGEST = 64
"""The largest number that is taken for one of parts."""


def whole_number(failing: Sequence[Observed], said: str) -> Cause | None:
    """Returns a cause that says by which whole numbers all that is wrong is multiplied or divided;
    None if it is not, or by one number alone, or on each layout.

    Args:
        failing: what the kernel returned on problems where it is wrong.
        said: the outputs that are wrong, in words.
    """
    for divided, words in ((False, "multiplied"), (True, "divided")):
        numbers = [_number(observed, divided=divided) for observed in failing]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers) and len({*known}) > 1 and not _by_layout(failing, known):
            return Cause(
                name=f"{words} by a whole number",
                words=f"{said}: {words} by a whole number, {min(known)} to {max(known)} from problem to problem, as "
                "of chunks or micro-batches",
                todo="divide what is added up by the number of parts, once"
                if not divided
                else "leave what is added up as it is: it is divided already",
            )
    return None


def _by_layout(failing: Sequence[Observed], numbers: Sequence[int]) -> bool:
    """Returns whether it is one number on each layout: then it counts ranks, not parts."""
    layouts = [observed.case.problem.layout for observed in failing]
    return len({*layouts}) > 1 and len({*zip(layouts, numbers, strict=True)}) == len({*layouts})


def _number(observed: Observed, *, divided: bool) -> int | None:
    """Returns the number by which every wrong output is multiplied or divided."""
    found: set[int] = set()
    for output in observed.wrong:
        got, reference = observed.got[output], observed.case.oracle.reference[output]
        if not bool(reference.isfinite().all() & got.isfinite().all()):
            return None
        own = reference.flatten().double() @ got.flatten().double()
        other = (got if divided else reference).flatten().double()
        size = float(other @ other)
        number = round(float(own) / size) if size else 0
        if not 2 <= number <= _LARGEST:
            return None
        dtype = observed.case.result.dtypes.get(output, got.dtype)
        exact = reference / number if divided else reference * number
        if not observed.case.oracle.would_agree(output, got, dtype, exact):
            return None
        found.add(number)
    return found.pop() if len(found) == 1 else None
