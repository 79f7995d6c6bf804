# SPDX-License-Identifier: Apache-2.0
"""Draws problems with Hypothesis: their structure only, without numbers. The simplest choices come
first, so that shrinking ends small.

Bugs of kernels sit at boundaries: sizes of 1, primes, powers of two and their neighbours, sizes
next to a tile, labels on the first and last rows of a shard, empty sequences, ranks without tokens.
These are drawn on purpose, not by luck.

Strategies are cached, because to make and validate them takes longer than to draw from them.

The choices come from our own provider, because Hypothesis's provider does not promise the same
choices in every process: it collects the constants in the source of all modules imported so far,
and mixes them into the numbers that it draws. To make problems smaller, Hypothesis still uses its
own provider. It then gets no such constants either, because it would write them to a folder
``.hypothesis`` of the user.
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
"""The probability that an integer is the smallest or largest allowed, because bugs sit there."""


class SeededProvider(PrimitiveProvider):
    """Makes every choice from one generator, which ``Draws.each`` seeds."""

    backend: ClassVar = "lossgate"
    """The name under which Hypothesis knows it."""
    lifetime = "test_function"
    random: ClassVar[Random]
    preferred: ClassVar[Sequence[int]] = ()
    """The integers that may be drawn; empty for any integer."""

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
    """Restricts the integers that are drawn to ``numbers``, or does nothing if there are none.

    Hypothesis does not know of this, so a problem that it makes smaller may have any integer.
    """
    SeededProvider.preferred = numbers
    try:
        yield
    finally:
        SeededProvider.preferred = ()


@contextmanager
def without_constants_of_modules() -> Generator[None]:
    """Keeps Hypothesis from reading the constants of imported modules, and from writing a folder
    for them.

    The user's own tests that run afterwards get their constants as usual.
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
"""Standard deviations for losses with kinks in coarse dtypes. Larger log-probabilities round so
coarsely that most tokens would lie near a kink."""

