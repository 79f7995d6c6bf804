# SPDX-License-Identifier: Apache-2.0
"""Draws problems with Hypothesis, and makes them smaller.

The same seed draws the same problems in every process; see ``SeededProvider``.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable

from lossgate.base.shape import Shape
from lossgate.cases.option_strategies import ForcedOption
from lossgate.cases.problem_strategies import SeededProvider, problems, without_constants_of_modules
from lossgate.declaration.candidate import Candidate
from lossgate.problems.problem import Problem


class _DoneError(BaseException):
    """Ends the draws. It is not an Exception, so that Hypothesis lets it through."""


@dataclass(frozen=True)
class Draws:
    """Problems to draw: for which candidate, how many, and of which kind."""

    candidate: Candidate
    dtype: str
    seed: str
    count: int
    targets: tuple[ForcedOption | None, ...] = (None,)
    """Each problem is drawn for one of these: an option that must have one of some values, or None
    for no such option."""
    rich: bool = False
    """Whether nearly all problems are of middle size and have trained tokens."""
    large: Shape | None = None
    """The sizes of large problems; None for usual sizes."""

    def all(self) -> list[Problem]:
        """Returns the problems, without layouts. There are fewer than ``count`` if the options do
        not allow so many.
        """
        drawn: list[Problem] = []
        self.each(drawn.append)
        return drawn

    def until(self, done: Callable[[Problem], bool]) -> None:
        """Gives the problems to a function one by one, until it returns True."""

        def check(problem: Problem) -> None:
            if done(problem):
                raise _DoneError

        with suppress(_DoneError):
            self.each(check)

    def each(self, check: Callable[[Problem], None], *, shrink: bool = False) -> None:
        """Gives the problems to a function one by one.

        Args:
            check: called with each problem. An exception ends the draws.
            shrink: whether to call ``check`` with smaller and smaller problems after it has raised,
                as long as they make it raise too. The simplest problem of all is then given first,
                whatever the seed.
        """
        phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
        SeededProvider.random = Random(self.seed)
        first = True  # Hypothesis begins with the simplest problem, whatever the seed

        @hypothesis.seed(0)  # for the choices that shrinking makes
        @hypothesis.settings(
            max_examples=self.count + 1,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=[check for check in HealthCheck if isinstance(check, HealthCheck)],
            report_multiple_bugs=False,
            print_blob=False,
            backend=SeededProvider.backend,
        )
        @hypothesis.given(problems(self.candidate, self.dtype, self.targets, rich=self.rich, large=self.large))
        def draw(problem: Problem) -> None:
            nonlocal first
            if shrink or not first:
                check(problem)
            first = False

        try:
            with without_constants_of_modules():
                draw()
        except Unsatisfiable:  # a target may rule out every draw
            if None in self.targets:
                raise
