# SPDX-License-Identifier: Apache-2.0
"""How Hypothesis draws problems: structure only, simplest choices first, so that shrinking ends
small.

Bugs of kernels sit at boundaries: sizes of 1, primes, powers of two and their neighbours, sizes
next to a tile, labels on the first and last rows of a shard, empty sequences, ranks without tokens.
These are drawn on purpose, not by luck.

Strategies are cached: making and validating them afresh for every problem takes longer than drawing
from them.
"""

from functools import cache
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from lossgate.cases.option_strategies import ForcedOption, draw_options, draw_value, one_of
from lossgate.declaration.candidate import Candidate
from lossgate.layout import Layout
from lossgate.problems.masks import MASK_PATTERNS, MaskPattern
from lossgate.problems.partition import VocabSplit, split_vocab
from lossgate.problems.problem import Problem
from lossgate.specs.spec import COMMON_OPTIONS

TOKENS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 67)
WIDTHS = (1, 2, 3, 7, 8, 16, 17, 32, 48, 61)
VOCABS = (1, 2, 3, 7, 8, 13, 16, 17, 31, 32, 33, 64, 97, 128, 129, 256, 257, 301, 509)
"""Sizes: 1, 2, primes, powers of two and their neighbours."""

LOGIT_STDS = (1.0, 3.0, 10.0, 30.0, 0.1)
"""Standard deviations of the logits."""

_LOGIT_STDS = st.sampled_from(LOGIT_STDS)
_SMALL_LOGIT_STDS = st.sampled_from((1.0, 0.3, 0.1))
"""For losses with kinks in coarse dtypes: large log-probabilities round so coarsely that most
tokens would lie near a kink."""

_LABEL_BOOSTS = st.sampled_from((0.0, 4.0, 12.0))
_OUTLIERS = st.sampled_from((8.0, -8.0, 30.0, -30.0))
_MULTIPLES = st.sampled_from((1, 1, 3))
_ORDERS = st.sampled_from(("rank", "permuted", "tree", "ring"))
_SEEDS = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)).map(lambda halves: halves[0] << 16 | halves[1])
"""Two halves, because Hypothesis draws numbers from a small range evenly, and large ones mostly
small."""


@st.composite
def problems(
    draw: DrawFn, candidate: Candidate, layout: Layout, dtype: str, target: ForcedOption | None = None
) -> Problem:
    """Draws problems that a candidate says it can solve.

    Args:
        draw: given by Hypothesis.
        candidate: whose declaration is followed.
        layout: the ranks.
        dtype: of the inputs.
        target: an option that must have one of some values; None for none.
    """
    spec, head, coarse = candidate.spec, candidate.starts_at, dtype != "float32"
    bias, split = (draw(draw_value(option, candidate.supported(name))) for name, option in COMMON_OPTIONS.items())
    tokens = draw(_size(TOKENS, candidate.tiles.get("token", ())))
    vocab = draw(_vocab(candidate.tiles.get("vocab", ()), layout.tp, split))
    width = draw(_size(WIDTHS, candidate.tiles.get("hidden", ()))) if "hidden" in head.leaves else 1
    lengths = draw(_lengths(tokens, 2 * layout.dp + 2))
    lengths += (0,) * (-len(lengths) % spec.group_size)
    masks = draw(_masks(len(lengths)))
    return Problem(
        spec=spec.name,
        head=candidate.head,
        dtype=dtype,
        layout=layout,
        lengths=lengths,
        masks=masks,
        pad_to_multiple=draw(_MULTIPLES),
        hidden=width,
        vocab=vocab,
        vocab_split=split,
        bias=bias and "bias" in head.leaves,
        options=draw(draw_options(candidate, target)),
        scenario={c.name: value for c in spec.scenarios if (value := draw(one_of(c.choices))) != c.default},
        group_size=spec.group_size,
        logit_std=draw(_SMALL_LOGIT_STDS if coarse and spec.kinks else _LOGIT_STDS),
        label_boost=draw(_LABEL_BOOSTS),
        forced_labels=draw(_forced_labels(tokens, vocab, layout.tp, split)),
        outliers=()
        if (coarse and spec.kinks) or not head.has_logits
        else draw(_outliers(tokens, width if "hidden" in head.leaves else vocab)),
        cotangent=draw(_cotangents(candidate.differentiable)),
        reduction_order=draw(_ORDERS),
        seed=draw(_SEEDS),
    )


