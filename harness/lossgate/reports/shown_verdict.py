# SPDX-License-Identifier: Apache-2.0
"""The words and colours of verdicts, and the numbers shown with them."""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellRecord, Outcome, Verdict
from lossgate.reports.console import printable

STYLES = {
    Outcome.DISAGREE: "bold red",
    Outcome.PROMISE_BROKEN: "magenta",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.AGREE: "green",
}
"""The colour of each outcome, the worst first."""
KNOWN_STYLE = "cyan"
_NAMED = 4
"""The most broken properties that are named in one place."""
_FAR = 10
"""Statistics that are so many times their limit, or more, are shown alike."""


NOTHING = "nothing"
"""Shown for cells in which an output could be off by 100% without being seen."""


class ShownVerdict(NamedTuple):
    """The verdict of a cell as it is shown."""

    word: Outcome
    note: str = ""
    """The name of the known failure, if the cell disagrees as expected."""

    @classmethod
    def of(cls, cell: CellRecord) -> "ShownVerdict":
        known = cell.known_failure
        if known is None or not known.expected:
            return cls(cell.outcome)
        return cls(cell.outcome, f"(known: {printable(known.name)})")

    @property
    def expected(self) -> bool:
        return bool(self.note)

    @property
    def style(self) -> str:
        return KNOWN_STYLE if self.expected else STYLES[self.word]

    @property
    def wrong(self) -> bool:
        return self.word in (Outcome.DISAGREE, Outcome.PROMISE_BROKEN) and not self.expected

    @property
    def order(self) -> tuple[int, bool]:
        """A key that sorts the worst verdict first, known failures after other disagreements."""
        return list(Outcome).index(self.word), self.expected

    def __str__(self) -> str:
        return f"{self.word} {self.note}" if self.note else self.word


def broken_names(cells: Iterable[CellRecord]) -> str:
    """Returns the names of the promises that cells break; "" if they break none. Known failures and
    cells whose numbers are wrong are left out.
    """
    names = _broken(cells)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def broken_in_words(cells: Iterable[CellRecord]) -> str:
    """Returns the same in words, and whether the numbers of the cells that break promises agree.

    They agree so far if nothing wrong was seen, but not enough was seen.
    """
    breaking = [cell for cell in cells if _breaks(cell)]
    if not breaking:
        return ""
    numbers = {cell.numbers for cell in breaking}
    so_far = " so far" if Verdict.INCONCLUSIVE in numbers else ""
    agree = "" if None in numbers else f"numbers agree{so_far}, "
    return f"{agree}{counted(len(_broken(breaking)), 'promise')} broken: {broken_names(breaking)}"


def _breaks(cell: CellRecord) -> bool:
    return cell.outcome is Outcome.PROMISE_BROKEN and not cell.expected


def _broken(cells: Iterable[CellRecord]) -> list[str]:
    return list(dict.fromkeys(printable(name) for cell in cells if _breaks(cell) for name in cell.broken))


def share(margin: float | None, *, whole: bool = False) -> str:
    """Returns a share of a limit as text. A large share is shown as "> 10".

    Args:
        margin: the share; None if it is infinite.
        whole: whether a large share is written out.
    """
    number = inf if margin is None else margin
    if number < _FAR:
        return f"{number:.2f}"
    return f"{number:.2g}" if whole else f"> {_FAR}"


def percent(mde: float | None) -> str:
    """Returns a minimum detectable effect as text, such as "0.12%" or "3.9e-07".

    Args:
        mde: the effect; None if it is infinite.
    """
    if mde is None or mde > 1:
        return NOTHING
    if mde < 1e-4:
        return f"{mde:.2g}"
    rounded = float(f"{100 * mde:.2g}")
    return f"{rounded:g}%"
