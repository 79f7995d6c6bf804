# SPDX-License-Identifier: Apache-2.0
"""The events that the engine reports while it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.matrix import Shard
from lossgate.engine.settings import Settings


@dataclass(frozen=True)
class RunStarted:
    cells: tuple[Cell, ...]
    """The cells of this run."""
    settings: Settings
    matrix: tuple[Cell, ...] = ()
    """All cells of the matrix, of which this run may have only a part."""
    shard: Shard | None = None
    """The part of the matrix that this run has; None if it has all."""
    remarks: tuple[str, ...] = ()
    """A line for each layout and dtype that was asked for and that a candidate leaves out, and one
    about a quick look."""


@dataclass(frozen=True)
class CellStarted:
    cell: Cell


@dataclass(frozen=True)
class CellAgrees:
    """A cell agrees with the reference. It has no verdict yet, because its further properties are
    checked next.
    """

    cell: Cell


@dataclass(frozen=True)
class CellFinished:
    result: CellResult
    mended: tuple[Path, ...] = ()
    """The failure files of earlier runs on whose problems the cell agrees now."""


@dataclass(frozen=True)
class CellSkipped:
    """A cell is not verified, because its candidate fails in the same way wherever it is called."""

    cell: Cell
    reason: str
    """How the candidate fails, in words. It is the same for all its cells."""


@dataclass(frozen=True)
class RunFinished:
    results: tuple[CellResult, ...]
    stopped: str = ""
    """Why not all cells were verified, in words. Empty if all were."""
    seconds: float = 0.0
    """How long the run took, on the clock."""


Event = RunStarted | CellStarted | CellAgrees | CellFinished | CellSkipped | RunFinished

Consumer = Callable[[Event], None]
"""Listens to a run: the terminal, evidence, failure files. The engine knows none of them."""
