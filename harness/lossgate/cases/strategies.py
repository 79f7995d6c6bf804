# SPDX-License-Identifier: Apache-2.0
"""How Hypothesis draws problems: structure only, simplest choices first, so that shrinking ends small.

Bugs of kernels sit at boundaries: sizes of 1, primes, powers of two and one beside them, one beside a tile, labels on
the first and last rows of a shard, empty sequences, ranks without tokens. These are drawn on purpose, not by luck.

Strategies are cached: making and validating them afresh for every problem takes longer than drawing from them.
"""

from functools import cache
from itertools import product
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from lossgate.adequacy.option_mutants import Contrast
from lossgate.declaration.candidate import ANY, Candidate
from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.losses import find_spec
from lossgate.problems.partition import VocabSplit, split_vocab
from lossgate.problems.problem import MASK_PATTERNS, MaskPattern, Problem
from lossgate.specs.spec import FEATURES, Option, Spec

TOKENS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 67)
WIDTHS = (1, 2, 3, 7, 8, 16, 17, 32, 48, 61)
VOCABS = (1, 2, 3, 7, 8, 13, 16, 17, 31, 32, 33, 64, 97, 128, 129, 256, 257, 301, 509)
"""Sizes: 1, 2, primes, powers of two and one beside them."""

SPREADS = (1.0, 3.0, 10.0, 30.0, 0.1)
"""Standard deviations of the logits."""

_SPREADS = st.sampled_from(SPREADS)
_SETTLED_SPREADS = st.sampled_from((1.0, 0.3, 0.1))
"""Where log-probabilities round coarsely, and clips must come out the same for all that."""

_CONFIDENCES = st.sampled_from((0.0, 4.0, 12.0))
_SPIKES = st.sampled_from((8.0, -8.0, 30.0, -30.0))
_MULTIPLES = st.sampled_from((1, 1, 3))
_ORDERS = st.sampled_from(("rank", "permuted", "tree", "ring"))
_SEEDS = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)).map(lambda halves: halves[0] << 16 | halves[1])
"""Two halves, because Hypothesis draws numbers from a small range evenly, and large ones mostly small."""


@st.composite
def problems(
    draw: DrawFn, candidate: Candidate, layout: Layout, dtype: str, contrast: Contrast | None = None
) -> Problem:
    """Problems that ``candidate`` says it can solve; with the option of ``contrast`` at a choice to which it applies."""
    spec = find_spec(candidate.spec)
    bias, split = (draw(_values(option, spec.supported(candidate, name))) for name, option in FEATURES.items())
    at_hidden, with_logits, coarse = (
        candidate.head == "hidden",
        candidate.head in ("hidden", "logits"),
        dtype != "float32",
    )
    tokens = draw(_size(TOKENS, candidate.tiles.get("token", ())))
    vocab = draw(_vocab(candidate.tiles.get("vocab", ()), layout.tp, split))
    width = draw(_size(WIDTHS, candidate.tiles.get("hidden", ()))) if at_hidden else 1
    lengths = draw(_lengths(tokens, 2 * layout.dp + 2))
    lengths += (0,) * (-len(lengths) % spec.together)
    masks = draw(_masks(len(lengths)))
    return Problem(
        spec=spec.name,
        head=candidate.head,
        dtype=dtype,
        layout=layout,
        lengths=lengths,
        masks=masks,
        multiple=draw(_MULTIPLES),
        hidden=width,
        vocab=vocab,
        vocab_split=split,
        bias=bias and at_hidden,
        options=draw(_options(candidate, contrast)),
        scenario={c.name: value for c in spec.scenario if (value := draw(_choice(c.choices))) != c.default},
        together=spec.together,
        spread=draw(_SETTLED_SPREADS if coarse and spec.kinks else _SPREADS),
        confidence=draw(_CONFIDENCES),
        pins=draw(_pins(tokens, vocab, layout.tp, split)),
        spikes=()
        if (coarse and spec.kinks) or not with_logits
        else draw(_spikes(tokens, width if at_hidden else vocab)),
        cotangent=draw(_cotangents(spec.differentiable(candidate))),
        reduction_order=draw(_ORDERS),
        seed=draw(_SEEDS),
    )


def quiet(examples: int, *phases: Phase) -> hypothesis.settings:
    """Hypothesis without database, deadlines and health checks: it is used as an engine, not as a test."""
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
    candidate: Candidate, layout: Layout, dtype: str, count: int, seed: int, contrast: Contrast | None = None
) -> list[Problem]:
    """``count`` problems, or fewer where there are no more, the same for the same seed."""
    drawn: list[Problem] = []

    @hypothesis.seed(seed)
    @quiet(count, Phase.generate)
    @hypothesis.given(problems(candidate, layout, dtype, contrast))
    def collect(problem: Problem) -> None:
        drawn.append(problem)

    collect()
    return drawn


