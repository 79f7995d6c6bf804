# SPDX-License-Identifier: Apache-2.0
"""The file of ``lossgate verify --json``: what a program that mends kernels reads."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from lossgate.engine.cell import CellResult
from lossgate.engine.cell_record import CellRecord
from lossgate.engine.events import CellFinished, CellSkipped, Event, RunFinished, RunStarted

SCHEMA = "1"


class JsonCell(Struct, kw_only=True):
    """A cell: one candidate in one dtype on one layout."""

    cell: str
    """Its name, such as ``my_kernel[agreement-cp=2-float32]``."""
    source: str
    """``file.py:name`` or ``package.module:name`` of the candidate."""
    layout: str
    """Such as ``single`` or ``tp=2,cp=2``."""
    dtype: str
    """The dtype of the inputs."""
    verdict: str
    """AGREE, DISAGREE, PROMISE BROKEN or INCONCLUSIVE."""
    passes: bool
    """Whether the cell counts as AGREE: known failures do, and broken promises if only numbers
    count."""
    cause: str
    """The mistake that explains what is wrong; empty if none is known."""
    to_do: str
    """What to do; empty if nothing is advised."""
    reasons: tuple[str, ...]
    """Why the verdict is not AGREE: what is wrong and where, or what was not seen."""
    example: dict[str, Any] | None
    """The smallest problem that fails, and its ``description`` in words; null if there is none."""
    replay: str | None
    """The command that judges that problem again; null if there is none."""


class JsonFile(Struct, kw_only=True):
    """The whole file."""

    schema: str
    """The version of this schema. Later versions may add fields."""
    verdict: str
    """AGREE if every cell passes and the run was not stopped, else DISAGREE or INCONCLUSIVE."""
    stopped: str
    """Why not all cells were verified; empty if they were."""
    cells: tuple[JsonCell, ...]
    """The cells that were verified."""
    skipped: dict[str, str]
    """The cells that were not, because their candidate always fails alike, and how it fails."""


class ForPrograms:
    """Keeps of a run what the file says.

    Args:
        replay: returns the command that judges the failure of a cell again.
    """

    def __init__(self, replay: Callable[[CellResult], str | None]) -> None:
        self._replay = replay
        self._cells, self._skipped = list[JsonCell](), dict[str, str]()
        self._stopped, self._numbers_only = "", False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._numbers_only = event.settings.numbers_only
        elif isinstance(event, CellFinished):
            self._cells.append(self._cell(event.result.record, self._replay(event.result)))
        elif isinstance(event, CellSkipped):
            self._skipped[str(event.cell)] = event.reason
        elif isinstance(event, RunFinished):
            self._stopped = event.stopped

    def text(self, verdict: str) -> str:
        """Returns the file of a run that has ended with a verdict."""
        file = JsonFile(
            schema=SCHEMA,
            verdict=verdict,
            stopped=self._stopped,
            cells=tuple(self._cells),
            skipped=self._skipped,
        )
        return msgspec.json.format(msgspec.json.encode(file), indent=2).decode() + "\n"

    def _cell(self, record: CellRecord, replay: str | None) -> JsonCell:
        failure, told = record.failure, record.reasons if record.cause else record.told
        return JsonCell(
            cell=str(record.key),
            source=record.source,
            layout=record.layout,
            dtype=record.dtype,
            verdict=record.outcome,
            passes=record.counts_as(numbers_only=self._numbers_only) == "AGREE",
            cause=record.cause,
            to_do=record.todo,
            reasons=tuple(line for line in told if not line.startswith("to do: ")),
            example=None if failure is None else {"description": failure.description, **failure.problem},
            replay=replay,
        )
