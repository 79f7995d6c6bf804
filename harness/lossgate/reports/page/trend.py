# SPDX-License-Identifier: Apache-2.0
"""Chooses the records of a cell's trend and sorts them by time."""

from collections.abc import Iterable
from datetime import UTC, datetime

from lossgate.evidence.records import CellRecord

_NEVER = datetime.min.replace(tzinfo=UTC)


def records_of_trend(current: CellRecord, history: Iterable[CellRecord]) -> list[CellRecord]:
    """Returns the current record and the older ones of its cell, the oldest first.

    History may hold the current run too, and copies of a record: each counts once.
    """
    chosen: dict[tuple[str, str], list[CellRecord]] = {}
    for record in history:
        alike = chosen.setdefault((record.run, record.time), [])
        if record.run != current.run and record not in alike:
            alike.append(record)
    return sorted([*(record for alike in chosen.values() for record in alike), current], key=_when)


def _when(record: CellRecord) -> tuple[datetime, str, str]:
    """Sorts by time. Records without a valid one come first; of one time, by their runs."""
    return _parse(record.time) or _NEVER, record.time, record.run


def _parse(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo is not None else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
