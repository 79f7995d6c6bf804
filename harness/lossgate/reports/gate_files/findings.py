# SPDX-License-Identifier: Apache-2.0
"""The findings of a gate, in the words of the screen and of all files."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellKey
from lossgate.gate.gate_verdict import Blocker, GatedCell, GateReason, GateVerdict
from lossgate.reports.describe import CONVENTIONS, EXCLUDED, EXEMPT, NOT_DISTINGUISHED, in_pairs, remark_lines

_ALLOWED = "Promises that are broken, which the policy lets pass because the numbers agree:"


@dataclass(frozen=True)
class GateFinding:
    """A reason that closes the gate, with the cell that it is about."""

    blocker: Blocker
    cell: GatedCell | None
    """None if the reason is about no single cell."""

    @property
    def reason(self) -> GateReason:
        return self.blocker.reason

    @property
    def sentence(self) -> str:
        """What is wrong, after the name of the cell if there is one."""
        return f"{self.cell.key}: {self.blocker.sentence}" if self.cell is not None else self.blocker.sentence

    @property
    def replay(self) -> str:
        """The command that shows what is wrong again; empty if there is none."""
        if not self.reason.is_of_kernel or self.cell is None or self.cell.summary is None:
            return ""
        return self.cell.summary.replay or ""


@dataclass(frozen=True)
class GateFindings:
    """The findings of a gate.

    Args:
        verdict: the verdict of the gate.
    """

    verdict: GateVerdict

    @cached_property
    def all(self) -> Sequence[GateFinding]:
        """The findings, the gravest first."""
        return [finding for found in self.by_reason.values() for finding in found]

    @cached_property
    def by_reason(self) -> Mapping[GateReason, Sequence[GateFinding]]:
        """The findings by reason, the gravest reason first. It has only reasons with findings."""
        found: defaultdict[GateReason, list[GateFinding]] = defaultdict(list)
        for blocker in self.verdict.general:
            found[blocker.reason].append(GateFinding(blocker, None))
        for cell in self.verdict.cells:
            for finding in of_cell(cell):
                found[finding.reason].append(finding)
        return {reason: found[reason] for reason in GateReason if reason in found}

    @property
    def headline(self) -> str:
        """The verdict as a sentence."""
        if self.verdict.passes:
            cells = counted(len(self.verdict.cells), "cell")
            excused = sum(1 for cell in self.verdict.cells if cell.excused)
            by_known = f", {excused} of them excused by known failures" if excused else ""
            return f"The gate is open: {cells}{by_known}"
        reasons = ", ".join(f"{reason} ({len(found)})" for reason, found in self.by_reason.items())
        return f"The gate is closed for {counted(len(self.all), 'reason')}: {reasons}"

    @property
    def remarks(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Headings, each with its lines, about cells of any verdict: choices that are not
        distinguished, properties to which candidates are not held, problems that they are not
        given, and broken promises that the policy lets pass. A heading without lines is left out.
        """
        seen = [(cell, cell.summary) for cell in self.verdict.cells if cell.summary is not None]
        summaries = [summary for _, summary in seen]
        remarks = {
            NOT_DISTINGUISHED: [one.not_distinguished for one in summaries],
            EXEMPT: [in_pairs(one.exempt) for one in summaries],
            CONVENTIONS: [in_pairs(one.conventions) for one in summaries],
            EXCLUDED: [in_pairs(one.excluded) for one in summaries],
            _ALLOWED: [one.broken if cell.passes and not cell.excused else () for cell, one in seen],
        }
        candidates = [one.key.candidate for one in summaries]
        for heading, of_cells in remarks.items():
            if lines := remark_lines(heading, zip(candidates, of_cells, strict=True)):
                yield heading, lines[1:]


def of_cell(cell: GatedCell) -> Sequence[GateFinding]:
    """Returns the findings about a cell."""
    return [GateFinding(blocker, cell) for blocker in cell.blockers]


def short_name(key: CellKey) -> str:
    """Returns the name of a cell without its candidate."""
    where = f" on {key.place}" if key.place else ""
    return f"{key.property}-{key.layout}-{key.dtype}{where}"
