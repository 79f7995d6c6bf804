# SPDX-License-Identifier: Apache-2.0
"""What must hold of a training step."""

from collections.abc import Sequence

import torch

from distributed_tests.wrappers.reference import reference
from distributed_tests.wrappers.step import Cell, Step
from distributed_tests.wrappers.wrappers import WRAPPERS
from lossgate.judge.explain import explain


def findings(cell: Cell, steps: Sequence[Step], dense: Sequence[Step]) -> list[str]:
    """Returns in words what is wrong with a step.

    Args:
        cell: which step it was.
        steps: what each rank found.
        dense: what each rank found in the dense step of the same cell.
    """
    return [
        *_wrong_results(cell, steps),
        *_drifted(steps),
        *_collectives(steps, dense),
        *(["a tensor of [tokens, vocab] was made"] if any(step.logits for step in steps) else []),
        *_not_sharded(cell, steps),
    ]


def _wrong_results(cell: Cell, steps: Sequence[Step]) -> list[str]:
    known = reference(cell.head, cell.way, cell.dtype, cell.microbatches, cell.empty)
    found = []
    for rank, step in enumerate(steps):
        for of_step, of_reference in ((step.gradients, known.gradients), (step.numbers, known.numbers)):
            if of_step.keys() != of_reference.keys():
                found.append(f"rank {rank}: not in both: {', '.join(sorted(of_step.keys() ^ of_reference.keys()))}")
                return found
        for comparison in known.compare(step.numbers, step.gradients):
            if not comparison.agrees:
                found.append(f"rank {rank}: {comparison.output}: {'; '.join(explain([comparison]))}")
    return found


def _drifted(steps: Sequence[Step]) -> list[str]:
    first, *others = steps
    return [
        f"{name}: ranks have different weights after the step"
        for name, weight in first.weights.items()
        if any(not torch.equal(weight, other.weights[name]) for other in others)
    ]


def _collectives(steps: Sequence[Step], dense: Sequence[Step]) -> list[str]:
    pairs = [(step.collectives, other.collectives) for step, other in zip(steps, dense, strict=True)]
    return [f"{own} collectives, and {other} with the dense head" for own, other in pairs if own != other][:1]


def _not_sharded(cell: Cell, steps: Sequence[Step]) -> list[str]:
    found = []
    for rank, (before, after, whole) in enumerate(step.held for step in steps):
        if before != after:
            found.append(f"rank {rank}: held {before} numbers of the weights before the step, and {after} after it")
        if WRAPPERS[cell.wrapper].shards and after > 0.6 * whole:
            found.append(f"rank {rank}: holds {after} of {whole} numbers of the weights")
    return found
