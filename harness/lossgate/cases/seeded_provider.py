# SPDX-License-Identifier: Apache-2.0
"""Where Hypothesis gets the choices that it makes.

Hypothesis's own provider does not promise the same choices in every process: it collects the
constants in the source of all modules imported so far, and mixes them into the numbers that it
draws. So they come from a provider of ours. Hypothesis makes problems smaller with its own, and
then gets no such constants: it would keep them in a folder ``.hypothesis`` of the user's, too.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

_AT_AN_END = 0.2
"""How often an integer is the smallest or the largest one allowed: bugs sit there."""


class SeededProvider(PrimitiveProvider):
    """Makes every choice from one generator, which ``Draws.each`` seeds."""

    backend: ClassVar = "lossgate"
    """Hypothesis's name for it."""
    lifetime = "test_function"
    random: ClassVar[Random]
    preferred: ClassVar[Sequence[int]] = ()
    """The integers of which one is drawn; empty for any."""

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
        if self.preferred:
            return self.random.choice(self.preferred)
        if self.random.random() < _AT_AN_END:
            return min_value if self.random.random() < 0.5 else max_value
        return min_value + int(self.random.random() * (max_value - min_value + 1))

    def draw_float(self, **constraints: Any) -> float:
        raise TypeError("problems are drawn from choices and whole numbers, not from floats")

    def draw_string(self, *args: Any, **constraints: Any) -> str:
        raise TypeError("problems are drawn from choices and whole numbers, not from strings")

    def draw_bytes(self, *args: Any, **constraints: Any) -> bytes:
        raise TypeError("problems are drawn from choices and whole numbers, not from bytes")


@contextmanager
def preferring(numbers: Sequence[int]) -> Generator[None]:
    """Draws integers from some alone; from all if there are none.

    Hypothesis knows nothing of it, so what it makes smaller may have any.
    """
    SeededProvider.preferred = numbers
    try:
        yield
    finally:
        SeededProvider.preferred = ()


@contextmanager
def without_constants_of_modules() -> Generator[None]:
    """Keeps Hypothesis from reading the source of imported modules, and from writing a folder for
    what it finds there.

    Tests of the user's that run afterwards find their constants as ever.
    """
    none = providers.Constants()
    with patch.object(providers, "_get_local_constants", lambda: none):
        providers.CONSTANTS_CACHE.cache.clear()
        try:
            yield
        finally:
            providers.CONSTANTS_CACHE.cache.clear()


AVAILABLE_PROVIDERS[SeededProvider.backend] = SeededProvider
