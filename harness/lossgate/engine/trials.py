# SPDX-License-Identifier: Apache-2.0
"""Runs problems in a cell, and makes the first on which a candidate disagrees small.

Hypothesis makes it smaller: it draws the problem again, and simpler ones.
"""

from dataclasses import dataclass, field, replace
from time import monotonic

import hypothesis
from hypothesis.errors import Flaky

from lossgate.adequacy.entry import Entry, Placed
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.base.errors import LossgateError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.large import is_large
from lossgate.cases.placement import splits_of
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.own_mistakes import said_by
from lossgate.engine.settings import Settings
from lossgate.problems.problem import Problem
from lossgate.worlds.base import Hang, World, WorldLost

_OTHERS = 2
"""Failures of other kinds that are reported beside the first."""


class _DisagreementError(Exception):
    """Tells Hypothesis that a problem fails.

    It has one type and one line, so that Hypothesis sees a single failure.
    """


class _StopSearch(BaseException):
    """Ends the search at once. It is not an Exception, so that Hypothesis lets it through."""


@dataclass
class Trials:
    """The problems that were tried in a cell, and what came of them."""

    cell: Cell
    world: World
    settings: Settings
    cases: list[CaseResult] = field(default_factory=list)
    """The cases that count, in order."""
    failure: CaseResult | None = None
    """What came of the smallest case that disagrees."""
    failing_case: Case | None = None
    """That case itself, with what each rank returned, for a second look."""
    shrink_calls: int = 0
    """Problems that were tried to make it smaller."""
    surviving: dict[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem has killed."""
    near: dict[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem has killed, and none need kill: their choices are near."""
    others: dict[frozenset[str], CaseResult] = field(default_factory=dict)
    """The smallest cases that disagree for other reasons than the first, by their reasons."""
    _tried: list[tuple[BoundProblem, CaseResult]] = field(default_factory=list)
    """The problem of each case, and what came of it. Large ones are let go, for their tensors."""
    _error: LossgateError | None = None
    _first_kinds: frozenset[str] = frozenset()
    """What the first failure is known by."""
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
        """Has Hypothesis draw the problem again, and make it smaller on its own layout."""
        placement, simplest, reached, again = placed.placement, True, False, False
        plainest = placement.plainest(self._splits)
        try:
            if plainest.fits(placed.entry.bound.problem):
                self._check(plainest.put(placed.entry.bound.problem))
        except _DisagreementError:
            placement = plainest
        except _StopSearch:
            return

        def check(problem: Problem) -> None:
            nonlocal simplest, reached, again
            first, simplest = simplest, False  # if it passes now, Hypothesis does not try it again
            again = again or problem == placed.entry.drawn
            if first or reached or problem == placed.entry.drawn:
                even = placement.vocab_split == "even" and placement.fills(problem)
                hypothesis.assume(even or placement.fits(problem))
                reached = True
                self._check(placement.put(problem))
                reached = not first

        try:
            placed.entry.draws.each(check, shrink=True)
        except (_DisagreementError, _StopSearch):
            return
        except Flaky:
            again = True
        if again:  # another version of Hypothesis than that of a deck that was kept may draw others
            self._add_flaky()  # what failed once did not fail again

    def _check(self, problem: Problem, entry: Entry | None = None) -> None:
        """Runs a problem; raises if the candidate disagrees, or if nothing more is to be tried."""
        if self.failure is not None:
            self.shrink_calls += 1
            too_late = monotonic() - self._failed_at > self.settings.timeout
            if too_late or self.shrink_calls > self.settings.shrink_calls:
                raise _StopSearch
        try:
            result = self._run(problem, entry)
        except LossgateError as error:
            if isinstance(error, WorldLost) and self.failure is not None:
                raise _StopSearch from None  # that failure is why it is lost
            self._error = error
            raise _StopSearch from None
        if result.agrees:
            return
        if result.failure == Hang.__name__:  # each further try would cost a time-out
            raise _StopSearch
        if self._is_same_failure(result):
            raise _DisagreementError

    def _run(self, problem: Problem, entry: Entry | None) -> CaseResult:
        """Runs a problem and records what came of it.

        Of all cases only the smallest one that fails is kept, because a case holds tensors.
        """
        bound = entry.bound if entry is not None else BoundProblem(self.cell.candidate.spec, problem)
        case = Case(self.cell.candidate, problem, self.world, bound)
        unkilled = {**self.surviving, **self.near}
        likely = [unkilled[name] for name in entry.kills if name in unkilled] if entry is not None else ()
        result = run_case(case, self.cell.property, likely if self.failure is None else ())
        if self.failure is None:
            if result.agrees:
                result = replace(result, said=said_by(case, self.cell.property))
            self.cases.append(result)
            if not is_large(problem):
                self._tried.append((bound, result))
            for name in result.killed:
                (self.near if name in self.near else self.surviving).pop(name)
        if not result.agrees and self.failure is None:
            self._failed_at, self._first_kinds = monotonic(), result.kinds
        if not result.agrees:
            self._keep(result, case)
        return result

    def _keep(self, result: CaseResult, case: Case) -> None:
        """Keeps a case that disagrees, if it is the smallest that does so for its reasons."""
        if self.failure is None or (
            self._is_same_failure(result) and _size(result.problem) <= _size(self.failure.problem)
        ):
            self.failure, self.failing_case = result, case
        elif not self._is_same_failure(result):
            known = self.others.get(result.kinds)
            if known is None or _size(result.problem) <= _size(known.problem):
                self.others[result.kinds] = result

    def _is_same_failure(self, result: CaseResult) -> bool:
        """Returns whether a case fails for a reason for which the first one does.

        A deadlock is not made smaller into a wrong loss, nor a wrong gradient of the weight into
        one of the bias: they may be two defects.
        """
        return self.failure is None or not self._first_kinds.isdisjoint(result.kinds)

    def _add_others(self) -> None:
        """Has the failure say which other defects were met while it was made smaller."""
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
    """Returns a failure that says that it was not seen again."""
    finding = "the candidate is not deterministic: the same problem, run again, gave another result"
    return replace(failure, findings=(*failure.findings, finding), failure=None, unstable=True)


def _size(problem: Problem) -> tuple[int, int, int, int]:
    return problem.tokens, problem.vocab, problem.hidden, len(problem.to_json())
