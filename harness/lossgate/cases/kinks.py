# SPDX-License-Identifier: Apache-2.0
"""Masks tokens near a kink, such as the edge of a clip, where rounding decides the gradient.

The loss is run under a dispatch mode that records what it chooses by size: comparisons, clamps,
``relu`` and its kin, absolute values, minima and maxima, ``topk``. Exact ties, such as a ratio of
exactly 1 in on-policy training, are no kink: both sides give the same value there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, sqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lossgate.numerics.dispatched import DispatchMode, arguments_of, base_name
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
"""Where else an operation has kinks, from its arguments."""

_EXTREMES = {
    "amax": (True,),
    "argmax": (True,),
    "max": (True,),
    "amin": (False,),
    "argmin": (False,),
    "min": (False,),
    "aminmax": (True, False),
}
"""Reductions to an extreme: whether they choose the largest."""

_NORM = "linalg_vector_norm"

_CHOOSING = frozenset([*_COMPARISONS, *_AT_ZERO, *_EDGES, *_EXTREMES, _NORM, "topk", "scatter_reduce"])


class RecordChoices(DispatchMode):
    """Records the outcome of each choice in turn: the sign of a difference, 0 for a tie.

    Of a reduction to an extreme it is the number of the entry chosen, from 1 on. Of ``topk`` it is
    whether each entry is chosen.

    What sorts is no choice: what is made of it may be smooth, as in sparsemax. Nor is what rounds
    to whole numbers: its derivative is 0 on both sides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = base_name(func)
        if name in _CHOOSING and any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args):
            # Before it runs, since an operation in place changes its input.
            self.outcomes += _outcomes(name, args[0], arguments_of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _outcomes(name: str, x: Tensor, given: Mapping[str, Any]) -> Iterator[Tensor]:
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
            used = given["src"][tuple(map(slice, given["index"].shape))]  # the rest of src goes nowhere
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
    """Returns 1 where an entry is among the k largest, or smallest, and -1 elsewhere; 0 where two
    are equal and one of them is.
    """
    k, dim = given["k"], given["dim"]
    if not 0 < k < x.shape[dim]:
        return torch.zeros_like(x)
    ordered = (x if given["largest"] else -x).topk(k + 1, dim).values
    last, next_ = ordered.narrow(dim, k - 1, 1), ordered.narrow(dim, k, 1)
    return _sign((x if given["largest"] else -x) - (last + next_) / 2)


def _sign(difference: Tensor) -> Tensor:
    return difference.sign().nan_to_num_(0.0)


def _chosen(x: Tensor, dim: Any) -> Tensor:
    """Returns which entry is the largest along some dims, or of all; 0 where two are."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    entries = x.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) if dims else x[..., None]
    if entries.shape[-1] < 2:
        return torch.zeros(entries.shape[:-1])
    top = entries.topk(2, -1)
    return torch.where(top.values[..., 0] == top.values[..., 1], 0, top.indices[..., 0] + 1)


_SIGMAS = 6
"""Standard deviations of rounding that comparisons stay clear of."""

_AT_RANDOM = 4
"""Moves with signs at random; there are two more, up and down."""

_ROUNDS = 5
"""Masking a token moves the means over its sequence, and with them other comparisons. So masking is
repeated up to this often."""


def mask_near_kinks(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> GlobalBatch:
    """Masks the tokens at which rounding could change the outcome of a comparison.

    At a kink either one-sided gradient is right, and no noise tells which of them a kernel finds.
    So the loss is run with log-probabilities moved by as much as rounding may move them. Where a
    clip or a comparison then comes out otherwise, its token, or its whole sequence, is masked.

    Returns:
        The batch with a smaller mask; the batch itself for a loss without kinks and for scenarios
        that are ties.
    """
    spec = bound.spec
    scenario = {choice.name: choice.default for choice in spec.scenarios} | problem.scenario
    if not spec.kinks or any(scenario[name] == choice for name, choice in spec.tie_scenarios.items()):
        return batch
    streams, gap = RandomStreams(problem.to_json()), _SIGMAS * _rounding_error(batch, problem, bound)
    values = bound.token_values(problem.head, batch.leaves, batch.fields)
    for round_ in range(_ROUNDS):
        moves = {
            name: gap * _signs(streams, round_, name, value.shape, batch)
            for name, value in values.differentiable.items()
        }
        near = near_kinks(batch, bound, values, moves)
        if not bool((near & batch.fields["mask"]).any()):
            break
        masked = replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] & ~near})
        batch = spec.counted(masked)
    return batch


def has_comparisons(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> bool:
    """Returns whether a comparison of the loss comes out otherwise on one trained token, or
    sequence, than on another.
    """
    values, trained = bound.token_values(problem.head, batch.leaves, batch.fields), bound.spec.trained_of(batch.known)
    for outcome in outcomes(batch, bound, values):
        of_trained = outcome[trained] if outcome.shape[:1] == trained.shape else outcome
        if bool((of_trained > 0).any() and (of_trained < 0).any()):
            return True
    return False


def _signs(streams: RandomStreams, round_: int, name: str, shape: torch.Size, batch: GlobalBatch) -> Tensor:
    """Returns ``[moves, *shape]``: up, down, and others at random.

    Log-probabilities with and without a filter move together. Logits that all move up change no
    probability, so the logit of the label moves against all others.
    """
    up = torch.ones(shape)
    if name == "logits":
        up = -up.scatter(-1, batch.fields["labels"][:, None], -1.0)
    stream = f"probe {round_} " + {"logprobs": "", "unfiltered": ""}.get(name, f"{name} ")
    return torch.stack([up, -up, *(streams.normal(f"{stream}{i}", *shape).sign() for i in range(_AT_RANDOM))])


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
    """Returns ``[tokens]`` bool: those with a choice that some move decides otherwise.

    Args:
        batch: that the loss is of.
        bound: the spec with its options.
        values: of the batch.
        moves: of the values, by name, ``[moves, tokens, ...]``.
    """
    near = torch.zeros(batch.partition.tokens, dtype=torch.bool)
    still = {name: torch.cat([torch.zeros_like(move[:1]), move]) for name, move in moves.items()}
    for outcome in _moved_outcomes(batch, bound, values, still):
        near |= tokens_of(((outcome != outcome[0]) & (outcome[0] != 0)).any(0), batch)
    return near


def _moved_outcomes(
    batch: GlobalBatch, bound: BoundSpec, values: TokenValues, moves: Mapping[str, Tensor]
) -> list[Tensor]:
    """Returns the outcomes ``[moves, ...]`` of the choices that moves can change.

    All moves are run at once. Torch may then run an operation move by move, and its outcomes are no
    longer those of one run with one dim more: in that case all of them are.
    """

    def moved(by: dict[str, Tensor]) -> Tensor:
        given = values.replace(**{name: values.given[name] + move for name, move in by.items()})
        return bound.returning(()).loss(given, batch.known)[0]

    count = len(next(iter(moves.values())))
    with torch.no_grad(), RecordChoices() as record:
        torch.vmap(moved)(dict(moves))
    mapped = [outcome for outcome in record.outcomes if outcome.shape[:1] == (count,)]
    others = [outcome for outcome in record.outcomes if outcome.shape[:1] != (count,)]
    if len(others) < count and not any(count in other.shape for other in others) and not _has_dim(count, batch, values):
        return mapped  # nothing was run move by move, and every first dim is that of the moves
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
    """Returns whether anything has so many entries that it looks as if it was run for each move."""
    sizes = {len(batch.partition.lengths), len(batch.partition.lengths) // batch.partition.group_size}
    tensors = (*batch.fields.values(), *values.given.values())
    return size in sizes or any(size in tensor.shape for tensor in tensors)


def tokens_of(changed: Tensor, batch: GlobalBatch) -> Tensor:
    """Returns the tokens that changed outcomes belong to.

    The size of a dim tells whether they are of tokens, of sequences or of groups. If two of these
    are alike they are taken as both. What is chosen for the whole batch at once, such as its
    largest ratio, masks nothing: masking could not mend it, and it is a metric as a rule.
    """
    sequence, sequences = batch.fields["sequence"], len(batch.partition.lengths)
    groups = torch.arange(sequences) // batch.partition.group_size
    belongs = (torch.arange(len(sequence)), sequence, groups[sequence])
    sizes = (len(sequence), sequences, len(groups.unique()))
    dim = next((dim for dim, size in enumerate(changed.shape) if size in sizes), None)
    if dim is None:
        return torch.zeros(len(sequence), dtype=torch.bool)
    changed = changed.movedim(dim, -1).flatten(0, -2).any(0) if changed.dim() > 1 else changed
    return torch.stack([changed[to] for to, size in zip(belongs, sizes, strict=True) if size == len(changed)]).any(0)


def outcomes(batch: GlobalBatch, bound: BoundSpec, values: TokenValues) -> list[Tensor]:
    """Returns the outcome of each choice of a loss in turn, as ``RecordChoices`` has it."""
    with torch.no_grad(), RecordChoices() as record:
        bound.returning(()).loss(values, batch.known)
    return record.outcomes
