# SPDX-License-Identifier: Apache-2.0
"""What problems say of kernels that divide a microbatch by its own counts, as those that sum a loss
and divide it by their own ``mask.sum()``.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lossgate.cases.case import Case
from lossgate.cases.oracle import Oracle
from lossgate.cases.placed_problem import PlacedProblem
from lossgate.cases.rank_parts import masks_of_share
from lossgate.cases.reference import Part
from lossgate.declaration.candidate import Candidate
from lossgate.problems.problem import Problem
from lossgate.properties.registry import OwnMistake
from lossgate.specs.outputs import LOSS

Split = Callable[[Case], Problem]
"""Returns a problem with several dp ranks in place of one: a rank for each of its microbatches."""
_UNCHANGED = 1e-9
"""Relative difference up to which two results in float64 are equal on paper."""


def own_counts(split: Split, at_once: int, candidate: Candidate) -> list[OwnMistake]:
    """Returns the mistakes of kernels that count for themselves what they divide by.

    Args:
        split: how a batch is cut into microbatches.
        at_once: how many microbatches each rank has.
        candidate: whose loss is given counts.
    """
    return [
        OwnMistake(
            sentence=f"each of {at_once} microbatches counts {name} for itself, and they are {put_together}",
            matters=lambda case, name=name: case.bound.reads_count(name),
            can_show=partial(_differs, split, at_once, name),
            shows=partial(_is_rejected, split, at_once, name, weight),
        )
        for name in candidate.spec.names_of_counts
        for put_together, weight in (("added up", 1.0), ("averaged", 1 / at_once))
    ]


def _differs(split: Split, at_once: int, name: str, case: Case) -> bool:
    """Returns whether the microbatches differ in a count, and none has a count of 0.

    A microbatch without trained tokens leaves to the other one a count that is the whole. Of
    microbatches with equal counts the mean is right.
    """
    numbers = [int(counts[name]) for _, counts in _microbatches(split, at_once, case)]
    return 0 not in numbers and len(set(numbers)) == len(numbers)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_UNCHANGED, atol=0.0, equal_nan=True)


def _microbatches(split: Split, at_once: int, case: Case) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Returns what all ranks together have in each microbatch: masks that are false elsewhere, and
    the counts of it.
    """
    placed, known = PlacedProblem(case.bound, split(case)), case.bound.batch.known
    partition, held = placed.partition, placed.partition.real_token_shards
    cp, found = partition.layout.cp, list[tuple[dict[str, Tensor], dict[str, Tensor]]]()
    for number in range(at_once):
        ranks = range(number, partition.layout.dp, at_once)
        sequences = torch.tensor([own for rank in ranks for own in partition.sequences(rank)], dtype=torch.long)
        tokens = torch.cat([shard for rank in ranks for shard in held[rank * cp : (rank + 1) * cp]])
        masks = masks_of_share(placed, (sequences, tokens))
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
    dtypes = {
        output: case.result.dtypes[output] for output in (LOSS, *oracle.gradients) if output in case.result.dtypes
    }
    changed = {output: dtype for output, dtype in dtypes.items() if not _equal(wrong[output], oracle.reference[output])}
    return bool(changed) and all(bool(oracle.rejects(o, wrong[o][None], dtype)) for o, dtype in changed.items())
