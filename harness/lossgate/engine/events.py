# SPDX-License-Identifier: Apache-2.0
"""What the engine reports while it runs, and who listens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.settings import Settings
from lossgate.engine.shards import Shard


@dataclass(frozen=True)
class RunStarted:
    cells: tuple[Cell, ...]
    """The cells of this run."""
    settings: Settings
    matrix: tuple[Cell, ...] = ()
    """The cells of all runs between which a matrix is shared out; empty if this run has all."""
    shard: Shard | None = None
    """Which part of the matrix this run has."""
    remarks: tuple[str, ...] = ()
    """What the run was asked for, and leaves out: a line for each."""


@dataclass(frozen=True)
class CellStarted:
    cell: Cell


@dataclass(frozen=True)
class CellAgrees:
    """A cell agrees with the reference. That is no verdict yet: it is still held to its other
    properties.
    """

    cell: Cell


@dataclass(frozen=True)
class CellFinished:
    result: CellResult
    mended: tuple[Path, ...] = ()
    """The failure files of earlier runs on whose problems the cell agrees now, as on its own."""


@dataclass(frozen=True)
class CellSkipped:
    """A cell is not verified, because its candidate fails alike wherever it is called."""

    cell: Cell
    reason: str
    """How it fails, in words; the same for all cells of a candidate."""


@dataclass(frozen=True)
class RunFinished:
    results: tuple[CellResult, ...]
    stopped: str = ""
    """In words, why not all cells were verified; empty if they were."""
    seconds: float = 0.0
    """How long the run took, on the clock."""


Event = RunStarted | CellStarted | CellAgrees | CellFinished | CellSkipped | RunFinished

Consumer = Callable[[Event], None]
"""Listens to a run: the terminal, evidence, failure files. The engine knows none of them."""