@st.composite
def _options(draw: DrawFn, candidate: Candidate, contrast: Contrast | None) -> dict[str, Any]:
    """Options that are not at their default, and that go together."""
    spec = find_spec(candidate.spec)
    options = {option.name: option for option in spec.options}
    groups = [
        *spec.option_groups,
        *((name,) for name in options if name not in {n for group in spec.option_groups for n in group}),
    ]
    if contrast is not None:  # its own group first, since later ones give way
        groups.sort(key=lambda group: contrast.option not in group)
    chosen: dict[str, Any] = {}
    for group in groups:
        fixed = contrast.values if contrast is not None and contrast.option in group else None
        if len(group) == 1 and fixed is None:
            (name,) = group
            chosen = _merged(spec, chosen, ((name, draw(_values(options[name], spec.supported(candidate, name)))),))
            continue
        values = tuple(
            fixed if fixed and contrast and name == contrast.option else _finite(spec, candidate, name)
            for name in group
        )
        combinations = _combinations(spec, group, values)
        if not combinations:
            first = dict(zip(group, (value[0] for value in values), strict=True))
            raise UsageError(
                f"candidate {candidate.name!r}: no values that it supports of {', '.join(group)} go together: {spec.refusal(first)}"
            )
        chosen = _merged(spec, chosen, draw(_choice(combinations) if fixed else _plain_or_any(combinations)))
    supported = {option.name: spec.supported(candidate, option.name) for option in spec.options}
    assume(
        all(
            values is ANY or chosen.get(name, spec.features[name].default) in values
            for name, values in supported.items()
        )
    )
    return chosen


def _merged(spec: Spec, chosen: dict[str, Any], more: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """With more options, unless they don't go together with those chosen before."""
    both = chosen | {name: value for name, value in more if value != spec.features[name].default}
    return both if spec.allows(both) else chosen


def _finite(spec: Spec, candidate: Candidate, name: str) -> tuple[Any, ...]:
    supported = spec.supported(candidate, name)
    values = spec.features[name].choices if supported is ANY else supported
    default = spec.features[name].default
    return (default, *(value for value in values if value != default)) if default in values else values


_Combination = tuple[tuple[str, Any], ...]


@cache
def _combinations(spec: Spec, group: tuple[str, ...], values: tuple[tuple[Any, ...], ...]) -> tuple[_Combination, ...]:
    """Of a group's options, those that go together; the plainest first."""
    every = (tuple(zip(group, combination, strict=True)) for combination in product(*values))
    return tuple(combination for combination in every if spec.allows(dict(combination)))


def _values(option: Option, supported: Any) -> SearchStrategy[Any]:
    if supported is not ANY:
        return _choice(supported)
    return _choice(option.choices) if option.interval is None else _number(option)


def _choice(values: tuple[Any, ...]) -> SearchStrategy[Any]:
    return _typed_choice(values, tuple(map(type, values)))


@cache
def _typed_choice(values: tuple[Any, ...], types: tuple[type, ...]) -> SearchStrategy[Any]:
    """``types`` tell (False,) from (0.0,), which are one key to a cache."""
    return st.sampled_from(values)


@cache
def _plain_or_any(values: tuple[Any, ...]) -> SearchStrategy[Any]:
    """The first as often as any other: of many combinations few are the usual one."""
    return st.just(values[0]) | st.sampled_from(values)


@cache
def _number(option: Option) -> SearchStrategy[float]:
    """The default as often as any other."""
    return st.just(option.default) | st.sampled_from(option.drawn)


@cache
def _size(usual: tuple[int, ...], tiles: tuple[int, ...], at_least: int = 1) -> SearchStrategy[int]:
    """A usual size, or one beside a boundary of a tile."""
    near = {n for tile in tiles for n in (tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1)}
    return st.sampled_from(sorted(n for n in {*usual, *near} if n >= at_least))


@cache
def _vocab(tiles: tuple[int, ...], tp: int, split: VocabSplit) -> SearchStrategy[int]:
    if split == "even":
        return _size(VOCABS, tiles).map(lambda n: -(-n // tp) * tp)
    return _size(VOCABS, tiles, tp if split == "balanced" else 1)


@cache
def _lengths(tokens: int, most: int) -> SearchStrategy[tuple[int, ...]]:
    """Cut ``tokens`` into at most ``most`` sequences, some of them empty."""
    cuts = st.lists(st.integers(0, tokens), max_size=most - 1).map(sorted)
    return cuts.map(lambda at: tuple(b - a for a, b in zip([0, *at], [*at, tokens], strict=True)))


@cache
def _masks(sequences: int) -> SearchStrategy[tuple[MaskPattern, ...]]:
    """One for each sequence. A sequence alone is never masked whole: nothing would be left to compare."""
    patterns = [pattern for pattern in MASK_PATTERNS if sequences > 1 or pattern != "none"]
    return st.tuples(*[st.sampled_from(patterns)] * sequences)


@cache
def _pins(tokens: int, vocab: int, tp: int, split: VocabSplit) -> SearchStrategy[tuple[tuple[int, int], ...]]:
    edges = {
        row
        for shard in split_vocab(vocab, tp, split)
        if shard.end > shard.start
        for row in (shard.start, shard.end - 1)
    }
    pin = st.tuples(st.integers(0, tokens - 1), st.sampled_from(sorted(edges)))
    return st.lists(pin, max_size=4).map(tuple)


@cache
def _spikes(tokens: int, columns: int) -> SearchStrategy[tuple[tuple[int, int, float], ...]]:
    spike = st.tuples(st.integers(0, tokens - 1), st.integers(0, columns - 1), _SPIKES)
    return st.lists(spike, max_size=2).map(tuple)


@cache
def _cotangents(differentiable: tuple[str, ...]) -> SearchStrategy[Any]:
    return st.sampled_from((*differentiable, "both") if len(differentiable) > 1 else differentiable)
