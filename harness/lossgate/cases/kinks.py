# SPDX-License-Identifier: Apache-2.0
"""Masks tokens near a kink, such as the edge of a clip, where rounding decides the gradient.

The loss is run under a dispatch mode that records each choice by size: comparisons, clamps,
``relu`` and similar functions, absolute values, minima and maxima, and ``topk``. Exact ties, such
as a ratio of exactly 1 in on-policy training, are not masked: both sides give the same value.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, sqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lossgate.numerics.torch_operations import DispatchMode, arguments_of, base_name
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.token_chunks import chunks
from lossgate.specs.token_values import TokenValues

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "maximum", "minimum", "fmax", "fmin"])

_AT_ZERO = frozenset(["abs", "sign", "sgn", "heaviside", "relu", "leaky_relu", "prelu", "_prelu_kernel", "elu"])

_EDGES: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Any]]] = MappingProxyType(
    {
        "clamp": lambda given: (given["min"], given["max"]),
        "clamp_min": lambda given: (given["min"],),
        "clamp_max": lambda given: (given["max"],),
        "hardtanh": lambda given: (given["min_val"], given["max_val"]),
        "threshold": lambda given: (given["threshold"],),
        "hardshrink": lambda given: (given["lambd"], -given["lambd"]),
        "softshrink": lambda given: (given["lambd"], -given["lambd"]),
        "hardsigmoid": lambda given: (3.0, -3.0),
        "hardswish": lambda given: (3.0, -3.0),
    }
)
"""The kinks of other operations, as a function of their arguments."""

_EXTREMES = {
    "amax": (True,),
    "argmax": (True,),
    "max": (True,),
    "amin": (False,),
    "argmin": (False,),
    "min": (False,),
    "aminmax": (True, False),
}
"""Reductions to an extreme. For each extreme that they return: whether it is the largest."""

_NORM = "linalg_vector_norm"

_CHOOSING = frozenset([*_COMPARISONS, *_AT_ZERO, *_EDGES, *_EXTREMES, _NORM, "topk", "scatter_reduce"])


class RecordChoices(DispatchMode):
    """Records the outcome of each choice in turn.

    A comparison has the sign of the difference as its outcome, 0 for a tie. A reduction to an
    extreme has the number of the chosen entry, from 1 on. ``topk`` has 1 for each chosen entry, and
    -1 for others.

    Sorting does not count as a choice, because the loss may still be smooth, as in sparsemax. Nor
    does rounding to whole numbers, because its derivative is 0 on both sides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = base_name(func)
        if name in _CHOOSING and any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args):
            # Recorded before the operation runs, because one in place changes its input.
            self.outcomes += _outcomes(name, args[0], arguments_of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _outcomes(name: str, x: Tensor, given: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the outcomes of an operation's choices.

    Args:
        name: the name of the operation.
        x: its first argument.
        given: all its arguments, by name.
    """
    if name in _COMPARISONS or (name in ("max", "min") and "other" in given):
        yield _sign(x - given["other"])
    elif name in _AT_ZERO:
        yield _sign(x)
    elif name in _EDGES:
        yield from (_sign(x - edge) for edge in _EDGES[name](given) if edge is not None)
    elif name == "topk":
        yield _is_in_top(x, given)
    elif name == "scatter_reduce":
        if given["reduce"] in ("amax", "amin"):
            reached = torch.scatter_reduce(x, **{key: given[key] for key in _SCATTERED})
            used = given["src"][tuple(map(slice, given["index"].shape))]  # the rest of src is not read
            yield _sign(used - reached.gather(given["dim"], given["index"]))
    elif name == _NORM:
        if given["ord"] == 1:
            yield _sign(x)
        elif abs(given["ord"]) == inf:
            yield _chosen(x.abs() if given["ord"] > 0 else -x.abs(), given.get("dim"))
    elif name in _EXTREMES:
        yield from (_chosen(x if largest else -x, given.get("dim")) for largest in _EXTREMES[name])


_SCATTERED = ("dim", "index", "src", "reduce", "include_self")


def _is_in_top(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Returns 1 where an entry is among the k largest, or smallest, and -1 elsewhere. Entries that
    tie for the last of the k places get 0.
    """
    k, dim = given["k"], given["dim"]
    if not 0 < k < x.shape[dim]:
        return torch.zeros_like(x)
    ranked = x if given["largest"] else -x
    top = ranked.topk(k + 1, dim).values
    last, next_ = top.narrow(dim, k - 1, 1), top.narrow(dim, k, 1)
    return _sign(ranked - (last + next_) / 2)


def _sign(difference: Tensor) -> Tensor:
    return difference.sign().nan_to_num_(0.0)


def _chosen(x: Tensor, dim: Any) -> Tensor:
    """Returns the number of the largest entry along some dims, from 1 on. It is 0 where the largest
    two are equal. If no dims are given, it is that of all entries.
    """
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    entries = x.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) if dims else x[..., None]
    if entries.shape[-1] < 2:
        return torch.zeros(entries.shape[:-1])
    top = entries.topk(2, -1)
    return torch.where(top.values[..., 0] == top.values[..., 1], 0, top.indices[..., 0] + 1)


_SIGMAS = 6
"""The distance that comparisons keep from a kink, in standard deviations of rounding."""

_AT_RANDOM = 4
"""The number of moves with random signs. Two more go up and down."""

_ROUNDS = 5
"""The most rounds of masking. A masked token moves the means over its sequence, and so other
comparisons, which are checked again."""


def mask_near_kinks(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> GlobalBatch:
    """Masks the tokens at which rounding could change the outcome of a comparison.

    At a kink either one-sided gradient is right, and no noise tells which of them a kernel finds.
    So the loss is run with log-probabilities moved by as much as rounding may move them. If this
    changes the outcome of a clip or a comparison, its token or its whole sequence is masked.

    Returns:
        The batch with a smaller mask; the batch itself for a loss without kinks and for scenarios
        that are ties.
    """
    spec = bound.spec
    scenario = {choice.name: choice.default for choice in spec.scenarios} | problem.scenario
    if not spec.kinks or any(scenario[name] == choice for name, choice in spec.tie_scenarios.items()):
        return batch
    streams = RandomStreams(problem.to_json())
    distance = _SIGMAS * _rounding_error(batch, problem, bound)
    values = bound.token_values(problem.head, batch.leaves, batch.fields)
    for round_ in range(_ROUNDS):
        moves = {
            name: distance * _signs(streams, round_, name, value.shape, batch)
            for name, value in values.differentiable.items()
        }
        near = near_kinks(batch, bound, values, moves)
        if not bool((near & batch.fields["mask"]).any()):
            break
        masked = replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] & ~near})
        batch = spec.counted(masked)
    return batch


