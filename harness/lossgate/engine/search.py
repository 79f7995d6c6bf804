# SPDX-License-Identifier: Apache-2.0
"""Looks for a problem on which a candidate disagrees, and makes it small.

Hypothesis draws and shrinks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from zlib import crc32

import hypothesis
from hypothesis import Phase
from hypothesis.errors import Flaky, Unsatisfiable

from lossgate.adequacy.killing_problems import DRAWN, LEAST_SCORE, killing_problems
from lossgate.adequacy.kills import score
from lossgate.adequacy.option_mutants import OptionMutant, option_mutants
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.option_strategies import ForcedOption
from lossgate.cases.strategies import problems, quiet
from lossgate.declaration.any_value import ANY
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.settings import Settings
from lossgate.errors import LossgateError, UsageError
from lossgate.problems.problem import Problem
from lossgate.worlds.base import Hang, World

_RUN_PER_GAP = 4
"""The most problems that are run for one option mutant or coverage goal in each round; up to
``DRAWN`` are drawn."""


class _DisagreementError(Exception):
    """Tells Hypothesis that a problem fails.

    It has one type and one line, so that Hypothesis sees a single failure.
    """


class _StopSearch(BaseException):
    """Ends the search at once. It is not an Exception, so that Hypothesis lets it through."""


@dataclass
class Search:
    """What a search found so far."""

    cell: Cell
    world: World
    settings: Settings
    cases: list[CaseResult] = field(default_factory=list)
    """The cases that count, in order."""
    failure: CaseResult | None = None
    """What came of the smallest case that disagrees."""
    failing_case: Case | None = None
    """That case itself, with what each rank returned, for a second look."""
    calls_after_failure: int = 0
    """Problems that were tried to make it smaller."""
    surviving: dict[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem has killed."""
    equivalent: set[str] = field(default_factory=set)
    """Those of them that changed no result of any problem that was drawn for them."""
    _error: LossgateError | None = None

    def __post_init__(self) -> None:
        self._mutants = option_mutants(self.cell.candidate) if self.cell.property.needs_adequacy else {}
        self.surviving |= self._mutants

    @property
    def still_to_kill(self) -> dict[str, OptionMutant]:
        """The mutants that a problem must still kill."""
        return {name: mutant for name, mutant in self.surviving.items() if name not in self.equivalent}

    @property
    def missing_goals(self) -> set[str]:
        """The coverage goals that a problem must still reach."""
        return set(self.cell.required_goals).difference(*(case.covered for case in self.cases))

    def run(self, round_: int = 0) -> None:
        """Runs problems until one fails, then shrinks it. Another round draws other problems.

        Raises:
            CandidateError: if the candidate breaks its declared interface.
            UsageError: if no valid options are left for the candidate.
        """
        self._search(f"{self.settings.seed} {round_} {self.cell}", self._check)

    def fill_gaps(self, round_: int) -> None:
        """Looks for problems that kill survivors or reach missing goals, until one fails."""
        for name, mutant in self.still_to_kill.items():
            self._kill(name, mutant, round_)
        for name in sorted(self.missing_goals):
            self._reach(name, round_)

    def _reach(self, goal: str, round_: int) -> None:
        spec = self.cell.candidate.spec

        def likely(problem: Problem) -> float:
            return float(goal in BoundProblem(spec, problem).likely_coverage)

        self._seek(f"{round_} {goal}", lambda: goal in self.missing_goals, likely)

    def _kill(self, name: str, mutant: OptionMutant, round_: int) -> None:
        if name not in self.still_to_kill or self.failure is not None:
            return
        candidate, dtype = self.cell.candidate, self.cell.dtype
        choices = {other.values for other in self._mutants.values() if other.option == mutant.option}
        target = mutant.target if len(choices) > 1 else None
        known = killing_problems(candidate, dtype, self.settings.seed, mutant, target)
        if known.equivalent:
            self.equivalent.add(name)
            return
        for problem in known.on(self.cell.layout) if round_ == 1 else ():
            if name in self.surviving:
                self._try(problem, target)
            if self.failure is not None:
                return

        def likely(problem: Problem) -> float:
            return score(mutant, problem, candidate.spec) / LEAST_SCORE[dtype]

        self._seek(f"{round_} {target or ''}", lambda: name in self.surviving, likely, target)

    def _try(self, problem: Problem, target: ForcedOption | None) -> None:
        """Runs one problem.

        If the candidate fails on it, looks for one like it that can be made smaller.
        """
        try:
            self._check(problem)
        except (_DisagreementError, _StopSearch):
            if self._error is not None:
                raise self._error from None
            found, self.failure = self.failure, None
            found_case = self.failing_case
            if found is not None and found.failure != Hang.__name__:
                self._search(f"{self.settings.seed} {self.cell} like one that failed", self._check, target)
            if self.failure is None:
                self.failure, self.failing_case = found, found_case

    def _seek(
        self,
        what: str,
        missing: Callable[[], bool],
        likely: Callable[[Problem], float],
        target: ForcedOption | None = None,
    ) -> None:
        """Runs problems that are likely (1 or more) to fill a gap, as long as it is there.

        It gives up later if none of the problems drawn has any chance at all.
        """
        if self.failure is not None or not missing():
            return
        scores: list[float] = []
        first = len(self.cases)

        def check(problem: Problem) -> None:
            if self.failure is None:
                patience = DRAWN if any(scores) else 2 * DRAWN
                if len(scores) >= patience or len(self.cases) - first == _RUN_PER_GAP or not missing():
                    raise _StopSearch
                scores.append(likely(problem))
                hypothesis.assume(scores[-1] >= 1)
            self._check(problem)

        self._search(f"{self.settings.seed} {self.cell} {what}", check, target)

    def _search(self, seed: str, check_problem: Callable[[Problem], None], target: ForcedOption | None = None) -> None:
        @hypothesis.seed(crc32(seed.encode()))
        @quiet(self.settings.examples, Phase.generate, Phase.shrink)
        @hypothesis.given(problems(self.cell.candidate, self.cell.layout, self.cell.dtype, target))
        def check(problem: Problem) -> None:
            check_problem(problem)

        try:
            check()
        except (_DisagreementError, _StopSearch):
            pass
        except Flaky:
            self._add_flaky()
        except Unsatisfiable:
            if target is None:
                raise self._no_valid_options() from None
        if self._error is not None:
            raise self._error

    def _no_valid_options(self) -> UsageError:
        candidate = self.cell.candidate
        given = ((option.name, candidate.supported(option.name)) for option in candidate.spec.options)
        first = {name: values[0] for name, values in given if values is not ANY}
        return UsageError(
            f"candidate {candidate.name!r}: supports={dict(candidate.supports)!r} leaves no valid combination of "
            f"options: {candidate.spec.conflict(first)}. Change supports so that one combination is valid"
        )

    def _check(self, problem: Problem) -> None:
        if self.failure is not None:
            self.calls_after_failure += 1
            if self.calls_after_failure > self.settings.shrink_calls:
                raise _StopSearch
        try:
            result = self._run(problem)
        except LossgateError as error:
            self._error = error
            raise _StopSearch from None
        if result.agrees:
            return
        if result.failure == Hang.__name__:  # each further try would cost a time-out
            raise _StopSearch
        raise _DisagreementError

    def _run(self, problem: Problem) -> CaseResult:
        """Runs a problem and records what came of it.

        Of all cases only the smallest one that fails is kept, because a case holds tensors.
        """
        case = Case(self.cell.candidate, problem, self.world)
        mutants = list(self.surviving.values()) if self.failure is None else ()
        result = run_case(case, self.cell.property, mutants)
        if self.failure is None:
            self.cases.append(result)
            for name in result.killed:
                del self.surviving[name]
        if not result.agrees and (self.failure is None or _size(problem) <= _size(self.failure.problem)):
            self.failure, self.failing_case = result, case
        return result

    def _add_flaky(self) -> None:
        assert self.failure is not None
        finding = "the candidate is not deterministic: the same problem, run again, gave another result"
        self.failure = replace(self.failure, findings=(*self.failure.findings, finding), failure=None)


def _size(problem: Problem) -> tuple[int, int, int, int]:
    return problem.tokens, problem.vocab, problem.hidden, len(problem.to_json())
