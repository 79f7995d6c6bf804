# SPDX-License-Identifier: Apache-2.0
"""Hypothesis as an engine: it draws problems and makes them smaller.

The same seed draws the same problems in every process. Hypothesis's own provider of choices does
not promise that: it collects the constants in the source of all modules imported so far, and mixes
them into the numbers that it draws. So choices come from a provider of ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

from lossgate.cases.option_strategies import ForcedOption
from lossgate.cases.strategies import problems
from lossgate.declaration.candidate import Candidate
from lossgate.problems.problem import Problem

_AT_AN_END = 0.2
"""How often an integer is the smallest or the largest one allowed: bugs sit there."""


class SeededProvider(PrimitiveProvider):
    """Makes every choice from one generator, which ``Draws.each`` seeds."""

    lifetime = "test_function"
    random: ClassVar[Random]

    def draw_boolean(self, p: float = 0.5) -> bool:
        return self.random.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        assert min_value is not None
        assert max_value is not None
        if self.random.random() < _AT_AN_END:
            return min_value if self.random.random() < 0.5 else max_value
        return min_value + int(self.random.random() * (max_value - min_value + 1))

    def draw_float(self, **constraints: Any) -> float:
        raise TypeError("problems are drawn from choices and whole numbers, not from floats")

    def draw_string(self, *args: Any, **constraints: Any) -> str:
        raise TypeError("problems are drawn from choices and whole numbers, not from strings")

    def draw_bytes(self, *args: Any, **constraints: Any) -> bytes:
        raise TypeError("problems are drawn from choices and whole numbers, not from bytes")


AVAILABLE_PROVIDERS["lossgate"] = SeededProvider


@dataclass(frozen=True)
class Draws:
    """Which problems are drawn."""

    candidate: Candidate
    dtype: str
    seed: str
    count: int
    target: ForcedOption | None = None
    """An option that must have one of some values; None for none."""
    rich: bool = False
    """Only problems of middle size with trained tokens."""

    def all(self) -> list[Problem]:
        """Returns the problems, without layouts; fewer if options leave fewer."""
        drawn: list[Problem] = []
        self.each(drawn.append)
        return drawn

    def each(self, check: Callable[[Problem], None], *, shrink: bool = False) -> None:
        """Gives the problems to a function one by one.

        Args:
            check: called with each problem; an exception ends the draws.
            shrink: when it raises, call it with smaller and smaller problems, as long as they make
                it raise too.
        """
        phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
        SeededProvider.random = Random(self.seed)
        first = True  # Hypothesis begins with the simplest problem, whatever the seed

        @hypothesis.seed(0)  # of the choices that shrinking makes
        @hypothesis.settings(
            max_examples=self.count + 1,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=[check for check in HealthCheck if isinstance(check, HealthCheck)],
            report_multiple_bugs=False,
            print_blob=False,
            backend="lossgate",
        )
        @hypothesis.given(problems(self.candidate, self.dtype, self.target, rich=self.rich))
        def draw(problem: Problem) -> None:
            nonlocal first
            if not first:
                check(problem)
            first = False

        try:
            draw()
        except Unsatisfiable:
            if self.target is None:
                raise
