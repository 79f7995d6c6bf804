# SPDX-License-Identifier: Apache-2.0
"""Whether evidence is of files as their commit has them."""

from collections.abc import Iterable, Iterator
from enum import IntEnum

from lossgate.evidence.records import RunRecord
from lossgate.evidence.summary import CellSummary


class Committed(IntEnum):
    """Whether files were as in their commit; the worse, the larger."""

    YES = 0
    UNKNOWN = 1
    """Git could not say."""
    NO = 2


def committed_checkout(run: RunRecord) -> Committed:
    """Returns whether the files of a checkout were. Files that git does not know do not count."""
    return _committed(run.modified)


def committed_sources(cells: Iterable[CellSummary]) -> dict[str, Committed]:
    """Returns for each file that declares a candidate whether it was."""
    found: dict[str, Committed] = {}
    for cell in cells:
        if cell.source_digest is not None:
            file = cell.source.rpartition(":")[0]
            found[file] = max(found.get(file, Committed.YES), _committed(cell.source_modified))
    return found


def all_committed(runs: Iterable[RunRecord], cells: Iterable[CellSummary]) -> Committed:
    """Returns whether all files of evidence were."""
    return max(_each(runs, cells), default=Committed.UNKNOWN)


def _each(runs: Iterable[RunRecord], cells: Iterable[CellSummary]) -> Iterator[Committed]:
    yield from map(committed_checkout, runs)
    yield from committed_sources(cells).values()


def _committed(modified: bool | None) -> Committed:
    if modified is None:
        return Committed.UNKNOWN
    return Committed.NO if modified else Committed.YES
