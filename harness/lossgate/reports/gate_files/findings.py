# SPDX-License-Identifier: Apache-2.0
"""What a gate found, as the screen and all files say it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lossgate.base.spelling import counted
from lossgate.evidence.records import CellKey
from lossgate.gate.gate_verdict import Blocker, GatedCell, GateReason, GateVerdict
from lossgate.reports.remarks import EXCLUDED, EXEMPT, NOT_DISTINGUISHED, remark_lines


@dataclass(frozen=True)
class GateFinding:
    """A reason that closes the gate, with the cell that it is about."""

    blocker: Blocker
    cell: GatedCell | None
    """None if it is about more than one cell."""

    @property
    def reason(self) -> GateReason:
        return self.blocker.reason

    @property
    def sentence(self) -> str:
        """What is wrong, and where: it begins with the cell."""
        return f"{self.cell.key}: {self.blocker.sentence}" if self.cell is not None else self.blocker.sentence

    @property
    def replay(self) -> str:
        """The command that shows a disagreement again; empty if there is none."""
        return replay_of(self.cell) if self.reason is GateReason.DISAGREE and self.cell is not None else ""


@dataclass(frozen=True)
class GateFindings:
    """What a gate found.

    Args:
        verdict: what the gate says.
    """

    verdict: GateVerdict

    @cached_property
    def all(self) -> Sequence[GateFinding]:
        """The findings, the gravest first."""
        return [finding for found in self.by_reason.values() for finding in found]

    @cached_property
    def by_reason(self) -> Mapping[GateReason, Sequence[GateFinding]]:
        """The findings of each reason that there is, the gravest reason first."""
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
            excused = sum(1 for cell in self.verdict.cells if cell.excused)
            by_known = f", {excused} of them excused by known failures" if excused else ""
            return f"The gate is open: {counted(len(self.verdict.cells), 'cell')}{by_known}"
        reasons = ", ".join(f"{reason} ({len(found)})" for reason, found in self.by_reason.items())
        return f"The gate is closed for {counted(len(self.all), 'reason')}: {reasons}"

    @property
    def remarks(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Headings and the lines below them, on cells whatever their verdict: choices that are not
        distinguished, properties to which candidates are not held, and problems that they are not
        given. Nothing is yielded if there is nothing to say.
        """
        summaries = [cell.summary for cell in self.verdict.cells if cell.summary is not None]
        remarks = {
            NOT_DISTINGUISHED: [one.not_distinguished for one in summaries],
            EXEMPT: [in_pairs(one.exempt) for one in summaries],
            EXCLUDED: [in_pairs(one.excluded) for one in summaries],
        }
        for heading, of_cells in remarks.items():
            candidates = (one.key.candidate for one in summaries)
            if lines := remark_lines(heading, zip(candidates, of_cells, strict=True)):
                yield heading, lines[1:]


def of_cell(cell: GatedCell) -> Sequence[GateFinding]:
    """Returns what closes the gate because of a cell."""
    return [GateFinding(blocker, cell) for blocker in cell.blockers]


def replay_of(cell: GatedCell) -> str:
    """Returns the command that shows the disagreement of a cell again; empty if there is none."""
    return cell.summary.replay or "" if cell.summary is not None else ""


def short_name(key: CellKey) -> str:
    """Returns the name of a cell among those of its candidate."""
    where = "" if (key.world, key.device) == ("simulated", "cpu") else f" on {key.world}/{key.device}"
    return f"{key.property}-{key.layout}-{key.dtype}{where}"


def in_pairs(declared: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what a candidate declares, each with the reason that it gives."""
    return tuple(f"{what}: {why}" for what, why in declared.items())
