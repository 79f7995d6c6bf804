# SPDX-License-Identifier: Apache-2.0
"""Judges a cell for a gate: its verdict, how well it was seen, and its known failure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import pairwise

from lossgate.engine.cell_record import CellKey, Outcome, Verdict
from lossgate.evidence.gather import Gathered
from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import Blocker, GatedCell, GateReason
from lossgate.gate.kept_properties import NotHeld
from lossgate.gate.policy import FrozenExample, Policy
from lossgate.gate.rules import KnownFailureRule

_OF_NUMBERS: Mapping[Verdict | None, str] = {
    Verdict.AGREE: "its numbers agree, but ",
    Verdict.INCONCLUSIVE: "its numbers agree so far, but ",
}
"""The beginning of what is said of a cell that breaks promises, by the verdict on its numbers."""


@dataclass(frozen=True)
class Need:
    """How well a required cell must have been seen, by the strictest rule that asks for it."""

    min_problems: int
    max_mde: float
    keeps: frozenset[str] = frozenset()
    numbers_only: bool = False


@dataclass(frozen=True)
class CellJudge:
    """Judges cells, one by one."""

    evidence: Gathered
    policy: Policy
    needs: Mapping[CellKey, Need]
    today: date

    def judge(self, key: CellKey, others: Sequence[Blocker] = ()) -> GatedCell:
        """Judges a cell.

        Args:
            key: the cell.
            others: its blockers from lines and runs.
        """
        results = self.evidence.cells.get(key, ())
        known = self.known_failures.get(key)
        blockers = [*others, *self._lines(results)]
        for summary in results:
            blockers += self._verdict(summary, known)
        if known is not None and not results:
            where = self.policy.where(known)
            message = "it is a known failure of the policy, but there is no evidence of it. Verify it, or remove it"
            blockers.append(Blocker(reason=GateReason.MISSING, message=message, cell=key, where=where))
        return GatedCell(
            key=key,
            summary=results[-1] if results else None,
            required=key in self.needs or known is not None,
            excused=known.issue if known is not None and not blockers else "",
            blockers=tuple(dict.fromkeys(blockers)),
        )

    @cached_property
    def known_failures(self) -> Mapping[CellKey, KnownFailureRule]:
        return {rule.key: rule for rule in self.policy.known_failures}

    @cached_property
    def not_held(self) -> NotHeld:
        return NotHeld(self.evidence)

    def _lines(self, results: Sequence[CellSummary]) -> Iterator[Blocker]:
        """Yields a blocker for each line that contradicts itself or the line before it."""
        for summary in results:
            if summary.where in self.evidence.contradictory:
                how = self.evidence.contradictory[summary.where]
                yield _of(
                    summary, GateReason.CONTRADICTORY, f"the line contradicts its own numbers: {how}. Verify again"
                )
        for one, other in pairwise(results):
            if what := _difference(one, other):
                message = (
                    f"this cell has another result in {one.where}: the two differ in {what}. Verify again, into a new "
                    "file"
                )
                yield _of(other, GateReason.CONTRADICTORY, message)

    def _verdict(self, summary: CellSummary, known: KnownFailureRule | None) -> Iterator[Blocker]:
        """Yields the blockers that follow from the verdict of a result."""
        if summary.where in self.evidence.contradictory:
            return  # its verdict means nothing
        if known is not None:
            yield from self._known(summary, known)
            return
        if summary.known_failure is not None:
            yield self._not_in_policy(summary)
            return
        need = self.needs.get(summary.key)
        counts_as = summary.counts_as(numbers_only=need is not None and need.numbers_only)
        if counts_as == "DISAGREE" and summary.outcome is Outcome.PROMISE_BROKEN:
            message = f"{_OF_NUMBERS.get(summary.numbers, '')}it breaks {', '.join(summary.broken)}"
            yield _of(summary, GateReason.PROMISE_BROKEN, message, summary.why)
        elif counts_as == "DISAGREE":
            yield _of(summary, GateReason.DISAGREE, "it disagrees", summary.why)
        elif need is not None and counts_as == "INCONCLUSIVE":
            yield _of(summary, GateReason.INCONCLUSIVE, "it is inconclusive", summary.why)
        elif need is not None:
            yield from self._weak(summary, need)

    def _weak(self, summary: CellSummary, need: Need) -> Iterator[Blocker]:
        if summary.problems < need.min_problems:
            message = (
                f"it has {summary.problems} problems, but the policy asks for {need.min_problems}; raise --examples"
            )
            yield _of(summary, GateReason.WEAK, message)
        if summary.mde is None or not summary.mde <= need.max_mde:  # also if it is no number
            seen = "no error of scale" if summary.mde is None else f"only errors of scale from {summary.mde:.2g} on"
            message = (
                f"it would have shown {seen}, but the policy asks for errors from {need.max_mde:g} on; raise --examples"
            )
            yield _of(summary, GateReason.WEAK, message)
        for name in sorted(need.keeps.difference(summary.kept, [summary.key.property])):
            if name in summary.broken:
                message = f"{_OF_NUMBERS.get(summary.numbers, '')}it breaks {name}, which keeps of the policy names"
                yield _of(summary, GateReason.PROMISE_BROKEN, message, summary.why)
                continue
            message = f"it was not held to property {name}, as the policy asks: {self.not_held.why(summary, name)}"
            yield _of(summary, GateReason.WEAK, message)

    def _not_in_policy(self, summary: CellSummary) -> Blocker:
        assert summary.known_failure is not None
        name = summary.known_failure.name
        if summary.failure is None:
            return _of(
                summary,
                GateReason.KNOWN_FAILURE,
                f"the candidate declares the known failure {name}, which is gone; remove it there, and verify again",
            )
        message = (
            f"it disagrees, and the policy has no [[known_failure]] for {name}; mend the kernel, or add one with its "
            "issue"
        )
        return _of(summary, GateReason.DISAGREE, message)

    def _known(self, summary: CellSummary, rule: KnownFailureRule) -> Iterator[Blocker]:
        """Yields why a known failure of the policy does not excuse a cell."""
        named = f"known failure {rule.name} ({self.policy.where(rule)}, {rule.owner}, {rule.issue})"
        if summary.verdict == "INCONCLUSIVE":
            yield _of(summary, GateReason.INCONCLUSIVE, "it is inconclusive", summary.why)
            return
        example_agrees = summary.known_failure is not None and summary.failure is None
        if summary.verdict == "AGREE" or example_agrees:
            yield _of(summary, GateReason.KNOWN_FAILURE, f"{named} no longer fails; remove it from the policy")
            return
        changed = _changed(summary, rule, self.policy.examples[rule.key])
        if changed is not None:
            yield _of(summary, GateReason.DISAGREE, f"{named} {changed}. It disagrees", summary.why)
        elif self.today > rule.expires:
            message = f"{named} expired on {rule.expires}; mend it, or agree on another day with its owner"
            yield _of(summary, GateReason.DISAGREE, message)


def _changed(summary: CellSummary, rule: KnownFailureRule, example: FrozenExample) -> str | None:
    """Returns how this disagreement differs from the known failure, as the rest of a sentence about
    the known failure. None if it does not differ.
    """
    if (declared := summary.known_failure) is not None:
        if declared.name != rule.name:
            return f"does not excuse {declared.name}, which the candidate declares"
        if declared.example != example.digest:
            return f"has another frozen example than the candidate: {rule.example} is not the file that was judged"
        return None if declared.expected else "is not all that fails, or fails in another way than its frozen example"
    if summary.failure is None:
        return "is of one problem, but this cell disagrees only over all problems pooled"
    if new := [symptom for symptom in summary.symptoms if symptom not in example.symptoms]:
        return f"does not fail in {', '.join(new)}, as this cell does"
    return None


def _difference(one: CellSummary, other: CellSummary) -> str:
    """Returns the fields in which two results of one cell differ; empty if they are the same."""
    if one.content == other.content:
        return ""
    fields = ("verdict", "problems", "comparisons", "mde", "source_digest", "symptoms", "known_failure")
    found = [name.replace("_", " ") for name in fields if getattr(one, name) != getattr(other, name)]
    return ", ".join(found) or "a number"


def _of(summary: CellSummary, reason: GateReason, message: str, why: str = "") -> Blocker:
    return Blocker(reason=reason, message=message, why=why, cell=summary.key, where=str(summary.where))
