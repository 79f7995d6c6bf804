# SPDX-License-Identifier: Apache-2.0
"""How Hypothesis draws problems: structure only, simplest choices first, so that shrinking ends
small.

Bugs of kernels sit at boundaries: sizes of 1, primes, powers of two and their neighbours, sizes
next to a tile, labels on the first and last rows of a shard, empty sequences, ranks without tokens.
These are drawn on purpose, not by luck.

Strategies are cached: making and validating them afresh for every problem takes longer than drawing
from them.

The choices come from a provider of ours. Hypothesis's own does not promise the same choices in
every process: it collects the constants in the source of all modules imported so far, and mixes
them into the numbers that it draws. Hypothesis makes problems smaller with its own provider, and
then gets no such constants: it would keep them in a folder ``.hypothesis`` of the user's, too.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider
from hypothesis.strategies import DrawFn, SearchStrategy

from lossgate.base.shape import Shape
from lossgate.cases.option_strategies import ForcedOption, draw_options, draw_value, one_of
from lossgate.declaration.candidate import Candidate
from lossgate.problems.masks import MASK_PATTERNS, MaskPattern
from lossgate.problems.partition import split_vocab
from lossgate.problems.problem import Problem
from lossgate.specs.option import COMMON_OPTIONS, EMPTY, Option

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


TOKENS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 67)
WIDTHS = (1, 2, 3, 7, 8, 16, 17, 32, 48, 61)
VOCABS = (1, 2, 3, 7, 8, 13, 16, 17, 31, 32, 33, 64, 97, 128, 129, 256, 257, 301, 509)
"""Sizes: 1, 2, primes, powers of two and their neighbours."""

_RICH_TOKENS = (13, 17, 31, 33, 64, 67)
_RICH_VOCABS = (7, 8, 13, 17, 32, 33, 64)

LOGIT_STDS = (1.0, 3.0, 10.0, 30.0, 0.1)
"""Standard deviations of the logits."""

_SOME: tuple[MaskPattern, ...] = tuple(pattern for pattern in MASK_PATTERNS if pattern != "none")

_LOGIT_STDS = st.sampled_from(LOGIT_STDS)
_SMALL_LOGIT_STDS = st.sampled_from((1.0, 0.3, 0.1))
"""For losses with kinks in coarse dtypes: large log-probabilities round so coarsely that most
tokens would lie near a kink."""

_LABEL_BOOSTS = st.sampled_from((0.0, 4.0, 12.0))
_OUTLIERS = st.sampled_from((8.0, -8.0, 30.0, -30.0))
_SEQUENCES = st.sampled_from((4, 6, 10, 18))
"""The most sequences: few, so that ranks stay empty, or several for each of many ranks."""
_SEEDS = range(2**32)


@st.composite
def problems(
    draw: DrawFn,
    candidate: Candidate,
    dtype: str,
    targets: tuple[ForcedOption | None, ...] = (None,),
    *,
    rich: bool = False,
    large: Shape | None = None,
) -> Problem:
    """Draws problems that a candidate says it can solve, without layouts.

    Args:
        draw: given by Hypothesis.
        candidate: whose declaration is followed.
        dtype: of the inputs.
        targets: each problem has one of these: an option that must have one of some values, or
            None.
        rich: of middle size and with trained tokens, so that many kinds of tokens are there. What
            is made smaller need not be.
        large: it has these sizes, and trains all tokens. What is made smaller need not.
    """
    spec, head, coarsest = candidate.spec, candidate.starts_at, candidate.coarsest(dtype)
    coarse = coarsest != "float32"
    target = _one_of(draw, targets, targets)
    bias = draw(draw_value(COMMON_OPTIONS["bias"], candidate.supported("bias"))) and "bias" in head.leaves
    tiles = candidate.tiles
    tokens = _size(draw, _sizes(TOKENS, tiles.get("token", ())), _RICH_TOKENS if rich else (), large and large.tokens)
    vocab = _size(draw, _sizes(VOCABS, tiles.get("vocab", ())), _RICH_VOCABS if rich else (), large and large.vocab)
    if bias:  # in a single row its gradient is 0, and what a kernel gives is all rounding
        vocab = max(vocab, 2)
    widths = _sizes(WIDTHS, tiles.get("hidden", ()))
    width = _size(draw, widths, (), large and large.width) if "hidden" in head.leaves else 1
    cut = _cut(draw, candidate, tokens)
    tokens = sum(cut)
    if large is not None:
        whole = _equal(tokens, large.sequences)
        cut = _one_of(draw, (cut, whole), (whole,))
    cut += (0,) * (-len(cut) % spec.group_size)
    return Problem(
        spec=spec.name,
        head=candidate.head,
        dtype=dtype,
        rounded_to=None if coarsest == dtype else coarsest,
        lengths=cut,
        masks=_masks(draw, len(cut), ("all",) if large is not None else _SOME if rich else ()),
        hidden=width,
        vocab=vocab,
        bias=bias,
        options=draw(draw_options(candidate, target)),
        scenario={c.name: v for c in spec.scenarios if (v := _scenario(draw, c, candidate, target, rich)) != c.default},
        group_size=spec.group_size,
        logit_std=_logit_std(draw, coarse and spec.kinks, large),
        label_boost=draw(_LABEL_BOOSTS),
        forced_labels=draw(forced_labels(tokens, vocab)) if large is None else (),
        outliers=()
        if (coarse and spec.kinks) or not head.has_logits
        else draw(_outliers(tokens, width if "hidden" in head.leaves else vocab)),
        cotangent=draw(_cotangents(candidate.differentiable)),
        seed=_seed(draw),
    )


def _cut(draw: DrawFn, candidate: Candidate, tokens: int) -> tuple[int, ...]:
    """Cuts tokens into sequences. Where none, or no rank, may be empty, there are many, and one
    token for each at least; if only ranks must not, some more stand before them.
    """
    most, empty, group = draw(_SEQUENCES), candidate.given(EMPTY.name), candidate.spec.group_size
    if len(empty) == len(EMPTY.choices):
        return draw(lengths(tokens, most))
    count = max(group, min(most, tokens) // group * group)
    cut = tuple(length + 1 for length in draw(lengths(max(tokens - count, 0), count, count)))
    return (0,) * group + cut if "sequence" in empty and draw(st.booleans()) else cut


def _scenario(draw: DrawFn, scenario: Option, candidate: Candidate, target: ForcedOption | None, rich: bool) -> Any:
    """Draws how fields are made.

    In a rich problem the usual way is chosen more often: it has the most different tokens.
    """
    if target is not None and target.option == scenario.name:
        return draw(one_of(target.values))
    choices = candidate.given(scenario.name)
    if len(choices) == 1:
        return choices[0]
    usual = max(choices, key=choices.count)
    return draw(one_of((*choices, *(usual,) * len(choices) * rich)))


def _one_of(draw: DrawFn, values: tuple[Any, ...], preferred: tuple[Any, ...] = ()) -> Any:
    """Draws one of some values; Hypothesis shrinks to the first, preferred or not."""
    with preferring([i for i, value in enumerate(values) if value in preferred]):
        return draw(one_of(values))


def _size(draw: DrawFn, usual: tuple[int, ...], preferred: tuple[int, ...], large: int | None) -> int:
    """Draws a usual size, or a large one, which is made smaller to a usual one."""
    return _one_of(draw, usual, preferred) if large is None else _one_of(draw, (*usual, large), (large,))


def _logit_std(draw: DrawFn, small: bool, large: Shape | None) -> float:
    if small or large is None:
        return draw(_SMALL_LOGIT_STDS if small else _LOGIT_STDS)
    return _one_of(draw, LOGIT_STDS, (large.logit_std,))


def _seed(draw: DrawFn) -> int:
    """Draws a seed. Its ends are no more likely than others, or problems would share tokens."""
    with preferring(_SEEDS):
        return draw(st.integers(_SEEDS.start, _SEEDS.stop - 1))


@cache
def _sizes(usual: tuple[int, ...], tiles: tuple[int, ...]) -> tuple[int, ...]:
    """The usual sizes, and those next to a boundary of a tile."""
    near = {n for tile in tiles for n in (tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1)}
    return tuple(sorted(n for n in {*usual, *near} if n >= 1))


@cache
def lengths(tokens: int, most: int, least: int = 1) -> SearchStrategy[tuple[int, ...]]:
    """Cuts ``tokens`` into ``least`` to ``most`` sequences, some of them empty."""
    cuts = st.lists(st.integers(0, tokens), min_size=least - 1, max_size=most - 1).map(sorted)
    return cuts.map(lambda at: tuple(b - a for a, b in zip([0, *at], [*at, tokens], strict=True)))


def _equal(tokens: int, sequences: int) -> tuple[int, ...]:
    """Cuts ``tokens`` into so many sequences of nearly equal length."""
    ends = [tokens * i // sequences for i in range(sequences + 1)]
    return tuple(b - a for a, b in pairwise(ends))


def _masks(draw: DrawFn, sequences: int, preferred: tuple[MaskPattern, ...]) -> tuple[MaskPattern, ...]:
    """Draws one pattern for each sequence.

    A single sequence is never masked whole: nothing would be left to compare.
    """
    patterns = tuple(MASK_PATTERNS) if sequences > 1 else _SOME
    return tuple(_one_of(draw, patterns, preferred) for _ in range(sequences))


@cache
def forced_labels(tokens: int, vocab: int) -> SearchStrategy[tuple[tuple[int, int], ...]]:
    """Labels on the first or last row of a shard, for usual numbers of shards."""
    shards = [shard for tp in (1, 2, 3, 4, 8) for shard in split_vocab(vocab, tp, "chunked")]
    edges = {row for shard in shards if shard.end > shard.start for row in (shard.start, shard.end - 1)}
    forced = st.tuples(st.integers(0, tokens - 1), st.sampled_from(sorted(edges)))
    return st.lists(forced, max_size=4).map(tuple)


@cache
def _outliers(tokens: int, columns: int) -> SearchStrategy[tuple[tuple[int, int, float], ...]]:
    outlier = st.tuples(st.integers(0, tokens - 1), st.integers(0, columns - 1), _OUTLIERS)
    return st.lists(outlier, max_size=2).map(tuple)


@cache
def _cotangents(differentiable: tuple[str, ...]) -> SearchStrategy[Any]:
    return st.sampled_from((*differentiable, "both") if len(differentiable) > 1 else differentiable)