def has_comparisons(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> bool:
    """Returns whether a comparison of the loss has both outcomes among the trained tokens, or
    sequences.
    """
    values = bound.token_values(problem.head, batch.leaves, batch.fields)
    trained = bound.spec.trained_of(batch.known)
    for outcome in outcomes(batch, bound, values):
        of_trained = outcome[trained] if outcome.shape[:1] == trained.shape else outcome
        if bool((of_trained > 0).any() and (of_trained < 0).any()):
            return True
    return False


def _signs(streams: RandomStreams, round_: int, name: str, shape: torch.Size, batch: GlobalBatch) -> Tensor:
    """Returns the signs of the moves of a value per token, ``[moves, *shape]``: up, down, and at
    random.

    Log-probabilities with and without a filter move together. If all logits moved up, no
    probability would change, so the logit of the label moves against all others.
    """
    up = torch.ones(shape)
    if name == "logits":
        up = -up.scatter(-1, batch.fields["labels"][:, None], -1.0)
    own_stream = "" if name in ("logprobs", "unfiltered") else f"{name} "
    at_random = [streams.normal(f"probe {round_} {own_stream}{i}", *shape).sign() for i in range(_AT_RANDOM)]
    return torch.stack([up, -up, *at_random])


def _rounding_error(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> Tensor:
    """Returns the standard deviation that rounding gives a log-probability.

    It assumes that everything is rounded to the coarsest format of the problem.
    """
    head = HEADS[problem.head]
    if head.has_logits:
        sizes = [head.logits(leaves).abs().max() for _, leaves in chunks(head, batch.leaves)]
    else:
        sizes = [head.logits(batch.leaves).abs().max()]
    largest = torch.stack(sizes).max().clamp(min=1)
    return head.rounding_unit(problem) * largest / bound.temperature / sqrt(3)


def near_kinks(
    batch: GlobalBatch,
    bound: BoundSpec,
    values: TokenValues,
    moves: Mapping[str, Tensor],
) -> Tensor:
    """Returns the tokens with a choice whose outcome some move changes, ``[tokens]`` bool.

    Args:
        batch: the batch of the loss.
        bound: the spec with its options.
        values: the values per token of the batch.
        moves: the moves of the values, by name, ``[moves, tokens, ...]``.
    """
    near = torch.zeros(batch.partition.tokens, dtype=torch.bool)
    with_none_first = {name: torch.cat([torch.zeros_like(move[:1]), move]) for name, move in moves.items()}
    for outcome in _moved_outcomes(batch, bound, values, with_none_first):
        unmoved = outcome[0]
        changed = (outcome != unmoved) & (unmoved != 0)  # an exact tie is 0
        near |= tokens_of(changed.any(0), batch)
    return near


def _moved_outcomes(
    batch: GlobalBatch, bound: BoundSpec, values: TokenValues, moves: Mapping[str, Tensor]
) -> list[Tensor]:
    """Returns the outcomes ``[moves, ...]`` of the choices that moves can change.

    All moves are run at once by vmap. But torch may still run an operation move by move, and its
    outcomes then lack the dim of moves. In that case the loss is run once for each move.
    """

    def moved(by: dict[str, Tensor]) -> Tensor:
        given = values.replace(**{name: values.given[name] + move for name, move in by.items()})
        return bound.returning(()).loss(given, batch.known)[0]

    count = len(next(iter(moves.values())))
    with torch.no_grad(), RecordChoices() as record:
        torch.vmap(moved)(dict(moves))
    mapped = [outcome for outcome in record.outcomes if outcome.shape[:1] == (count,)]
    others = [outcome for outcome in record.outcomes if outcome.shape[:1] != (count,)]
    other_dims = any(count in other.shape for other in others) or _has_dim(count, batch, values)
    if len(others) < count and not other_dims:
        return mapped  # nothing was run move by move, and every first dim is that of the moves
    # Compare with the shapes of a run without moves: each outcome has these, or one dim more.
    shapes = [outcome.shape for outcome in outcomes(batch, bound, values)]
    found = list(zip(record.outcomes, shapes, strict=False))
    if len(record.outcomes) == len(shapes) and all(one.shape in ((count, *own), own) for one, own in found):
        return [one for one, own in found if one.dim() > len(own)]
    runs = []
    for i in range(count):
        with torch.no_grad(), RecordChoices() as record:
            moved({name: move[i] for name, move in moves.items()})
        runs.append(record.outcomes)
    return [torch.stack(of_runs) for of_runs in zip(*runs, strict=True)]


def _has_dim(size: int, batch: GlobalBatch, values: TokenValues) -> bool:
    """Returns whether a dim of the batch or of its values has the given size. Such a dim can't be
    told from the dim of moves.
    """
    sizes = {len(batch.partition.lengths), len(batch.partition.lengths) // batch.partition.group_size}
    tensors = (*batch.fields.values(), *values.given.values())
    return size in sizes or any(size in tensor.shape for tensor in tensors)


def tokens_of(changed: Tensor, batch: GlobalBatch) -> Tensor:
    """Returns the tokens of changed outcomes, ``[tokens]`` bool.

    The size of a dim tells whether the outcomes are of tokens, of sequences or of groups. If two of
    these sizes are equal, the outcomes count for both. A choice for the whole batch at once, such
    as its largest ratio, has no tokens. Masking would not help there, and such a choice usually
    belongs to a metric.
    """
    sequence, sequences = batch.fields["sequence"], len(batch.partition.lengths)
    group_of_sequence = torch.arange(sequences) // batch.partition.group_size
    of_each_token = (torch.arange(len(sequence)), sequence, group_of_sequence[sequence])
    sizes = (len(sequence), sequences, len(group_of_sequence.unique()))
    dim = next((dim for dim, size in enumerate(changed.shape) if size in sizes), None)
    if dim is None:
        return torch.zeros(len(sequence), dtype=torch.bool)
    if changed.dim() > 1:
        changed = changed.movedim(dim, -1).flatten(0, -2).any(0)
    possible = [index for index, size in zip(of_each_token, sizes, strict=True) if size == len(changed)]
    return torch.stack([changed[index] for index in possible]).any(0)


def outcomes(batch: GlobalBatch, bound: BoundSpec, values: TokenValues) -> list[Tensor]:
    """Returns the outcome of each choice of a loss in turn; see ``RecordChoices``."""
    with torch.no_grad(), RecordChoices() as record:
        bound.returning(()).loss(values, batch.known)
    return record.outcomes
