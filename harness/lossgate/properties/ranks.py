# SPDX-License-Identifier: Apache-2.0
"""Properties of how a batch is split: microbatches, padding, reduction orders and idle ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lossgate.cases.case import Case
from lossgate.cases.microbatches import AT_ONCE, in_microbatches, split_in_two
from lossgate.cases.oracle import Oracle
from lossgate.cases.placement import ORDERS, PlacedProblem, is_given, takes_idle_ranks
from lossgate.cases.rank_parts import masks_of_share
from lossgate.cases.reference import Part
from lossgate.declaration.candidate import Candidate
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem
from lossgate.properties.registry import Checked, OwnMistake, property
from lossgate.properties.would_show import all_of, metrics, needing, trained_tokens, values
from lossgate.specs.outputs import LOSS, gradient_output

Split = Callable[[Case], Problem]
"""Returns a problem with several dp ranks in place of one: a rank for each of its microbatches."""
_UNCHANGED = 1e-9
"""Relative difference up to which two results in float64 are equal on paper."""


def own_counts(split: Split, at_once: int, candidate: Candidate) -> list[OwnMistake]:
    """Returns the mistakes of kernels that divide by a count of their own, such as ``mask.sum()``.

    Args:
        split: how a batch is cut into microbatches.
        at_once: how many microbatches each rank has.
        candidate: a candidate. Its spec names the counts that kernels are given.
    """
    weights = {"added up": 1.0, "averaged": 1 / at_once}
    if candidate.conventions.counts == "own":
        return [
            OwnMistake(
                sentence=f"each of {at_once} microbatches divides by {name} as it is given, and not by its own",
                matters=partial(_reads, name),
                can_show=partial(_differs, split, at_once, name),
            )
            for name in candidate.spec.names_of_counts
        ]
    return [
        OwnMistake(
            sentence=f"each of {at_once} microbatches counts {name} for itself, and they are {put_together}",
            matters=partial(_reads, name),
            can_show=partial(_differs, split, at_once, name),
            shows=partial(_is_rejected, split, at_once, name, weight),
        )
        for name in candidate.spec.names_of_counts
        for put_together, weight in weights.items()
    ]


def _reads(name: str, case: Case) -> bool:
    return case.bound.reads_count(name)


def _differs(split: Split, at_once: int, name: str, case: Case) -> bool:
    """Returns whether the counts of the microbatches all differ, and none is 0.

    If one microbatch has a count of 0, the other has the count of the whole batch, which is right.
    If the counts are equal, the mean over microbatches is right.
    """
    numbers = [int(counts[name]) for _, counts in _microbatches(split, at_once, case)]
    return 0 not in numbers and len(set(numbers)) == len(numbers)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_UNCHANGED, atol=0.0, equal_nan=True)


def _microbatches(split: Split, at_once: int, case: Case) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Returns the masks and the counts of each microbatch, over all ranks. The masks are false
    outside of it.
    """
    placed, known = PlacedProblem(case.bound, split(case)), case.bound.batch.known
    partition, cp = placed.partition, placed.partition.layout.cp
    found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for number in range(at_once):
        dp_ranks = range(number, partition.layout.dp, at_once)
        sequences = [sequence for dp in dp_ranks for sequence in partition.sequences(dp)]
        shards = [shard for dp in dp_ranks for shard in partition.real_token_shards[dp * cp : (dp + 1) * cp]]
        masks = masks_of_share(case.bound.batch, (torch.tensor(sequences, dtype=torch.long), torch.cat(shards)))
        found.append((masks, case.candidate.spec.counts({**known, **masks})))
    return found


def _is_rejected(split: Split, at_once: int, name: str, weight: float, case: Case) -> bool:
    """Returns whether the judge would reject the loss of a kernel with the mistake, and each
    gradient that it changes.
    """
    microbatches = _microbatches(split, at_once, case)
    parts: list[Part] = [(weight, {**masks, name: counts[name]}) for masks, counts in microbatches]
    wrong = case.bound.dense.in_parts(case.bound.bound_spec.returning(()), parts)
    oracle = Oracle(case.candidate, PlacedProblem(case.bound, split(case)), case.result.outputs)
    dtypes = case.result.dtypes
    returned = [output for output in (LOSS, *oracle.gradients) if output in dtypes]
    changed = [output for output in returned if not _equal(wrong[output], oracle.reference[output])]
    return bool(changed) and all(oracle.rejects(output, wrong[output][None], dtypes[output]) for output in changed)


def _split(case: Case) -> Problem:
    """Returns the problem with a dp rank for each microbatch. A microbatch may be empty: kernels
    that are declared for several ranks must accept that, unless they exclude it.
    """
    return split_in_two(case.problem)


def _mistakes(candidate: Candidate) -> list[OwnMistake]:
    nothing_held = OwnMistake(
        sentence="a microbatch without a token fails",
        matters=lambda case: _takes_idle(case.candidate),
        can_show=_leaves_one_empty,
    )
    of_metrics = metrics("counts for itself in each microbatch", can_show=_any_count_differs)(candidate)
    return [nothing_held, *own_counts(_split, AT_ONCE, candidate), *of_metrics]


def _any_count_differs(case: Case) -> bool:
    return any(_differs(_split, AT_ONCE, name, case) for name in case.candidate.spec.names_of_counts)


def _leaves_one_empty(case: Case) -> bool:
    return not all(map(len, _split(case).partition.token_shards.values()))


