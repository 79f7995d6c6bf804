# SPDX-License-Identifier: Apache-2.0
"""Judges the problems of a failure file in a cell of today."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.base.spelling import counted, in_a_row
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.large import size_of
from lossgate.cases.placement import is_given
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import has_source, load_candidates
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import Outcome, Verdict
from lossgate.engine.crash import run_in_child
from lossgate.engine.failure_files import FailureFile, FrozenCase, versions
from lossgate.engine.jobs import run_cases
from lossgate.engine.own_mistakes import shown_by
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import pooled_disagreements, pooled_outputs
from lossgate.problems.problem import Problem
from lossgate.properties import find_property

_BYTES = 32
"""Bytes for each number of the largest tensor: float64, with its gradient and two temporaries."""


@dataclass(frozen=True)
class Again:
    """The results on the problems of a failure file."""

    cases: Sequence[CaseResult]
    """One result for each example of the file."""
    wrong: tuple[str, ...] = ()
    """What is wrong, in words. Empty if the kernel agrees."""
    symptoms: Collection[str] = ()
    """The symptoms of ``wrong``."""
    failing: CaseResult | None = None
    """The first case that disagrees by itself, and not only pooled."""


def judge_again(failure: FailureFile, cell: Cell, timeout: float) -> Again:
    """Judges the problems of a failure file in a cell.

    Raises:
        UsageError: if a problem does not suit the candidate, if its conventions rule it out, or if
            it is too large for this machine.
        WorldLost: as for ``replay_failure``.
    """
    for problem in failure.problems():
        _check_memory(problem)
        _check_given(cell.candidate, problem)
    cases = _run(cell, failure.problems(), timeout)[-len(failure.examples) :]
    failing = next((case for case in cases if not case.agrees), None)
    if failing is not None:
        return Again(cases, failing.findings, failing.symptoms, failing)
    if not failure.pooled:
        return Again(cases)
    pooled = pooled_outputs(cases)
    return Again(cases, pooled_disagreements(pooled), [str(one.output) for one in pooled if not one.agrees])


def _run(cell: Cell, problems: Sequence[Problem], timeout: float) -> list[CaseResult]:
    """Runs problems in a new process, if that can load the candidate and the property."""
    if cell.world == "simulated" and has_source(cell.candidate):
        with suppress(UsageError):  # the new process may not know the property
            return run_in_child(cell, problems, timeout)
    return run_cases(cell, problems, timeout)


def _check_given(candidate: Candidate, problem: Problem) -> None:
    """Refuses a problem that a candidate's conventions rule out, as they may since it failed.

    Raises:
        UsageError: if they do.
    """
    own = candidate.conventions
    if problem.spec != candidate.spec.name:  # that is refused when the problem is run
        return
    if own.ranks_have_tokens and "rank" in problem.partition.empty:
        said = f"empty_ranks={own.empty_ranks!r}" if own.empty_ranks == "refused" else f"untrained={own.untrained!r}"
        lacks = "so it is never given a rank without a token, as the problem has"
    elif own.untrained != "zero" and not is_given(candidate, BoundProblem(candidate.spec, problem), problem.partition):
        said, lacks = f"untrained={own.untrained!r}", "and in a call of the problem nothing is trained"
    else:
        return
    raise UsageError(
        f"candidate {candidate.name!r} declares {said}, {lacks}: nothing is to be judged. Remove the file, or the "
        "convention"
    )


def _check_memory(problem: Problem) -> None:
    """Refuses a problem that this machine can't hold.

    The system would end the process for want of memory, and that would look like a crash of the
    kernel.

    Raises:
        UsageError: if the problem needs more memory than the machine has.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := _BYTES * size_of(problem)) > machine:
        raise UsageError(
            f"the problem has tensors of {size_of(problem):,} numbers, which need about {needed / 2**30:.0f} GiB with "
            f"their gradients, and this machine has {machine / 2**30:.0f} GiB; replay it on a larger machine"
        )


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    cell: Cell
    verdict: Verdict
    """The verdict on the problems of the file alone. INCONCLUSIVE if no mistake could have shown on
    them."""
    findings: tuple[str, ...]
    """Lines with the cause that verify found, if the kernel is wrong in the same way as then; then
    what is wrong, or why nothing is known."""
    statistics: tuple[str, ...]
    """The statistics over their limit, in words."""
    on: tuple[str, ...]
    """The problems of the file, in words."""
    since: str
    """How the result compares with the file, in words; "" if nothing is known."""
    exact: bool
    """Whether every statistic has the same number as in the file."""

    @property
    def disagrees(self) -> bool:
        return self.verdict is Verdict.DISAGREE

    @property
    def outcome(self) -> Outcome:
        """The verdict as people are told it."""
        breaks_promise = self.disagrees and not self.cell.property.needs_adequacy
        return Outcome.PROMISE_BROKEN if breaks_promise else Outcome(self.verdict)

    @property
    def title(self) -> str:
        """The verdict and what it is about."""
        cell = self.cell
        of = "" if cell.property.needs_adequacy else f"  {cell.property}"
        return f"{self.outcome}  {cell.candidate.name}{of}  {cell.dtype}  {cell.layout}"

    def lines(self, *, whole: bool = False) -> tuple[str, ...]:
        """Returns the result as lines of text, with the statistics if it is wanted as a whole."""
        statistics = self.statistics if whole else ()
        below = (*self.findings, *statistics, *self.on, self.since)
        return (self.title, *(f"  {line}" for line in below if line))


