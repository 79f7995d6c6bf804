# SPDX-License-Identifier: Apache-2.0
"""Looks for a problem on which a candidate disagrees, and makes it small. Hypothesis draws and shrinks."""

from dataclasses import dataclass, field
from zlib import crc32

import hypothesis
from hypothesis import Phase
from hypothesis.errors import Flaky, Unsatisfiable

from lossgate.declaration.candidate import ANY
from lossgate.engine.cell import Cell
from lossgate.engine.examine import Examination, examine
from lossgate.engine.settings import Settings
from lossgate.engine.strategies import problems, quiet
from lossgate.errors import LossgateError, UsageError
from lossgate.problems.problem import Problem
from lossgate.specs import find_spec
from lossgate.worlds import World
from lossgate.worlds.base import Hang


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
    _error: LossgateError | None = None

    def run(self, round_: int = 0) -> None:
        """Examine problems until one fails, then shrink it; another round draws others.

        Raises ``CandidateError`` if the candidate breaks its interface.
        """
        candidate, layout, dtype = self.cell.candidate, self.cell.layout, self.cell.dtype

        @hypothesis.seed(crc32(f"{self.settings.seed} {round_} {self.cell}".encode()))
        @quiet(self.settings.examples, Phase.generate, Phase.shrink)
        @hypothesis.given(problems(candidate, layout, dtype))
        def check(problem: Problem) -> None:
            self._check(problem)

        try:
            check()
        except (_DisagreementError, _Stop):
            pass
        except Flaky:
            self._note_flaky()
        except Unsatisfiable:
            spec = find_spec(candidate.spec)
            first = {option.name: values[0] for option in spec.options if (values := spec.supported(candidate, option.name)) is not ANY}
            told = f"no options go together with supports={dict(candidate.supports)!r}: {spec.refusal(first)}"
            raise UsageError(f"candidate {candidate.name!r}: {told}") from None
        if self._error is not None:
            raise self._error

    def _check(self, problem: Problem) -> None:
        if self.failure is not None:
            self.calls_after_failure += 1
            if self.calls_after_failure > self.settings.shrink_calls:
                raise _Stop
        try:
            examination = examine(self.cell.candidate, problem, self.world)
        except LossgateError as error:
            self._error = error
            raise _Stop from None
        if self.failure is None:
            self.examined.append(examination)
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
