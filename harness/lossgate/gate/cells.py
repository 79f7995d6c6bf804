# SPDX-License-Identifier: Apache-2.0
"""What a gate asks of a cell: its verdict, how well it was seen, and known failures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise

from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import CellKey
from lossgate.evidence.summary import CellSummary
from lossgate.gate.rules import KnownFailureRule, Policy
from lossgate.gate.verdict import Blocker, GatedCell, Kind


@dataclass(frozen=True)
class Need:
    """How well a required cell must have been seen, by the strictest rule that asks for it."""

    min_problems: int
    max_mde: float


@dataclass(frozen=True)
class CellJudge:
    """Judges cells, one by one."""

    evidence: Gathered
    policy: Policy
    needs: Mapping[CellKey, Need]
    today: date

    def judge(self, key: CellKey, others: Sequence[Blocker] = ()) -> GatedCell:
        """Returns a cell with all that is wrong with it.

        Args:
            key: the cell.
            others: what is already known to be wrong with it.
        """
        told = self.evidence.cells.get(key, ())
        known = next((rule for rule in self.policy.known_failures if rule.key == key), None)
        blockers, excused = list(others), ""
        if told:
            blockers += self._lines(told)
            found, excused = self._verdict(told[-1], known)
            blockers += found
        elif known is not None:
            where = self.policy.where(known)
            message = "it is a known failure of the policy, and evidence tells nothing of it. Verify it, or remove it"
            blockers.append(Blocker(kind=Kind.MISSING, message=message, cell=key, where=where))
        summary = told[-1] if told else None
        required = key in self.needs or known is not None
        return GatedCell(
            key=key, summary=summary, required=required, excused=excused, blockers=tuple(dict.fromkeys(blockers))
        )

    def _lines(self, told: Sequence[CellSummary]) -> Iterator[Blocker]:
        """Yields where lines contradict themselves or each other."""
        for summary in told:
            if summary.where in self.evidence.contradictory:
                how = self.evidence.contradictory[summary.where]
                yield _of(summary, Kind.CONTRADICTORY, f"the line contradicts its own numbers: {how}. Verify again")
        for one, other in pairwise(told):
            if what := _difference(one, other):
                message = f"{one.where} tells of it, and differs in {what}. Leave out the evidence that does not count"
                yield _of(other, Kind.CONTRADICTORY, message)

    def _verdict(self, summary: CellSummary, known: KnownFailureRule | None) -> tuple[list[Blocker], str]:
        """Returns what is wrong with a cell by its verdict, and the issue that excuses it if one
        does.
        """
        if known is not None:
            found = list(self._known(summary, known))
            return found, "" if found else known.issue
        if summary.known_failure is not None:
            return [self._not_in_policy(summary)], ""
        if summary.verdict == "DISAGREE":
            return [_of(summary, Kind.DISAGREE, _told(summary))], ""
        if summary.key not in self.needs:
            return [], ""
        if summary.verdict != "AGREE":
            return [_of(summary, Kind.INCONCLUSIVE, "; ".join(summary.reasons))], ""
        return list(self._weak(summary, self.needs[summary.key])), ""

    def _weak(self, summary: CellSummary, need: Need) -> Iterator[Blocker]:
        if summary.problems < need.min_problems:
            message = (
                f"it has {summary.problems} problems, and the policy asks for {need.min_problems}; raise --examples"
            )
            yield _of(summary, Kind.WEAK, message)
        if summary.mde is None or not summary.mde <= need.max_mde:
            seen = "no error of scale" if summary.mde is None else f"an error of scale from {summary.mde:.2g} on"
            message = f"it would have shown {seen}, and the policy asks for {need.max_mde:g}; raise --examples"
            yield _of(summary, Kind.WEAK, message)

    def _not_in_policy(self, summary: CellSummary) -> Blocker:
        assert summary.known_failure is not None
        name = summary.known_failure.name
        if summary.failure is None:
            return _of(summary, Kind.KNOWN_FAILURE, f"known failure {name} is gone; remove it, and verify again")
        message = (
            f"it disagrees, and the policy has no [[known_failure]] for {name}; mend it, or add one with its issue"
        )
        return _of(summary, Kind.DISAGREE, message)

    def _known(self, summary: CellSummary, rule: KnownFailureRule) -> Iterator[Blocker]:
        """Yields why a known failure of the policy does not excuse a cell."""
        named = f"known failure {rule.name} ({self.policy.where(rule)}, {rule.owner}, {rule.issue})"
        if summary.verdict == "INCONCLUSIVE":
            yield _of(summary, Kind.INCONCLUSIVE, "; ".join(summary.reasons))
        elif summary.verdict == "AGREE" or (summary.known_failure is not None and summary.failure is None):
            yield _of(summary, Kind.KNOWN_FAILURE, f"{named} no longer fails; remove it from the policy")
        elif (changed := _changed(summary, rule)) is not None:
            yield _of(summary, Kind.DISAGREE, f"{named} {changed}. {_told(summary)}")
        elif self.today > rule.expires:
            message = f"{named} expired on {rule.expires}; mend it, or agree on another day with its owner"
            yield _of(summary, Kind.DISAGREE, message)


def _changed(summary: CellSummary, rule: KnownFailureRule) -> str | None:
    """Returns how a disagreement is another than the known one, or None if it is the same."""
    if (declared := summary.known_failure) is not None:
        if declared.name != rule.name:
            return f"does not excuse {declared.name}, which the candidate declares"
        if declared.example != rule.example_digest:
            return f"has another frozen example than the candidate: {rule.example} is not the file that was judged"
        return None if declared.expected else "fails in another way than its frozen example"
    symptoms = summary.failure.symptoms if summary.failure is not None else ("many problems together",)
    if new := [symptom for symptom in symptoms if symptom not in rule.symptoms]:
        return f"does not fail in {', '.join(new)}, as this does"
    return None


def _difference(one: CellSummary, other: CellSummary) -> str:
    """Returns in what two results of one cell differ, or "" if they are the same."""
    fields = ("verdict", "problems", "comparisons", "mde", "margin", "source_digest", "known_failure", "numbers")
    return ", ".join(name.replace("_", " ") for name in fields if getattr(one, name) != getattr(other, name))


def _told(summary: CellSummary) -> str:
    replay = f". Replay: {summary.failure.replay}" if summary.failure and summary.failure.replay else ""
    return f"it disagrees: {'; '.join(summary.reasons) or 'no reason is told'}{replay}"


def _of(summary: CellSummary, kind: Kind, message: str) -> Blocker:
    return Blocker(kind=kind, message=message, cell=summary.key, where=str(summary.where))
