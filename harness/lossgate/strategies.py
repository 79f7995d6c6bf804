# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for the property tests of kernel authors.

For example::

    import hypothesis
    import lossgate

    @hypothesis.settings(deadline=None)
    @hypothesis.given(lossgate.strategies.problems("nll", head="hidden"))
    def test_my_loss(problem):
        inputs, reference = problem.inputs(), problem.reference()
        loss = my_loss(inputs.hidden, inputs.weight, inputs.labels, inputs.mask)
        ...

``problems`` draws whole problems of a spec, like ``lossgate verify``. The other strategies draw
parts of a problem. All draw often what bugs depend on: sizes of 1, primes, powers of two and their
neighbours, empty sequences, and labels at the edges of shards. All shrink to small and plain
values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, get_args

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lossgate.base.argument import Argument
from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES, MAX_RANKS, Axis, Layout
from lossgate.base.spelling import nearest
from lossgate.cases import problem_strategies as drawn
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawn_problem import DrawnPack, DrawnProblem
from lossgate.cases.option_strategies import draw_options, draw_value
from lossgate.cases.placement import Placement, is_given, splits_of
from lossgate.declaration.candidate import Candidate, candidate
from lossgate.declaration.checks import check_axes, check_spec
from lossgate.declaration.supports import ANY
from lossgate.problems.batch import draw_tokens
from lossgate.problems.masks import MASK_PATTERNS, MaskPattern, draw_mask
from lossgate.problems.problem import Problem, ReductionOrder
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.heads import HEADS
from lossgate.specs.option import COMMON_OPTIONS, EMPTY, TEMPERATURE, Option
from lossgate.specs.spec import Spec

__all__ = [
    "DrawnPack",
    "DrawnProblem",
    "labels",
    "layouts",
    "lengths",
    "masks",
    "options",
    "packs",
    "problems",
    "temperatures",
]

_PADDING = (1, 3)
"""Sequences are padded to multiples of these, on top of what cp needs."""
_SEEDS = st.integers(0, 2**32 - 1)
_TEMPERATURE = Option(name="temperature", meaning="divides the logits", default=1.0, interval=TEMPERATURE)


def problems(
    of: str | Spec | Candidate,
    *,
    head: str | None = None,
    dtype: str | None = None,
    layout: str | Layout | SearchStrategy[Layout] = "single",
    supports: Mapping[str, Any] | Any = None,
    tiles: Mapping[str, int | tuple[int, ...]] | None = None,
) -> SearchStrategy[DrawnProblem]:
    """Draws problems of a spec, or the problems that a candidate declares it can take.

    Args:
        of: a spec, by name or as the object, or a candidate.
        head: where the kernel starts: "hidden", "logits", ... It is needed if ``of`` is a spec.
        dtype: the dtype of the differentiable inputs; by default the candidate's first, or float32.
        layout: the ranks: "tp=2,cp=2", a ``Layout``, or a strategy such as ``layouts()``.
        supports: the values that each option may have, as for ``lossgate.candidate``. Options that
            are not named keep their default. ``lossgate.ANY`` draws every value of every option.
        tiles: the tile sizes of the kernel's loops, as for ``lossgate.candidate``.

    Returns:
        A strategy of ``DrawnProblem``: ``inputs`` of each rank, ``options``, ``upstream``
        gradients, the ``reference``, and ``check`` for a candidate.

    Raises:
        UsageError: if an argument is wrong, or if a candidate declares it already.
    """
    if isinstance(of, Candidate):
        for name, value in (("head", head), ("supports", supports), ("tiles", tiles)):
            if value is not None:
                raise UsageError(f"problems({name}={value!r}): candidate {of.name!r} declares it; leave it out")
        able = of
    else:
        able = _declared("problems", of, head, dtype or "float32", {} if supports is None else supports, tiles)
    if (dtype := dtype or able.dtypes[0]) not in able.dtypes:
        raise UsageError(f"problems(dtype={dtype!r}): candidate {able.name!r} takes {', '.join(able.dtypes)}")
    return _problems(able, dtype, _layouts_of(layout, able))