@property(
    "microbatches",
    applies=lambda candidate: _adds_up(candidate),
    relaxed_by={"counts": ("own",)},
    fits=lambda case: (
        (_takes_idle(case.candidate) or not _leaves_one_empty(case))
        and is_given(case.candidate, case.bound, _split(case).partition)
    ),
    runs=2,
    mistakes=_mistakes,
    remedy="divide by the counts that are given, which are those of the whole batch; keep nothing between calls",
    remedies={
        "raises": "let a microbatch have no token: minima, indices and loops over nothing may raise an error",
        "not finite": "divide by the counts that are given, clamped to 1: a microbatch may train no token",
    },
)
def microbatches(case: Case) -> Checked:
    """Losses, gradients and metrics of the microbatches of a batch add up to those of the batch."""
    in_turn = in_microbatches(case, _split(case), case.bound)
    called = f"in {AT_ONCE} microbatches, each as a rank of dp"
    return Checked(comparisons=tuple(replace(compared, called=called) for compared in in_turn.comparisons))


def _takes_idle(candidate: Candidate) -> bool:
    return "dp" in candidate.axes and takes_idle_ranks(candidate)


def _adds_up(candidate: Candidate) -> bool:
    """Returns whether the caller combines the outputs of the dp ranks by a sum or an extremum.

    Outputs per token or per sequence do not count.
    """
    outputs = [gradient_output(name, dims) for name, dims in candidate.starts_at.leaves.items()]
    outputs += [candidate.spec.output(name) for name in (*candidate.spec.outputs, *candidate.spec.metrics)]
    split = [output for output in outputs if "token" not in output.dims and "sequence" not in output.dims]
    return all(candidate.placements(output).get("dp") in ("sum", "min", "max") for output in split)


def _padded_otherwise(problem: Problem) -> Problem:
    return replace(problem, pad_to_multiple=problem.pad_to_multiple + 4)


def _starts_of_another_padding(candidate: Candidate) -> list[OwnMistake]:
    sentence = "sequences start where they did with another padding"
    return [OwnMistake(sentence=sentence, matters=lambda case: True, can_show=_loses_a_token, needed=False)]


def _loses_a_token(case: Case) -> bool:
    """Returns whether a trained token lies in another sequence, with the padding that the property
    gives and the starts of the problem's own.
    """
    own, other = case.placed.partition, _padded_otherwise(case.problem).partition
    found = torch.bucketize(other.real_tokens, torch.tensor(own.starts[1:-1], dtype=torch.long), right=True)
    return bool((found != case.bound.batch.fields["sequence"])[trained_tokens(case)].any())


@property(
    "other-padding",
    mistakes=all_of(values("hangs on the padding"), _starts_of_another_padding),
    applies=lambda candidate: candidate.starts_at.gives == "token",
    remedy="let padding take no part, wherever the chunks of a loop begin and end",
)
def other_padding(case: Case) -> Checked:
    """Sequences that are padded to another multiple give the same results."""
    padded = _padded_otherwise(case.problem)
    return Checked(comparisons=Case(case.candidate, padded, case.world, case.bound).comparisons)


@property(
    "reduction-order",
    fits=lambda case: case.world.repeatable and case.problem.layout.ranks > 2,  # two numbers have one sum
    remedy="add up in float32, or finer, before rounding",
    of_ranks=True,
)
def reduction_order(case: Case) -> Checked:
    """Collectives that add up in another order change no more than rounding may."""
    own = ORDERS.index(case.problem.reduction_order)
    other = ORDERS[own - 1]  # for the first order it is the last
    return Checked(comparisons=case.judged(case.on_ranks(order=other)))


def _rank_to_idle(case: Case) -> int:
    return case.problem.seed % len(case.placed.partition.real_token_shards)


def _idles(first: bool) -> Callable[[Case], bool]:
    """Returns whether the first rank, or another, has trained tokens to lose, while others keep
    theirs.
    """

    def check(case: Case) -> bool:
        rank, shards = _rank_to_idle(case), case.placed.partition.real_token_shards
        trained = trained_tokens(case)
        of_ranks = [bool(trained[shard].any()) for shard in shards]
        return (rank == 0) == first and of_ranks[rank] and any(of_ranks[:rank] + of_ranks[rank + 1 :])

    return check


@property(
    "idle-rank",
    mistakes=all_of(
        needing("the first rank must train something", _idles(first=True)),
        needing("every rank but the first must train something", _idles(first=False)),
    ),
    applies=lambda candidate: (
        ("dp" in candidate.axes or "cp" in candidate.axes) and not candidate.conventions.calls_need_training
    ),
    relaxed_by={"untrained": ("never",)},
    fits=lambda case: case.problem.layout.dp * case.problem.layout.cp > 1 and _leaves_training(case),
    remedy="take part in every collective, with zeros, also where a rank has nothing to train",
    remedies={
        "raises": "let a rank have nothing to train: minima, indices and loops over nothing may raise an error",
        "not finite": "divide by the counts that are given, clamped to 1: a rank may train no token",
    },
    of_ranks=True,
)
def idle_rank(case: Case) -> Checked:
    """A rank with nothing to train does not disturb the others."""
    partition = case.placed.partition
    rank = _rank_to_idle(case)
    name = f"idle rank {rank} of {partition.layout} {partition.padded_lengths}"
    return Checked(comparisons=case.varied(name, lambda batch: _idle(batch, partition, rank)).comparisons)


def _leaves_training(case: Case) -> bool:
    """Returns whether other ranks train something, if a batch without that is never given."""
    if case.candidate.conventions.untrained == "zero":
        return True
    rank, trained = _rank_to_idle(case), trained_tokens(case)
    shards = case.placed.partition.real_token_shards
    return any(bool(trained[shard].any()) for number, shard in enumerate(shards) if number != rank)


def _idle(batch: GlobalBatch, partition: Partition, rank: int) -> GlobalBatch:
    """Returns a batch in which the tokens of a rank are masked."""
    held = torch.zeros_like(batch.fields["mask"]).index_fill(0, partition.real_token_shards[rank], True)
    return replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] & ~held})
