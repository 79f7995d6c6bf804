# SPDX-License-Identifier: Apache-2.0
"""Properties of problems at the edge: they are agreement on a batch that is rarely drawn.

Each has a reference and noise of its own.
"""

from dataclasses import replace

import torch

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.untrained import without_trained
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.registry import Checked, property
from lossgate.specs.logit_filter import filters
from lossgate.specs.spec import Spec

_NATS = 120.0
"""exp of it is no number in float32."""


@property(
    "nothing-trained",
    fits=lambda case: not bool(case.candidate.spec.trained_of(_emptied(case).known).any()),
    remedy="divide by a count that is clamped to 1, and give minima and maxima over nothing a value",
)
def nothing_trained(case: Case) -> Checked:
    """With nothing trained the loss is what the reference says, and gradients are exactly 0."""
    varied = case.varied("nothing trained", lambda batch: _without(case.candidate.spec, batch))
    return Checked(comparisons=varied.comparisons)


def _emptied(case: Case) -> GlobalBatch:
    return _without(case.candidate.spec, case.bound.batch)


def _without(spec: Spec, batch: GlobalBatch) -> GlobalBatch:
    changed = without_trained(spec, batch.known)
    return replace(batch, fields={name: changed[name] for name in batch.fields})


@property(
    "extreme-logits",
    applies=lambda candidate: candidate.starts_at.has_logits,
    fits=lambda case: (
        case.bound.bound_spec.softcap is None
        and not {"logits", "bias"}.isdisjoint(case.bound.batch.leaves)
        and not filters(case.bound.bound_spec.options)
    ),
    remedy="subtract each row's maximum before exp, over all of the vocabulary",
)
def extreme_logits(case: Case) -> Checked:
    """Logits that are 120 nats higher, or lower, give what the reference says."""
    return Checked(comparisons=case.varied("extreme logits", _moved).comparisons)


def _moved(batch: GlobalBatch) -> GlobalBatch:
    """Returns a batch with the logits of every other row up by some nats, and those of others down;
    with a bias, all up.
    """
    name = "logits" if "logits" in batch.leaves else "bias"
    leaf = batch.leaves[name]
    sign = 1 - 2 * (torch.arange(len(leaf))[:, None] % 2) if name == "logits" else 1
    moved = (leaf + sign * _NATS).to(batch.leaf_dtype).double()
    return replace(batch, leaves={**batch.leaves, name: moved})


@property(
    "few-tokens",
    runs=2,
    remedy="let loops over no tokens, and sums over one, give tensors of the right shape",
)
def few_tokens(case: Case) -> Checked:
    """Sequences of one token, and of two, give what the reference says."""
    return Checked(comparisons=tuple(c for length in (1, 2) for c in _of_length(case, length).comparisons))


def _of_length(case: Case, length: int) -> Case:
    problem, group = case.problem, case.problem.group_size
    few = replace(
        problem, lengths=(length,) * group, masks=("all",) * group, forced_labels=(), outliers=(), label_boost=0.0
    )
    name = f"sequences of {length}, vocabulary {few.vocab}"
    bound = case.bound.derived(name, lambda: BoundProblem(case.candidate.spec, few))
    return Case(case.candidate, few, case.world, bound)