def layouts(ranks: int = 4, axes: Sequence[str] = AXES) -> SearchStrategy[Layout]:
    """Draws layouts.

    Args:
        ranks: the most ranks of a layout.
        axes: the axes that may be split, of dp, cp and tp.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"layouts(ranks={ranks!r}): expected a number from 1 to {MAX_RANKS}")
    allowed = check_axes(Argument("layouts(", "axes", axes))
    return _split(ranks, allowed)


def lengths(
    tokens: int | SearchStrategy[int] | None = None, *, sequences: int = 18, group_size: int = 1
) -> SearchStrategy[tuple[int, ...]]:
    """Draws the lengths of packed sequences. Some are empty.

    Args:
        tokens: the sum of all lengths; by default drawn from 1 to 67.
        sequences: the most sequences.
        group_size: the number of sequences in a group, such as 2 for preference pairs. Empty
            sequences fill the last group, beyond ``sequences`` if need be.
    """
    _check_positive("lengths", sequences=sequences, group_size=group_size)
    if isinstance(tokens, SearchStrategy):
        total = tokens
    elif tokens is None:
        total = st.sampled_from(drawn.TOKENS)
    else:
        _check_positive("lengths", tokens=tokens)
        total = st.just(tokens)

    def with_full_groups(cut: tuple[int, ...]) -> tuple[int, ...]:
        return cut + (0,) * (-len(cut) % group_size)

    return total.flatmap(lambda n: drawn.lengths(n, sequences)).map(with_full_groups)


def packs(
    tokens: int | SearchStrategy[int] | None = None, *, cp: int = 1, sequences: int = 18, group_size: int = 1
) -> SearchStrategy[DrawnPack]:
    """Draws packs: true and padded lengths, with ``cu_seqlens`` of both.

    Args:
        tokens, sequences, group_size: as for ``lengths``.
        cp: the number of context-parallel ranks that share each sequence.
    """
    _check_positive("packs", cp=cp)
    cut = lengths(tokens, sequences=sequences, group_size=group_size)
    return st.builds(DrawnPack, lengths=cut, cp=st.just(cp), pad_to_multiple=st.sampled_from(_PADDING))


def masks(lengths: Sequence[int], patterns: Iterable[MaskPattern] = tuple(MASK_PATTERNS)) -> SearchStrategy[Tensor]:
    """Draws loss masks ``[sum(lengths)]`` bool, for sequences end to end without padding.

    The last token of a sequence is never trained, because it has no next token.

    Args:
        lengths: the number of tokens of each sequence.
        patterns: the patterns that a sequence may have: "all", "none", "response" (its tail),
            "holes" (tokens at random).
    """
    own, allowed = _checked_lengths("masks", lengths), tuple(patterns)
    for pattern in allowed:
        if pattern not in MASK_PATTERNS:
            raise UsageError(f"masks(patterns=...): unknown pattern {pattern!r}; {nearest(pattern, MASK_PATTERNS)}")
    if not allowed:
        raise UsageError(f"masks(patterns=()): expected at least one of {', '.join(MASK_PATTERNS)}")
    chosen = st.tuples(*(st.sampled_from(allowed) for _ in own))
    return st.builds(lambda each, seed: draw_mask(each, own, RandomStreams(seed)), chosen, _SEEDS)


def labels(lengths: Sequence[int], vocab: int) -> SearchStrategy[Tensor]:
    """Draws labels ``[sum(lengths)]`` int64, for sequences end to end without padding.

    Some labels are the first or last row of a shard of the vocabulary. The label of a sequence's
    last token is the first id of the next sequence, like the result of ``roll``. The mask must keep
    it out.

    Args:
        lengths: the number of tokens of each sequence.
        vocab: the number of rows of the vocabulary.
    """
    own = _checked_lengths("labels", lengths)
    _check_positive("labels", vocab=vocab)

    def made(forced: tuple[tuple[int, int], ...], seed: int) -> Tensor:
        problem = Problem(
            spec="",  # tokens do not depend on the loss
            head="logprobs",
            dtype="float32",
            lengths=own,
            masks=("all",) * len(own),
            hidden=1,
            vocab=vocab,
            forced_labels=forced,
            seed=seed,
        )
        return draw_tokens(problem)["labels"]

    return st.builds(made, drawn.forced_labels(sum(own), vocab), _SEEDS)


def temperatures() -> SearchStrategy[float]:
    """Draws temperatures from 0.3 to 3, often 1. All of them are exact in bfloat16."""
    return draw_value(_TEMPERATURE, ANY)


def options(of: str | Spec | Candidate, *, supports: Mapping[str, Any] | Any = ANY) -> SearchStrategy[Any]:
    """Draws options of a spec that are valid together, as the object that a kernel gets.

    Args:
        of: a spec, by name or as the object; or a candidate, for the options that it supports.
        supports: the values that each option may have, as for ``lossgate.candidate``. By default
            every value of every option.
    """
    if isinstance(of, Candidate):
        if supports is not ANY:
            raise UsageError(f"options(supports={supports!r}): candidate {of.name!r} declares it; leave it out")
        able = of
    else:
        spec = check_spec(Argument("options(", "spec", of))
        able = _declared("options", spec, next(iter(spec.inputs)), "float32", supports, None)
    return draw_options(able, None).map(lambda values: able.spec.bind(values).options)


@st.composite
def _problems(draw: DrawFn, able: Candidate, dtype: str, layouts: SearchStrategy[Layout]) -> DrawnProblem:
    layout = draw(layouts)
    _check_split(layout, able)
    problem = draw(drawn.problems(able, dtype))
    placements = [Placement(layout, split, empty=able.given(EMPTY.name)) for split in splits_of(able)]
    only_even = [one.vocab_split for one in placements] == ["even"]
    if only_even:  # the vocabulary is made larger, so that it can be split evenly
        possible = [one for one in placements if one.fills(problem)]
    else:
        possible = [one for one in placements if one.fits(problem)]
    if not possible:
        reject()
    placement = draw(st.sampled_from(possible if layout.tp > 1 else possible[:1]))
    padding = draw(st.sampled_from(_PADDING))
    order = draw(st.sampled_from(get_args(ReductionOrder))) if layout.ranks > 1 else "rank"
    placement = replace(placement, pad_to_multiple=padding, reduction_order=order)
    placed = placement.put(problem)
    if able.conventions.untrained != "zero" and not is_given(able, BoundProblem(able.spec, placed), placed.partition):
        reject()
    return DrawnProblem(placed, able.spec)


@st.composite
def _split(draw: DrawFn, ranks: int, axes: tuple[Axis, ...]) -> Layout:
    """Draws a layout of at most ``ranks`` ranks."""
    sizes: dict[Axis, int] = {}
    # The sizes are drawn one by one, so that each shrinks to 1. Early axes may be larger, so the
    # order varies.
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(st.integers(1, ranks // prod(sizes.values())))
    return Layout(**sizes)


def _layouts_of(given: Any, able: Candidate) -> SearchStrategy[Layout]:
    """Returns the strategy that the argument ``layout`` of ``problems`` stands for."""
    if isinstance(given, SearchStrategy):
        return given
    layout = Layout.parse(given) if isinstance(given, str) else given
    if not isinstance(layout, Layout):
        raise UsageError(
            f"problems(layout={given!r}): expected a layout such as 'tp=2,cp=2', or a strategy such as layouts()"
        )
    _check_split(layout, able)
    return st.just(layout)


def _check_split(layout: Layout, able: Candidate) -> None:
    if extra := [axis for axis in layout.axes if axis not in able.axes]:
        raise UsageError(
            f"problems(layout={str(layout)!r}): candidate {able.name!r} is not sharded over {', '.join(extra)}; "
            f"choose layouts that split {', '.join(able.axes) or 'nothing'}"
        )


def _declared(caller: str, of: Any, head: str | None, dtype: str, supports: Any, tiles: Any) -> Candidate:
    """Returns a candidate whose declaration says which problems of a spec to draw."""
    spec = check_spec(Argument(f"{caller}(", "spec", of))
    if head is None:
        raise UsageError(f"{caller}({spec.name!r}): head is missing; expected one of {', '.join(spec.inputs)}")

    values = _every_option(spec, head) if supports is ANY else supports
    try:
        declare = candidate(spec, head=head, axes=AXES, dtypes=(dtype,), supports=values, tiles=tiles)
        return declare(_never_called)
    except UsageError as error:  # the user called a strategy, so the message names that
        raise UsageError(str(error).replace("candidate(", f"{caller}(", 1)) from None


def _every_option(spec: Spec, head: str) -> dict[str, Any]:
    has_logits = head in HEADS and HEADS[head].has_logits
    return {name: ANY for name in spec.supported_options if has_logits or name not in COMMON_OPTIONS}


def _never_called(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    raise AssertionError("this kernel only declares which problems to draw; do not call it")


def _check_positive(caller: str, **given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{caller}({name}={value!r}): expected a positive whole number")


def _checked_lengths(caller: str, lengths: Sequence[int]) -> tuple[int, ...]:
    own = tuple(lengths) if isinstance(lengths, Iterable) else ()  # pyright: ignore[reportUnnecessaryIsInstance]
    if not all(isinstance(n, int) and n >= 0 for n in own) or sum(own) < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"{caller}(lengths={lengths!r}): expected the number of tokens of each sequence, one or more in total"
        )
    return own
