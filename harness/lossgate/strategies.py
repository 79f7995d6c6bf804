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

``problems`` draws whole problems of a spec, as ``lossgate verify`` does. The others draw its parts.
What bugs sit at is drawn on purpose: sizes of 1, primes, powers of two and their neighbours, empty
sequences, labels at the edges of shards. All shrink to small and plain values.
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
from lossgate.cases.drawn_problem import DrawnPack, DrawnProblem
from lossgate.cases.option_strategies import draw_options, draw_value
from lossgate.cases.placement import Placement, splits_of, takes_idle_ranks
from lossgate.declaration.candidate import Candidate, candidate
from lossgate.declaration.checks import check_axes, check_spec
from lossgate.declaration.supports import ANY
from lossgate.problems.batch import draw_tokens
from lossgate.problems.masks import MASK_PATTERNS, MaskPattern, draw_mask
from lossgate.problems.problem import Problem, ReductionOrder
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.heads import HEADS
from lossgate.specs.option import COMMON_OPTIONS, TEMPERATURE, Option
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
    """Draws problems of a spec, or those that a candidate says it can solve.

    Args:
        of: a spec, by name or as the object; or a candidate, whose declaration is followed.
        head: where the kernel starts: "hidden", "logits", ... A spec needs it.
        dtype: of the differentiable inputs; by default the candidate's first, or float32.
        layout: the ranks: "tp=2,cp=2", a ``Layout``, or a strategy such as ``layouts()``.
        supports: as for ``lossgate.candidate``: which values each option may have. Options that are
            not named keep their default. ``lossgate.ANY`` draws every value of every option.
        tiles: as for ``lossgate.candidate``: sizes at which the kernel's loops turn.

    Returns:
        A strategy of ``DrawnProblem``: ``inputs`` of each rank, ``options``, ``upstream``
        gradients, the ``reference``, and ``check`` for a candidate.

    Raises:
        UsageError: if an argument is wrong, or a candidate's own declaration says it.
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
    """Draws layouts of at most so many ranks.

    Args:
        ranks: the most ranks.
        axes: which of dp, cp and tp may be split.
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
        tokens: the sum of all lengths; by default drawn, 1 to 67.
        sequences: the most sequences.
        group_size: the sequences come in groups of so many, such as 2 for preference pairs. Empty
            ones fill the last group, beyond ``sequences`` if need be.
    """
    _check_positive("lengths", sequences=sequences, group_size=group_size)
    if not isinstance(tokens, SearchStrategy) and tokens is not None:
        _check_positive("lengths", tokens=tokens)
    total = st.sampled_from(drawn.TOKENS) if tokens is None else tokens
    total = total if isinstance(total, SearchStrategy) else st.just(total)
    return total.flatmap(lambda n: drawn.lengths(n, sequences)).map(lambda cut: cut + (0,) * (-len(cut) % group_size))


def packs(
    tokens: int | SearchStrategy[int] | None = None, *, cp: int = 1, sequences: int = 18, group_size: int = 1
) -> SearchStrategy[DrawnPack]:
    """Draws packs: true and padded lengths, with ``cu_seqlens`` of both.

    Args:
        tokens, sequences, group_size: as for ``lengths``.
        cp: the context-parallel ranks that share each sequence.
    """
    _check_positive("packs", cp=cp)
    cut = lengths(tokens, sequences=sequences, group_size=group_size)
    return st.builds(DrawnPack, lengths=cut, cp=st.just(cp), pad_to_multiple=st.sampled_from(_PADDING))


def masks(lengths: Sequence[int], patterns: Iterable[MaskPattern] = tuple(MASK_PATTERNS)) -> SearchStrategy[Tensor]:
    """Draws loss masks ``[sum(lengths)]`` bool, of sequences end to end without padding.

    The last token of a sequence is never trained: it has no next token.

    Args:
        lengths: tokens of each sequence.
        patterns: what is drawn for each sequence: "all", "none", "response" (its tail), "holes"
            (tokens at random).
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
    """Draws labels ``[sum(lengths)]`` int64, of sequences end to end without padding.

    Some are the first or last row of a shard of the vocabulary. The label of a sequence's last
    token is the next sequence's first id, as a roll gives it: the mask must keep it out.

    Args:
        lengths: tokens of each sequence.
        vocab: rows of the vocabulary.
    """
    own = _checked_lengths("labels", lengths)
    _check_positive("labels", vocab=vocab)

    def made(forced: tuple[tuple[int, int], ...], seed: int) -> Tensor:
        problem = Problem(
            spec="",  # tokens are drawn before any loss is asked for its fields
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
    """Draws the options of a spec, which are valid together, as the object that a kernel gets.

    Args:
        of: a spec, by name or as the object; or a candidate, for those that it supports.
        supports: as for ``lossgate.candidate``: which values each option may have. By default every
            value of every option.
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
    placements = [Placement(layout, split, idle=takes_idle_ranks(able)) for split in splits_of(able)]
    if [one.vocab_split for one in placements] == ["even"]:  # the vocabulary is made larger
        placements = [one for one in placements if one.fills(problem)] or reject()
    else:
        placements = [one for one in placements if one.fits(problem)] or reject()
    placement = replace(
        draw(st.sampled_from(placements if layout.tp > 1 else placements[:1])),
        pad_to_multiple=draw(st.sampled_from(_PADDING)),
        reduction_order=draw(st.sampled_from(get_args(ReductionOrder))) if layout.ranks > 1 else "rank",
    )
    return DrawnProblem(placement.put(problem), able.spec)


@st.composite
def _split(draw: DrawFn, ranks: int, axes: tuple[Axis, ...]) -> Layout:
    """Draws the sizes one by one, so that each shrinks to 1; the axis that comes first varies."""
    sizes: dict[Axis, int] = {}
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(st.integers(1, ranks // prod(sizes.values())))
    return Layout(**sizes)


def _layouts_of(layout: Any, able: Candidate) -> SearchStrategy[Layout]:
    if isinstance(layout, SearchStrategy):
        return layout
    one = Layout.parse(layout) if isinstance(layout, str) else layout
    if not isinstance(one, Layout):
        raise UsageError(
            f"problems(layout={layout!r}): expected a layout such as 'tp=2,cp=2', or a strategy such as layouts()"
        )
    _check_split(one, able)
    return st.just(one)


def _check_split(layout: Layout, able: Candidate) -> None:
    if extra := [axis for axis in layout.axes if axis not in able.axes]:
        raise UsageError(
            f"problems(layout={str(layout)!r}): candidate {able.name!r} is not sharded over {', '.join(extra)}; "
            f"choose layouts that split {', '.join(able.axes) or 'nothing'}"
        )


def _declared(caller: str, of: Any, head: str | None, dtype: str, supports: Any, tiles: Any) -> Candidate:
    """Returns a candidate that declares what problems of a spec are to be drawn."""
    spec = check_spec(Argument(f"{caller}(", "spec", of))
    if head is None:
        raise UsageError(f"{caller}({spec.name!r}): head is missing; expected one of {', '.join(spec.inputs)}")

    def declare() -> Candidate:
        values = _everything(spec, head) if supports is ANY else supports
        makes = candidate(spec, head=head, axes=AXES, dtypes=(dtype,), supports=values, tiles=tiles)
        return makes(_nobody)

    return _naming(caller, declare)


def _everything(spec: Spec, head: str) -> dict[str, Any]:
    logits = head in HEADS and HEADS[head].has_logits
    return {name: ANY for name in spec.supported_options if logits or name not in COMMON_OPTIONS}


def _nobody(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    raise AssertionError("problems are drawn for it, and nobody calls it")


def _naming(caller: str, check: Any, *arguments: Any) -> Any:
    """Calls a check of declarations. In its message, the strategy's name is that of the caller."""
    try:
        return check(*arguments)
    except UsageError as error:
        raise UsageError(str(error).replace("candidate(", f"{caller}(", 1)) from None


def _check_positive(caller: str, **given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{caller}({name}={value!r}): expected a positive whole number")


def _checked_lengths(caller: str, lengths: Sequence[int]) -> tuple[int, ...]:
    own = tuple(lengths) if isinstance(lengths, Iterable) else ()  # pyright: ignore[reportUnnecessaryIsInstance]
    if not all(isinstance(n, int) and n >= 0 for n in own) or sum(own) < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"{caller}(lengths={lengths!r}): expected the tokens of each sequence, at least one in all")
    return own
