# SPDX-License-Identifier: Apache-2.0
"""Runs problems in a cell, and shrinks the first one on which a candidate disagrees.

Hypothesis does the shrinking: it draws the problem again, and then simpler ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic

import hypothesis
from hypothesis.errors import Flaky

from lossgate.adequacy.entry import Entry, Placed
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.base.errors import CandidateError, LossgateError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.large import is_large
from lossgate.cases.placement import is_given, splits_of
from lossgate.cases.problem_strategies import VOCABS
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.own_mistakes import said_by
from lossgate.engine.settings import Settings
from lossgate.problems.problem import Problem
from lossgate.specs.outputs import Output
from lossgate.worlds.base import Hang, RankFailure, World, WorldLost

_OTHERS = 2
"""The most failures of other kinds that are reported with the first."""


class _DisagreementError(Exception):
    """Tells Hypothesis that a problem fails.

    All failures have this type and are raised on one line, so Hypothesis takes them for the same.
    """


class _StopSearch(BaseException):
    """Ends the search at once. It is not an Exception, so that Hypothesis lets it through."""


@dataclass
class Trials:
    """The problems that were tried in a cell, and their results."""

    cell: Cell
    world: World
    settings: Settings
    cases: list[CaseResult] = field(default_factory=list)
    """The results of the problems in order, up to the first that disagrees."""
    failure: CaseResult | None = None
    """The result of the smallest case that disagrees."""
    failing_case: Case | None = None
    """The smallest case that disagrees, with the outputs of each rank."""
    shrink_calls: int = 0
    """How many problems were tried to make the failing one smaller."""
    surviving: dict[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem has killed."""
    aside: Callable[[Case, CaseResult], CaseResult] | None = None
    """Returns the result of a case without the known failure of the candidate; None if it has
    none."""
    near: dict[str, OptionMutant] = field(default_factory=dict)
    """Option mutants that no problem has killed and that need not be killed, because their choices
    are near each other."""
    others: dict[frozenset[str], CaseResult] = field(default_factory=dict)
    """The smallest cases that disagree in other ways than the first, by their kinds of failure."""
    _tried: list[tuple[BoundProblem, CaseResult]] = field(default_factory=list)
    """The problem and the result of each case. Large problems are not kept: their tensors take too
    much memory."""
    _error: LossgateError | None = None
    _first_kinds: frozenset[str] = frozenset()
    """The kinds of the first failure."""
    _infinite: frozenset[Output] = frozenset()
    """The outputs whose reference is not finite on the first failing problem."""
    _failed_at: float = 0.0

    def __post_init__(self) -> None:
        self._splits = splits_of(self.cell.candidate)

    def try_problem(self, placed: Placed) -> None:
        """Runs one problem. If the candidate fails on it, makes the problem smaller."""
        try:
            self._check(placed.problem, placed.entry)
        except _StopSearch:
            pass
        except _DisagreementError:
            self._shrink(placed)
            self._add_others()
        if self._error is not None:
            raise self._error

    def _shrink(self, placed: Placed) -> None:
        """Has Hypothesis draw the problem again and shrink it. The layout stays.

        The failure is reported as flaky if the same problem does not fail again.
        """
        placement, drawn = placed.placement, placed.entry.drawn
        plainest = placement.plainest(self._splits)  # it is kept if the problem also fails with it
        try:
            if plainest.fits(placed.entry.bound.problem):
                self._check(plainest.put(placed.entry.bound.problem))
        except _DisagreementError:
            placement = plainest
        except _StopSearch:
            return
        is_first, shrinks, drawn_again = True, False, False

        def check(problem: Problem) -> None:
            nonlocal is_first, shrinks, drawn_again
            is_simplest, is_first = is_first, False  # Hypothesis gives the simplest problem first
            drawn_again = drawn_again or problem == drawn
            if not (is_simplest or shrinks or problem == drawn):
                return  # Hypothesis has not yet come to the failing problem
            even = placement.vocab_split == "even" and placement.fills(problem)
            hypothesis.assume((even or placement.fits(problem)) and not _absorbs(problem, drawn))
            shrinks = True  # if this problem fails, Hypothesis gives smaller ones from now on
            self._check(placement.put(problem))
            if is_simplest:
                shrinks = False

        try:
            placed.entry.draws.each(check, shrink=True)
        except (_DisagreementError, _StopSearch):
            return
        except Flaky:
            drawn_again = True
        # A kept deck may be of another version of Hypothesis, which drew other problems.
        if drawn_again:
            self._add_flaky()

    def _check(self, problem: Problem, entry: Entry | None = None) -> None:
        """Runs a problem. Raises if the candidate disagrees, or if the search must stop."""
        if self.failure is not None:
            self.shrink_calls += 1
            too_late = monotonic() - self._failed_at > self.settings.timeout
            if too_late or self.shrink_calls > self.settings.shrink_calls:
                raise _StopSearch
        try:
            result = self._run(problem, entry)
        except LossgateError as error:
            if isinstance(error, WorldLost) and self.failure is not None:
                raise _StopSearch from None  # the failure that was seen is the reason for the loss
            self._error = error
            raise _StopSearch from None
        if result.agrees:
            return
        if result.failure == Hang.__name__:  # each further try would cost a time-out
            raise _StopSearch
        if self._is_same_failure(result):
            raise _DisagreementError

    def _run(self, problem: Problem, entry: Entry | None) -> CaseResult:
        """Runs a problem and records its result.

        Only the smallest failing case is kept as a whole, because cases hold tensors.
        """
        bound = entry.bound if entry is not None else BoundProblem(self.cell.candidate.spec, problem)
        case = Case(self.cell.candidate, problem, self.world, bound)
        shrinking = self.failure is not None
        likely: list[OptionMutant] = []
        if entry is not None and not shrinking:
            unkilled = {**self.surviving, **self.near}
            likely = [unkilled[name] for name in entry.kills if name in unkilled]
        result = run_case(case, self.cell.property, likely)
        if self.aside is not None:
            result = self.aside(case, result)
        if not shrinking:
            if result.agrees and result.fits:
                result = replace(result, said=said_by(case, self.cell.property))
            self.cases.append(result)
            if not is_large(problem) and result.fits:
                self._tried.append((bound, result))
            for name in result.killed:
                mutants = self.near if name in self.near else self.surviving
                del mutants[name]
        if result.agrees:
            return result
        infinite = _infinite(case, result)
        if not shrinking:
            self._failed_at, self._first_kinds, self._infinite = monotonic(), result.kinds, infinite
        elif not infinite <= self._infinite or not is_given(self.cell.candidate, bound, problem.partition):
            # A right kernel may fail, too.
            return replace(result, findings=())
        self._keep(result, case)
        return result

    def _keep(self, result: CaseResult, case: Case) -> None:
        """Keeps a case that disagrees, if it is the smallest one with its kind of failure."""
        if self._is_same_failure(result):
            if self.failure is None or _size(result.problem) <= _size(self.failure.problem):
                self.failure, self.failing_case = result, case
            return
        known = self.others.get(result.kinds)
        if known is None or _size(result.problem) <= _size(known.problem):
            self.others[result.kinds] = result

    def _is_same_failure(self, result: CaseResult) -> bool:
        """Returns whether a case has a kind of failure in common with the first failure.

        A deadlock is not shrunk into a wrong loss, nor a wrong gradient of the weight into a wrong
        gradient of the bias. They may be two defects.
        """
        return self.failure is None or not self._first_kinds.isdisjoint(result.kinds)

    def _add_others(self) -> None:
        """Adds to the failure the other failures that were met while it was shrunk."""
        assert self.failure is not None
        found = (
            f"another failure, met while the problem was made smaller: {other.findings[0]}\n"
            f"  on: {other.problem.describe()}"
            for other in sorted(self.others.values(), key=lambda one: _size(one.problem))[:_OTHERS]
        )
        self.failure = replace(self.failure, findings=(*self.failure.findings, *found))

    def _add_flaky(self) -> None:
        assert self.failure is not None
        self.failure = not_again(self.failure)


