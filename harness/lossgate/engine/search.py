# SPDX-License-Identifier: Apache-2.0
"""Looks for a problem on which a candidate disagrees, and makes it small. Hypothesis draws and shrinks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import hypothesis
from hypothesis import Phase
from hypothesis.errors import Flaky, Unsatisfiable

from lossgate.adequacy.killing_problems import DIFFERENCE, DRAWN, promising
from lossgate.adequacy.kills import differences
from lossgate.adequacy.option_mutants import Contrast, contrasts
from lossgate.cases.examine import Examination, branches_of, examine
from lossgate.cases.strategies import problems, quiet
from lossgate.declaration.candidate import ANY
from lossgate.engine.cell import Cell
from lossgate.engine.settings import Settings
from lossgate.errors import LossgateError, UsageError
from lossgate.losses import find_spec
from lossgate.problems.problem import Problem
from lossgate.worlds import World
from lossgate.worlds.base import Hang

_EXAMINED = 4
"""Most problems that are examined for one contrast or branch in each round; ``DRAWN`` are drawn."""


class _DisagreementError(Exception):
    """Tells Hypothesis that a problem fails; one type and one line, so that all failures are one to it."""


class _Stop(BaseException):
    """Ends the search at once; not an Exception, so that Hypothesis lets it through."""


@dataclass
class Search:
    """What a search found so far."""

    cell: Cell
    world: World
    settings: Settings
    examined: list[Examination] = field(default_factory=list)
    failure: Examination | None = None
    calls_after_failure: int = 0
    untold: dict[str, Contrast] = field(default_factory=dict)
    """The contrasts for which no problem has spoken."""
    idle: set[str] = field(default_factory=set)
    """Of them, those whose other choice changed no result of any problem that was drawn for them: there is nothing to tell."""
    _error: LossgateError | None = None

    def __post_init__(self) -> None:
        self._contrasts = contrasts(find_spec(self.cell.candidate.spec), self.cell.candidate)
        self.untold |= self._contrasts

    def run(self, round_: int = 0) -> None:
        """Examine problems until one fails, then shrink it; another round draws others.

        Raises ``CandidateError`` if the candidate breaks its interface.
        """
        self._search(f"{self.settings.seed} {round_} {self.cell}", self._check)

    @property
    def owed(self) -> dict[str, Contrast]:
        """The contrasts for which a problem must still speak."""
        return {name: contrast for name, contrast in self.untold.items() if name not in self.idle}

    @property
    def missing_branches(self) -> set[str]:
        """The branches that a problem must still visit."""
        spec = find_spec(self.cell.candidate.spec)
        return set(spec.required(self.cell.candidate, self.cell.layout)).difference(
            *(e.branches for e in self.examined)
        )

    def fill_gaps(self, round_: int) -> None:
        """For each contrast that is owed, and each branch that is missing, look for a problem that shows it, and examine it, until one fails."""
        for name, contrast in self.owed.items():
            self._fill_contrast(name, contrast, round_)
        for name in sorted(self.missing_branches):
            self._fill_branch(name, round_)

    def _fill_branch(self, name: str, round_: int) -> None:
        self._seek(
            f"{round_} {name}",
            lambda: name in self.missing_branches,
            lambda problem: float(name in branches_of(problem)),
        )

    def _fill_contrast(self, name: str, contrast: Contrast, round_: int) -> None:
        if name not in self.owed or self.failure is not None:
            return
        focus = (
            contrast
            if len({other.values for other in self._contrasts.values() if other.option == contrast.option}) > 1
            else None
        )
        known = promising(self.cell.candidate, self.cell.dtype, self.settings.seed, contrast, focus)
        if known.idle:
            self.idle.add(name)
            return
        for problem in known.on(self.cell.layout) if round_ == 1 else ():
            if name in self.untold:
                self._try(problem, focus)
            if self.failure is not None:
                return

        def promise(problem: Problem) -> float:
            return differences(contrast, problem)[contrast.side] / DIFFERENCE[self.cell.dtype]

        self._seek(f"{round_} {focus.choice if focus else ''}", lambda: name in self.untold, promise, focus)

    def _try(self, problem: Problem, focus: Contrast | None) -> None:
        """Examine ``problem``; where the candidate fails on it, look for one like it that can be made smaller."""
        try:
            self._check(problem)
        except (_DisagreementError, _Stop):
            if self._error is not None:
                raise self._error from None
            found, self.failure = self.failure, None
            if found is not None and found.failure != Hang.__name__:
                self._search(f"{self.settings.seed} {self.cell} like one that failed", self._check, focus)
            self.failure = self.failure or found

    def _seek(
        self,
        what: str,
        missing: Callable[[], bool],
        promise: Callable[[Problem], float],
        contrast: Contrast | None = None,
    ) -> None:
        """Examine problems that promise 1 or more, while there is something missing. Gives up later if none promises anything at all."""
        if self.failure is not None or not missing():
            return
        promises: list[float] = []
        first = len(self.examined)

        def check(problem: Problem) -> None:
            if self.failure is None:
                patience = DRAWN if any(promises) else 2 * DRAWN
                if len(promises) >= patience or len(self.examined) - first == _EXAMINED or not missing():
                    raise _Stop
                promises.append(promise(problem))
                hypothesis.assume(promises[-1] >= 1)
            self._check(problem)

        self._search(f"{self.settings.seed} {self.cell} {what}", check, contrast)

    def _search(self, seed: str, check_problem: Callable[[Problem], None], contrast: Contrast | None = None) -> None:
        candidate, layout, dtype = self.cell.candidate, self.cell.layout, self.cell.dtype

        @hypothesis.seed(crc32(seed.encode()))
        @quiet(self.settings.examples, Phase.generate, Phase.shrink)
        @hypothesis.given(problems(candidate, layout, dtype, contrast))
        def check(problem: Problem) -> None:
            check_problem(problem)

        try:
            check()
        except (_DisagreementError, _Stop):
            pass
        except Flaky:
            self._note_flaky()
        except Unsatisfiable:
            if contrast is None:
                raise self._refused() from None
        if self._error is not None:
            raise self._error

    def _refused(self) -> UsageError:
        candidate = self.cell.candidate
        spec = find_spec(candidate.spec)
        first = {
            option.name: values[0]
            for option in spec.options
            if (values := spec.supported(candidate, option.name)) is not ANY
        }
        told = f"no options go together with supports={dict(candidate.supports)!r}: {spec.refusal(first)}"
        return UsageError(f"candidate {candidate.name!r}: {told}")

    def _check(self, problem: Problem) -> None:
        if self.failure is not None:
            self.calls_after_failure += 1
            if self.calls_after_failure > self.settings.shrink_calls:
                raise _Stop
        try:
            sought = list(self.untold.values()) if self.failure is None else ()
            examination = examine(self.cell.candidate, problem, self.world, sought)
        except LossgateError as error:
            self._error = error
            raise _Stop from None
        if self.failure is None:
            self.examined.append(examination)
            for name in examination.told:
                del self.untold[name]
        if examination.agrees:
            return
        if self.failure is None or _size(problem) <= _size(self.failure.problem):
            self.failure = examination
        if examination.failure == Hang.__name__:  # each further try would cost a time-out
            raise _Stop
        raise _DisagreementError

    def _note_flaky(self) -> None:
        assert self.failure is not None
        told = "the candidate is not deterministic: the same problem, run again, gave another result"
        self.failure = Examination(
            problem=self.failure.problem,
            comparisons=self.failure.comparisons,
            findings=(*self.failure.findings, told),
            branches=self.failure.branches,
        )


def _size(problem: Problem) -> tuple[int, int, int, int]:
    return problem.tokens, problem.vocab, problem.hidden, len(problem.to_json())
