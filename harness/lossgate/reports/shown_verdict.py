# SPDX-License-Identifier: Apache-2.0
"""The words and colours of verdicts, and the numbers beside them."""

from math import inf
from typing import NamedTuple

from lossgate.engine.cell_record import CellRecord, Verdict
from lossgate.reports.plain import printable

STYLES = {Verdict.AGREE: "green", Verdict.DISAGREE: "bold red", Verdict.INCONCLUSIVE: "yellow"}
KNOWN_STYLE = "cyan"
_WORST_FIRST = (Verdict.DISAGREE, Verdict.INCONCLUSIVE, Verdict.AGREE)
_FAR = 10
"""A statistic that is so many times its limit is as wrong as a larger one."""


class ShownVerdict(NamedTuple):
    """How the verdict of a cell is shown. ``note`` names the known failure of an expected one."""

    word: Verdict
    note: str = ""

    @classmethod
    def of(cls, cell: CellRecord) -> "ShownVerdict":
        known = cell.known_failure
        return cls(cell.verdict, f"(known: {printable(known.name)})" if known is not None and known.expected else "")

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
        """Sorts the worst verdict first, and a known failure after other disagreements."""
        return _WORST_FIRST.index(self.word), self.expected

    def __str__(self) -> str:
        return f"{self.word} {self.note}" if self.note else self.word


def share(margin: float | None, *, whole: bool = False) -> str:
    """Returns a share of a limit. How far it is above the limit says little.

    Args:
        margin: the share; None if it is infinite.
        whole: whether it is written out, however large.
    """
    number = inf if margin is None else margin
    return f"{number:.2f}" if number < _FAR else f"{number:.2g}" if whole else f"> {_FAR}"


def percent(mde: float | None) -> str:
    """Returns a minimum detectable effect. A pool that could be off by more than itself detects
    nothing.

    Args:
        mde: the effect; None if it is infinite.
    """
    if mde is None or mde > 1:
        return "nothing"
    return f"{mde:.2g}" if mde < 1e-4 else f"{float(f'{100 * mde:.2g}'):g}%"