def not_again(failure: CaseResult) -> CaseResult:
    """Returns a failure with a further finding: it was not seen again."""
    finding = "the candidate is not deterministic: the same problem, run again, gave another result"
    return replace(failure, findings=(*failure.findings, finding), failure=None, unstable=True)


def _infinite(case: Case, result: CaseResult) -> frozenset[Output]:
    """Returns the outputs whose reference is not finite; none if the kernel gave no outputs."""
    if result.failure is not None:
        return frozenset()
    try:
        reference = case.oracle.reference
    except (RankFailure, CandidateError):  # the property calls the kernel in another way
        return frozenset()
    return frozenset(output for output, whole in reference.items() if not bool(whole.isfinite().all()))


def _absorbs(problem: Problem, drawn: Problem) -> bool:
    """Returns whether a smaller problem has a large vocabulary, and other logits than it was drawn
    with.

    A softmax of logits with a standard deviation of 3 over 33,023 ids has thousands of tiny
    probabilities, which a running sum in float32 loses, all in one direction: torch's product of it
    with a narrow weight is off by up to 20 standard deviations of the noise that is drawn for it.
    """
    return problem.vocab > max(VOCABS) and problem.vocab == drawn.vocab and problem.logit_std != drawn.logit_std


def _size(problem: Problem) -> tuple[int, int, int, int]:
    return problem.tokens, problem.vocab, problem.hidden, len(problem.to_json())