def replay_failure(
    failure: FailureFile, candidate: str | None = None, world: str | None = None, timeout: float | None = None
) -> Replayed:
    """Judges the problems of a failure file again.

    Args:
        failure: the content of the file.
        candidate: another candidate to judge (``file.py:name``) in place of the one in the file.
        world: where ranks run; by default where the problems failed.
        timeout: seconds after which ranks that make no progress count as hanging.

    Raises:
        UsageError: if the candidate cannot be read, or does not fit the problem; or if the timeout
            is not positive, or a problem is too large for this machine.
        WorldLost: if a rank is gone and cannot be replaced, or if the process of the ranks has
            ended and the kernel did not end it.
    """
    settings = Settings() if timeout is None else Settings(timeout=timeout)
    cell = _cell_of(failure, candidate, world)
    again = judge_again(failure, cell, settings.timeout)
    cases = again.cases
    reasons = again.failing.reasons if again.failing else again.wrong
    verdict = Verdict.DISAGREE if reasons else Verdict.AGREE
    if not reasons and not failure.is_as_written() and (why := why_it_shows_nothing(cell, cases)):
        verdict, reasons = Verdict.INCONCLUSIVE, (why,)
    then = [frozen.statistics for frozen in failure.examples]
    exact = then == [FrozenCase.of(case).statistics for case in cases]
    since = since_written(failure, again.symptoms, exact=exact, other=candidate is not None)
    findings = [line for reason in reasons for line in reason.splitlines()]
    if candidate is None and is_as_it_was(failure, again.symptoms):
        findings = [*map(_as_said_by_verify, failure.causes), *findings]
    statistics = again.failing.statistics if again.failing else ()
    return Replayed(cell, verdict, tuple(findings), statistics, tuple(_on(failure, again.failing)), since, exact)


def _as_said_by_verify(line: str) -> str:
    """Makes a line about the cause say that verify found it. A replay looks for no cause."""
    return f"verify said of the {line}" if line.startswith("cause: ") else line


def _cell_of(failure: FailureFile, candidate: str | None, world: str | None) -> Cell:
    """Returns the cell in which the problems are judged again.

    Raises:
        UsageError: if the candidate cannot be read, or if the property does not apply to it.
    """
    found, problem = candidate_of(failure, candidate), failure.examples[0].problem
    held_to = find_property(failure.property)
    if not held_to.applies(found):
        raise UsageError(
            f"property {held_to.name!r} does not apply to candidate {found.name!r}; name another candidate"
        )
    return Cell(found, problem.layout, problem.dtype, held_to, world or failure.world, failure.device)


def why_it_shows_nothing(cell: Cell, cases: Sequence[CaseResult]) -> str:
    """Returns why no problem could have shown that a kernel is wrong; "" if a problem could."""
    held_to = cell.property
    if not any(case.fits for case in cases):
        return f"this problem says nothing about property {held_to}"
    if hidden := dict.fromkeys(sentence for case in cases for sentence in case.said):
        shown = shown_by(case.said for case in cases)
        return "" if shown else f"this problem would not have shown a kernel in which {', or '.join(hidden)}"
    comparisons = [comparison for case in cases for comparison in case.comparisons]
    if any(comparison.tells_scale for comparison in comparisons):
        return ""
    if not held_to.needs_adequacy and any(_is_somewhere(cell, case) for case in cases):
        return ""
    if all(comparison.vacuous for comparison in comparisons):
        return (
            "every output is 0 in the reference, for example because no token is trained, so this problem shows nothing"
        )
    return "rounding explains even a result of zero, so this problem shows nothing"