_LABEL_BOOSTS = st.sampled_from((0.0, 4.0, 12.0))
_OUTLIERS = st.sampled_from((8.0, -8.0, 30.0, -30.0))
_SEQUENCES = st.sampled_from((4, 6, 10, 18))
"""The most sequences of a problem. Few leave ranks empty, and many give each rank several."""
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
        draw: the function by which Hypothesis draws.
        candidate: the candidate whose declaration the problems follow.
        dtype: the dtype of the inputs.
        targets: each problem is drawn for one of these: an option that must have one of some
            values, or None for no such option.
        rich: whether problems have middle sizes and trained tokens, so that they have many kinds of
            tokens. A problem that is made smaller may not be rich any more.
        large: the sizes of large problems, which train all tokens. A problem that is made smaller
            may have usual sizes.
    """
    spec, head, tiles = candidate.spec, candidate.starts_at, candidate.tiles
    coarsest = candidate.coarsest(dtype)
    coarse_kinks = coarsest != "float32" and spec.kinks
    preferred_masks: tuple[MaskPattern, ...] = _SOME if rich else ()
    if large is not None:
        preferred_masks = ("all",)
    target = _one_of(draw, targets, targets)
    bias = draw(draw_value(COMMON_OPTIONS["bias"], candidate.supported("bias"))) and "bias" in head.leaves
    tokens = _size(draw, _sizes(TOKENS, tiles.get("token", ())), _RICH_TOKENS if rich else (), large and large.tokens)
    vocab = _size(draw, _sizes(VOCABS, tiles.get("vocab", ())), _RICH_VOCABS if rich else (), large and large.vocab)
    if bias:  # with a single row, its gradient is 0, and a kernel returns nothing but rounding errors
        vocab = max(vocab, 2)
    widths = _sizes(WIDTHS, tiles.get("hidden", ()))
    width = _size(draw, widths, (), large and large.width) if "hidden" in head.leaves else 1
    cut = _cut(draw, candidate, tokens)
    tokens = sum(cut)
    if large is not None:
        equal = _equal(tokens, large.sequences)
        cut = _one_of(draw, (cut, equal), (equal,))
    cut += (0,) * (-len(cut) % spec.group_size)
    columns = width if "hidden" in head.leaves else vocab
    return Problem(
        spec=spec.name,
        head=candidate.head,
        dtype=dtype,
        rounded_to=None if coarsest == dtype else coarsest,
        lengths=cut,
        masks=_masks(draw, len(cut), preferred_masks),
        hidden=width,
        vocab=vocab,
        bias=bias,
        options=draw(draw_options(candidate, target)),
        scenario=_scenarios(draw, candidate, target, rich),
        group_size=spec.group_size,
        logit_std=_logit_std(draw, coarse_kinks, large),
        label_boost=draw(_LABEL_BOOSTS),
        forced_labels=draw(forced_labels(tokens, vocab)) if large is None else (),
        outliers=draw(_outliers(tokens, columns)) if head.has_logits and not coarse_kinks else (),
        cotangent=draw(_cotangents(candidate.differentiable)),
        seed=_seed(draw),
    )


def _cut(draw: DrawFn, candidate: Candidate, tokens: int) -> tuple[int, ...]:
    """Cuts tokens into sequences.

    If both sequences and ranks may be empty, the lengths are free. Otherwise each sequence has a
    token. If only ranks must have tokens, a group of empty sequences may come first.
    """
    most, may_be_empty, group = draw(_SEQUENCES), candidate.given(EMPTY.name), candidate.spec.group_size
    if {"sequence", "rank"} <= {*may_be_empty}:
        return draw(lengths(tokens, most))
    count = max(group, min(most, tokens) // group * group)
    cut = tuple(length + 1 for length in draw(lengths(max(tokens - count, 0), count, count)))
    if "sequence" in may_be_empty and draw(st.booleans()):
        return (0,) * group + cut
    return cut


def _scenarios(draw: DrawFn, candidate: Candidate, target: ForcedOption | None, rich: bool) -> dict[str, Any]:
    """Draws the choices of scenarios, and returns those that are not at their default."""
    chosen = {one: _scenario(draw, one, candidate, target, rich) for one in candidate.spec.scenarios}
    return {one.name: choice for one, choice in chosen.items() if choice != one.default}


def _scenario(draw: DrawFn, scenario: Option, candidate: Candidate, target: ForcedOption | None, rich: bool) -> Any:
    """Draws the choice of a scenario.

    A rich problem has the usual choice more often, because it gives the most different tokens.
    """
    if target is not None and target.option == scenario.name:
        return draw(one_of(target.values))
    choices = candidate.given(scenario.name)
    if len(choices) == 1:
        return choices[0]
    usual = max(choices, key=choices.count)
    more = (usual,) * len(choices) if rich else ()
    return draw(one_of((*choices, *more)))


def _one_of(draw: DrawFn, values: tuple[Any, ...], preferred: tuple[Any, ...] = ()) -> Any:
    """Draws one of several values: one of the preferred values, if there are any. Hypothesis
    shrinks to the first value, preferred or not.
    """
    with preferring([i for i, value in enumerate(values) if value in preferred]):
        return draw(one_of(values))


def _size(draw: DrawFn, usual: tuple[int, ...], preferred: tuple[int, ...], large: int | None) -> int:
    """Draws the large size if there is one, else a usual size. Both shrink to a usual size."""
    if large is None:
        return _one_of(draw, usual, preferred)
    return _one_of(draw, (*usual, large), (large,))


def _logit_std(draw: DrawFn, small: bool, large: Shape | None) -> float:
    if small:
        return draw(_SMALL_LOGIT_STDS)
    if large is None:
        return draw(_LOGIT_STDS)
    return _one_of(draw, LOGIT_STDS, (large.logit_std,))


def _seed(draw: DrawFn) -> int:
    """Draws a seed. The smallest and largest are as likely as others, so that problems do not share
    tokens.
    """
    with preferring(_SEEDS):
        return draw(st.integers(_SEEDS.start, _SEEDS.stop - 1))


@cache
def _sizes(usual: tuple[int, ...], tiles: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the usual sizes, and the sizes next to a boundary of a tile."""
    near = {n for tile in tiles for n in (tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1)}
    return tuple(sorted(n for n in {*usual, *near} if n >= 1))


@cache
def lengths(tokens: int, most: int, least: int = 1) -> SearchStrategy[tuple[int, ...]]:
    """Cuts ``tokens`` into ``least`` to ``most`` sequences, some of which may be empty."""
    cuts = st.lists(st.integers(0, tokens), min_size=least - 1, max_size=most - 1).map(sorted)
    return cuts.map(lambda at: _between([0, *at, tokens]))


def _equal(tokens: int, sequences: int) -> tuple[int, ...]:
    """Cuts ``tokens`` into sequences of nearly equal length."""
    return _between([tokens * i // sequences for i in range(sequences + 1)])


def _between(bounds: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in pairwise(bounds))


def _masks(draw: DrawFn, sequences: int, preferred: tuple[MaskPattern, ...]) -> tuple[MaskPattern, ...]:
    """Draws a pattern for each sequence.

    A single sequence never has the pattern "none", because nothing would be left to compare.
    """
    patterns = tuple(MASK_PATTERNS) if sequences > 1 else _SOME
    return tuple(_one_of(draw, patterns, preferred) for _ in range(sequences))


@cache
def forced_labels(tokens: int, vocab: int) -> SearchStrategy[tuple[tuple[int, int], ...]]:
    """Draws labels on the first or last row of a shard, for usual numbers of shards."""
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
