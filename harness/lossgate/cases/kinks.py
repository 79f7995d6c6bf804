# SPDX-License-Identifier: Apache-2.0
"""Masks tokens near a kink, such as the edge of a clip, where rounding decides the gradient.

The loss is run under a dispatch mode that records the outcome of what chooses by size: comparisons,
clamps, ``relu`` and its kin, absolute values, minima and maxima, ``topk``. Exact ties, such as a
ratio of exactly 1 in on-policy training, are no kink: both sides give the same value there.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from lossgate.cases.choices import RecordChoices
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.token_chunks import chunks
from lossgate.specs.token_values import TokenValues

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