def _is_somewhere(cell: Cell, case: CaseResult) -> bool:
    """Returns whether the loss or a gradient is not 0 everywhere in the reference."""
    reference = BoundProblem(cell.candidate.spec, case.problem).reference(())
    return any(bool(whole.any()) for output, whole in reference.items() if output.kind in ("loss", "gradient"))


def _on(failure: FailureFile, failing: CaseResult | None) -> Iterator[str]:
    """Yields lines that describe the problems, and the calls before."""
    if failure.pooled:
        yield f"on: {len(failure.examples)} problems, pooled"
    else:
        problem = failure.examples[0].problem if failing is None else failing.problem
        yield f"on: {problem.describe()}"
    if failure.earlier:
        yield f"after {counted(len(failure.earlier), 'call')} with other problems, in the same process"


def candidate_of(failure: FailureFile, candidate: str | None = None) -> Candidate:
    """Loads the candidate of a failure file.

    Args:
        failure: the content of the file.
        candidate: another candidate to load in its place.

    Raises:
        UsageError: if the candidate cannot be read, or if its spec lacks an option of the problems.
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
    """Refuses problems whose options the spec does not accept any more.

    Raises:
        UsageError: if there is such a problem.
    """
    for frozen in failure.examples:
        if frozen.problem.spec != candidate.spec.name:
            continue  # another check refuses the other spec, with a message of its own
        try:
            candidate.spec.bind(frozen.problem.options)
        except UsageError as error:
            raise UsageError(
                f"{error}. If nobody edited the failure file, spec {candidate.spec.name!r} has changed since it was "
                "written; run verify again to write a new one"
            ) from None


def since_written(failure: FailureFile, symptoms: Collection[str], *, exact: bool, other: bool) -> str:
    """Returns how a failure has changed since its file was written, in words; "" if nothing is
    known.

    Args:
        failure: the content of the file.
        symptoms: the symptoms of today. Empty if the candidate agrees.
        exact: whether every statistic has the same number as in the file.
        other: whether another candidate was replayed than that of the file.
    """
    if exact and symptoms:
        return "it fails exactly as when the file was written"
    if other:
        return ""
    if not failure.is_as_written():
        return "the problems may have been edited since the file was written, so nothing is compared with it"
    changed = _changed_versions(failure)
    if not symptoms and changed:
        return f"the failure is gone: the kernel agrees on this problem now; but {changed}"
    if not symptoms:
        return "the failure is mended: the kernel agrees on this problem now"
    now = listed(symptoms)
    if not is_as_it_was(failure, symptoms):
        then = listed(_symptoms_in(failure))
        also = f"; {changed}" if changed else ""
        return f"it disagrees differently than when the file was written: then in {then}, now in {now}{also}"
    why = f"; {changed}" if changed else ": the kernel, its spec or the machine has changed"
    return f"it still disagrees in {now}, with other numbers than in the file{why}"


def is_as_it_was(failure: FailureFile, symptoms: Collection[str]) -> bool:
    """Returns whether the symptoms of today are the same as when the file was written."""
    return bool(symptoms) and failure.is_as_written() and {*symptoms} == {*_symptoms_in(failure)}


def _symptoms_in(failure: FailureFile) -> Collection[str]:
    """Returns the symptoms of the problems of the file, as they were written."""
    if failure.pooled:
        return failure.symptoms
    return {symptom for frozen in failure.examples for symptom in frozen.symptoms}


def _changed_versions(failure: FailureFile) -> str:
    """Returns the versions that differ from those in the file, in words; "" if none does."""
    now = versions()
    changed = [
        f"{name} went from {failure.versions[name]} to {now[name]}"
        for name in now
        if name in failure.versions and failure.versions[name] != now[name]
    ]
    return f"{', '.join(changed)} since the file was written" if changed else ""


def listed(names: Collection[str]) -> str:
    """Returns names in alphabetical order, in words, without repetition."""
    return in_a_row(sorted(set(names)))
