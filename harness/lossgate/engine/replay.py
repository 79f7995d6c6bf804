# SPDX-License-Identifier: Apache-2.0
"""Judges the problems of a failure file again, and compares what comes of it with the file."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.base.spelling import counted, in_a_row
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import Verdict
from lossgate.engine.failure_files import FailureFile, FrozenCase, versions
from lossgate.engine.judge_again import judge_again
from lossgate.engine.settings import Settings
from lossgate.properties import find_property


@dataclass(frozen=True)
class Replayed:
    """What came of a replay."""

    cell: Cell
    verdict: Verdict
    """AGREE and DISAGREE are about the problems of the file alone. INCONCLUSIVE if nothing could
    have shown on them."""
    findings: tuple[str, ...]
    """What is wrong, or why nothing is known; what verify said of its cause, if it is wrong as it
    was then; then on which problems, and after which."""
    since: str
    """How it compares with what the file says, in words; "" if nothing is known of that."""
    exact: bool
    """Every statistic is the number in the file."""

    @property
    def disagrees(self) -> bool:
        return self.verdict is Verdict.DISAGREE

    @property
    def title(self) -> str:
        """The verdict, and on what."""
        cell = self.cell
        of = "" if cell.property.needs_adequacy else f"  {cell.property}"
        return f"{self.verdict}  {cell.candidate.name}{of}  {cell.dtype}  {cell.layout}"

    @property
    def lines(self) -> tuple[str, ...]:
        """All of it, in words."""
        return (self.title, *(f"  {line}" for line in self.findings), *([f"  {self.since}"] if self.since else []))


def replay_failure(
    failure: FailureFile, candidate: str | None = None, world: str | None = None, timeout: float | None = None
) -> Replayed:
    """Judges the problems of a failure file again.

    Args:
        failure: what the file holds.
        candidate: judge this one (``file.py:name``) in place of the one that the file names.
        world: where ranks run; by default where the problems failed.
        timeout: seconds after which ranks that do not go on count as hanging.

    Raises:
        UsageError: if the candidate cannot be read, or does not fit the problem; or the timeout is
            not positive, or a problem is too large for this machine.
        WorldLost: if a rank is gone and cannot be replaced, or the process of the ranks has ended
            and not by the kernel.
    """
    settings = Settings() if timeout is None else Settings(timeout=timeout)
    cell = _cell_of(failure, candidate, world)
    again = judge_again(failure, cell, settings.timeout)
    reasons, cases = again.failing.reasons if again.failing else again.wrong, again.cases
    verdict = Verdict.DISAGREE if reasons else Verdict.AGREE
    if not reasons and not failure.is_as_written() and (why := why_it_shows_nothing(cell, cases)):
        verdict, reasons = Verdict.INCONCLUSIVE, (why,)
    exact = [FrozenCase.of(case).statistics for case in cases] == [frozen.statistics for frozen in failure.examples]
    since = since_written(failure, again.symptoms, exact=exact, other=candidate is not None)
    found = [line for reason in reasons for line in reason.splitlines()]
    if candidate is None and is_as_it_was(failure, again.symptoms):
        found += [_said(line) for line in failure.causes]
    return Replayed(cell, verdict, (*found, *_on(failure, again.failing)), since, exact)


def _said(line: str) -> str:
    """Returns a line of a cause, which is not looked for again, as what verify said of it."""
    return f"verify said of the {line}" if line.startswith("cause: ") else line


def _cell_of(failure: FailureFile, candidate: str | None, world: str | None) -> Cell:
    """Returns what is judged again.

    Raises:
        UsageError: if the candidate cannot be read, or is not held to the property.
    """
    found, problem = candidate_of(failure, candidate), failure.examples[0].problem
    held_to = find_property(failure.property)
    if not held_to.applies(found):
        raise UsageError(f"candidate {found.name!r} is not held to property {held_to.name!r}: it does not apply to it")
    return Cell(found, problem.layout, problem.dtype, held_to, world or failure.world, failure.device)


def why_it_shows_nothing(cell: Cell, cases: Sequence[CaseResult]) -> str:
    """Returns why no problem could have shown that a kernel is wrong; "" if one could."""
    if not any(case.fits for case in cases):
        return f"property {cell.property} says nothing of this problem"
    comparisons = [comparison for case in cases for comparison in case.comparisons]
    if not cell.property.needs_adequacy or any(comparison.tells_scale for comparison in comparisons):
        return ""
    if all(comparison.vacuous for comparison in comparisons):
        return "every output is 0 in the reference, as where no token is trained, so that the problem shows nothing"
    return "rounding explains even a result of zero, so that the problem shows nothing"


def _on(failure: FailureFile, failing: CaseResult | None) -> Iterator[str]:
    """Yields on which problems, and after which."""
    problem = failure.examples[0].problem if failing is None else failing.problem
    yield f"on: {len(failure.examples)} problems, pooled" if failure.pooled else f"on: {problem.describe()}"
    yield from (f"  {line}" for line in (failing.side_by_side if failing else ()))
    if failure.earlier:
        yield f"after {counted(len(failure.earlier), 'call')} with other problems, in the same process"


def candidate_of(failure: FailureFile, candidate: str | None = None) -> Candidate:
    """Loads the candidate of a failure file.

    Args:
        failure: what the file holds.
        candidate: the one to take in its place.

    Raises:
        UsageError: if it cannot be read, or its spec has not the options of the problems.
    """
    location = failure.candidate.rpartition(":")[0]
    if candidate is None and location.endswith(".py") and not Path(location).is_file():
        raise UsageError(
            f"{location}: no such file, neither here nor above the failure file; replay it in the folder where it was "
            "verified, or name the candidate: --candidate file.py:name"
        )
    found = load_candidates(candidate or failure.candidate)
    if len(found) != 1:
        raise UsageError(f"{candidate or failure.candidate}: {len(found)} candidates in it; name one, as file.py:name")
    _check_options(found[0], failure)
    return found[0]


def _check_options(candidate: Candidate, failure: FailureFile) -> None:
    """Refuses problems with options that the spec of today does not have.

    Raises:
        UsageError: if there is one.
    """
    for frozen in failure.examples:
        if frozen.problem.spec != candidate.spec.name:
            continue  # the message is then about that
        try:
            candidate.spec.bind(frozen.problem.options)
        except UsageError as error:
            raise UsageError(
                f"{error}. If nobody edited the failure file, spec {candidate.spec.name!r} has changed since it was "
                "written; run verify again to write a new one"
            ) from None


def since_written(failure: FailureFile, symptoms: Collection[str], *, exact: bool, other: bool) -> str:
    """Returns what is known of a failure since its file was written; "" if nothing is.

    Args:
        failure: what the file holds.
        symptoms: in what the candidate disagrees now; empty if it agrees.
        exact: every statistic is the one in the file.
        other: another candidate was replayed than the one that the file names.
    """
    if exact and symptoms:
        return "it fails exactly as when the file was written"
    if other:
        return ""
    if not failure.is_as_written():
        return "the problem is not known to be the one with which the file was written, so nothing is compared"
    if not symptoms:
        return _mended(failure)
    was, now = (listed(names) for names in (_symptoms_in(failure), symptoms))
    if not is_as_it_was(failure, symptoms):
        return f"it disagrees otherwise than when the file was written: then in {was}, now in {now}{_and(failure)}"
    return f"it still disagrees in {now}, with other numbers than in the file{_and(failure) or _POSSIBLE}"


def is_as_it_was(failure: FailureFile, symptoms: Collection[str]) -> bool:
    """Returns whether the problems of a file are as they were written, and show the same today.

    Args:
        failure: what the file holds.
        symptoms: in what a candidate disagrees now; empty if it agrees.
    """
    return bool(symptoms) and failure.is_as_written() and {*symptoms} == {*_symptoms_in(failure)}


_POSSIBLE = ": the kernel, its spec or the machine is another one"


def _mended(failure: FailureFile) -> str:
    if changed := _changed(failure):
        return f"the failure is gone: the kernel agrees on this problem now; but {changed} since the file was written"
    return "the failure is mended: the kernel agrees on this problem now"


def _symptoms_in(failure: FailureFile) -> Collection[str]:
    """Returns in what the candidate disagreed on the problems of the file."""
    if failure.pooled:
        return failure.symptoms
    return {symptom for frozen in failure.examples for symptom in frozen.symptoms}


def _and(failure: FailureFile) -> str:
    changed = _changed(failure)
    return changed and f"; {changed} since the file was written"


def _changed(failure: FailureFile) -> str:
    """Returns which versions are others than in the file, in words; "" if none is."""
    now = versions()
    changed = [
        f"{name} went from {failure.versions[name]} to {now[name]}"
        for name in now
        if name in failure.versions and failure.versions[name] != now[name]
    ]
    return ", ".join(changed)


def listed(names: Collection[str]) -> str:
    """Returns names in words, each once."""
    return in_a_row(sorted(set(names)))
