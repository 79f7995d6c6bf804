# SPDX-License-Identifier: Apache-2.0
"""The words and colours of verdicts, and the numbers shown with them."""

from math import inf
from typing import NamedTuple

from lossgate.engine.cell_record import CellRecord, Verdict
from lossgate.reports.console import printable

STYLES = {Verdict.AGREE: "green", Verdict.DISAGREE: "bold red", Verdict.INCONCLUSIVE: "yellow"}
KNOWN_STYLE = "cyan"
_WORST_FIRST = (Verdict.DISAGREE, Verdict.INCONCLUSIVE, Verdict.AGREE)
_FAR = 10
"""Statistics that are so many times their limit, or more, are shown alike."""


NOTHING = "nothing"
"""Shown for cells in which an output could be off by 100% without being seen."""


class ShownVerdict(NamedTuple):
    """The verdict of a cell as it is shown."""

    word: Verdict
    note: str = ""
    """The name of the known failure, if the cell disagrees as expected."""

    @classmethod
    def of(cls, cell: CellRecord) -> "ShownVerdict":
        known = cell.known_failure
        if known is None or not known.expected:
            return cls(cell.verdict)
        return cls(cell.verdict, f"(known: {printable(known.name)})")

    @property
    def expected(self) -> bool:
        return bool(self.note)

    @property
    def style(self) -> str:
        return KNOWN_STYLE if self.expected else STYLES[self.word]

    @property
    def wrong(self) -> bool:
        return self.word is Verdict.DISAGREE and not self.expected

    @property
    def order(self) -> tuple[int, bool]:
        """A key that sorts the worst verdict first, known failures after other disagreements."""
        return _WORST_FIRST.index(self.word), self.expected

    def __str__(self) -> str:
        return f"{self.word} {self.note}" if self.note else self.word


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