def quiet(examples: int, *phases: Phase) -> hypothesis.settings:
    """Returns settings for Hypothesis as an engine: no database, deadlines or health checks.

    Hypothesis is used as an engine, not as a test.
    """
    return hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=[check for check in HealthCheck if isinstance(check, HealthCheck)],
        report_multiple_bugs=False,
        print_blob=False,
    )


def sample_problems(
    candidate: Candidate, layout: Layout, dtype: str, count: int, seed: int, target: ForcedOption | None = None
) -> list[Problem]:
    """Returns ``count`` problems, or all if there are fewer; the same for the same seed."""
    drawn: list[Problem] = []

    @hypothesis.seed(seed)
    @quiet(count, Phase.generate)
    @hypothesis.given(problems(candidate, layout, dtype, target))
    def collect(problem: Problem) -> None:
        drawn.append(problem)

    collect()
    return drawn


@cache
def _size(usual: tuple[int, ...], tiles: tuple[int, ...], at_least: int = 1) -> SearchStrategy[int]:
    """A usual size, or one next to a boundary of a tile."""
    near = {n for tile in tiles for n in (tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1)}
    return st.sampled_from(sorted(n for n in {*usual, *near} if n >= at_least))


@cache
def _vocab(tiles: tuple[int, ...], tp: int, split: VocabSplit) -> SearchStrategy[int]:
    if split == "even":
        return _size(VOCABS, tiles).map(lambda n: -(-n // tp) * tp)
    return _size(VOCABS, tiles, tp if split == "balanced" else 1)


@cache
def _lengths(tokens: int, most: int) -> SearchStrategy[tuple[int, ...]]:
    """Cuts ``tokens`` into at most ``most`` sequences, some of them empty."""
    cuts = st.lists(st.integers(0, tokens), max_size=most - 1).map(sorted)
    return cuts.map(lambda at: tuple(b - a for a, b in zip([0, *at], [*at, tokens], strict=True)))


@cache
def _masks(sequences: int) -> SearchStrategy[tuple[MaskPattern, ...]]:
    """One pattern for each sequence.

    A single sequence is never masked whole: nothing would be left to compare.
    """
    patterns = [pattern for pattern in MASK_PATTERNS if sequences > 1 or pattern != "none"]
    return st.tuples(*[st.sampled_from(patterns)] * sequences)


@cache
def _forced_labels(tokens: int, vocab: int, tp: int, split: VocabSplit) -> SearchStrategy[tuple[tuple[int, int], ...]]:
    """Labels on the first or last row of a shard."""
    shards = [shard for shard in split_vocab(vocab, tp, split) if shard.end > shard.start]
    edges = {row for shard in shards for row in (shard.start, shard.end - 1)}
    forced = st.tuples(st.integers(0, tokens - 1), st.sampled_from(sorted(edges)))
    return st.lists(forced, max_size=4).map(tuple)


@cache
def _outliers(tokens: int, columns: int) -> SearchStrategy[tuple[tuple[int, int, float], ...]]:
    outlier = st.tuples(st.integers(0, tokens - 1), st.integers(0, columns - 1), _OUTLIERS)
    return st.lists(outlier, max_size=2).map(tuple)


@cache
def _cotangents(differentiable: tuple[str, ...]) -> SearchStrategy[Any]:
    return st.sampled_from((*differentiable, "both") if len(differentiable) > 1 else differentiable)
