# SPDX-License-Identifier: Apache-2.0
"""Finds out which broken properties are broken for the same reason, and which is told first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lossgate.adequacy.entry import Placed
from lossgate.base.errors import LossgateError
from lossgate.cases.case import Case
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import Explained
from lossgate.judge.comparison import MANNERS
from lossgate.properties import Property
from lossgate.worlds.base import Hang, World


@dataclass(frozen=True)
class Broken:
    """A property that a kernel breaks, and a problem on which it does."""

    held_to: Property
    placed: Placed
    case: CaseResult


def in_order(broken: Sequence[Broken]) -> list[Broken]:
    """Returns broken properties in the order in which they are told.

    What can be shown to explain others comes first, and what others may explain comes last. The
    rest follows from the manner of the failure.
    """
    perhaps = {name for one in broken for name in one.held_to.may_explain}

    def rank(one: Broken) -> tuple[bool, bool, int]:
        return one.held_to.mended is None, one.held_to.name in perhaps, MANNERS.index(one.case.manner)

    return sorted(broken, key=rank)


def explained(broken: Sequence[Broken], cell: Cell, world: World) -> Mapping[str, Explained]:
    """Returns which broken properties another one explains, by their names.

    Args:
        broken: the broken properties, in the order in which they are told.
        cell: where they are broken.
        world: where the ranks run.
    """
    told, found = list[Broken](), dict[str, Explained]()
    for one in broken:
        explanation = next(_explanations(one, told, cell, world), None)
        if explanation is None:
            told.append(one)
        else:
            found[one.held_to.name] = explanation
    return found


def _explanations(one: Broken, told: Sequence[Broken], cell: Cell, world: World) -> Iterator[Explained]:
    """Yields what explains that a property is broken, the surest first."""
    for other in told:
        if one.case.raised is not None and one.case.raised == other.case.raised:
            yield Explained(by=other.held_to.name, how="same error")
    perhaps = list[str]()
    for other in told:
        keeps = _keeps_it_mended(one, other.held_to, cell, world)
        if keeps:
            yield Explained(by=other.held_to.name, how="mended")
        elif keeps is None and one.held_to.name in other.held_to.may_explain:
            perhaps.append(other.held_to.name)
    yield from (Explained(by=name, how="perhaps") for name in perhaps)


def _keeps_it_mended(one: Broken, other: Property, cell: Cell, world: World) -> bool | None:
    """Returns whether a kernel keeps a property once the fault that breaks another is mended, and
    only then: a kernel that is wrong now and then may keep it by chance. None if nobody can tell.
    """
    if other.mended is None or one.case.failure == Hang.__name__:  # another try costs a time-out
        return None
    mended = replace(cell.candidate, kernel=other.mended(cell.candidate))
    placed = one.placed
    try:
        of_mended, again = (
            run_case(Case(kernel, placed.problem, world, placed.entry.bound), one.held_to)
            for kernel in (mended, cell.candidate)
        )
    except LossgateError:  # the kernel can't be sent to other processes, or they are lost
        return None
    return of_mended.fits and of_mended.agrees and not again.agrees
