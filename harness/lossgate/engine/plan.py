# SPDX-License-Identifier: Apache-2.0
"""Which cells a run verifies."""

from collections.abc import Iterable, Iterator

from lossgate.declaration.candidate import Candidate
from lossgate.declaration.known_failure import KnownFailure
from lossgate.engine.cell import Cell
from lossgate.engine.failure_files import FrozenCase, read_failure
from lossgate.engine.settings import Settings
from lossgate.errors import UsageError
from lossgate.properties import PROPERTIES


def plan(candidates: Iterable[Candidate], settings: Settings) -> list[Cell]:
    """Returns the cells to verify.

    A candidate with a known failure has one cell: that of its frozen example.

    Raises:
        UsageError: if a candidate has no cell.
    """
    cells: list[Cell] = []
    for candidate in candidates:
        own = list(_cells(candidate, settings))
        if not own:
            axes = ", ".join(candidate.axes) or "none"
            layouts = ", ".join(settings.layouts) or f"of {settings.ranks} ranks"
            raise UsageError(
                f"candidate {candidate.name!r}: nothing to verify; it has axes {axes} and dtypes "
                f"{', '.join(candidate.dtypes)}, and the run has layouts {layouts} and dtypes "
                f"{', '.join(settings.dtypes) or 'of any kind'}. Change --layout or --dtype, or leave the candidate out"
            )
        cells += own
    return cells


def _cells(candidate: Candidate, settings: Settings) -> Iterator[Cell]:
    if candidate.known_failure is not None:
        problem = frozen_case(candidate.known_failure).problem
        yield Cell(candidate, problem.layout, problem.dtype)
        return
    for held_to in PROPERTIES.values():
        if held_to.applies(candidate):
            for dtype in settings.dtypes_of(candidate):
                for layout in settings.layouts_of(candidate):
                    yield Cell(candidate, layout, dtype, held_to)


def frozen_case(known: KnownFailure) -> FrozenCase:
    """Returns the frozen example of a known failure.

    Raises:
        UsageError: if the file cannot be read, or its problems disagree only when pooled.
    """
    failure = read_failure(known.example)
    if failure.pooled:
        raise UsageError(
            f"known failure {known.name}: no single problem in {known.example} disagrees; only their pooled statistic "
            "does. Freeze a problem that disagrees on its own"
        )
    return failure.examples[0]
