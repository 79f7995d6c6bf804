# SPDX-License-Identifier: Apache-2.0
"""Full records of cells, kept for a page."""

from collections import defaultdict

from lossgate.evidence.reader import Where
from lossgate.evidence.records import CellKey, CellRecord


class KeptRecords:
    """Keeps the records that ``gather`` gives it."""

    def __init__(self) -> None:
        self._records: defaultdict[CellKey, list[CellRecord]] = defaultdict(list)

    def keep(self, record: CellRecord, where: Where) -> None:
        self._records[record.key].append(record)

    def by_cell(self) -> dict[CellKey, tuple[CellRecord, ...]]:
        """Returns all records of each cell, the oldest first, ordered as in ``Gathered``."""
        return {key: tuple(sorted(found, key=lambda r: r.time)) for key, found in self._records.items()}

    def newest(self) -> dict[CellKey, CellRecord]:
        """Returns the newest record of each cell."""
        return {key: found[-1] for key, found in self.by_cell().items()}
