# SPDX-License-Identifier: Apache-2.0
"""Properties of logits at the edge of what a softmax can do.

Each has a reference and noise of its own.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.materialize import lay_out
from lossgate.cases.oracle import Oracle
from lossgate.cases.placed_problem import PlacedProblem
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.registry import Checked, property
from lossgate.specs.logit_filter import filters
from lossgate.specs.outputs import Output

_NATS = 120.0
"""exp of it is no number in float32, and exp of minus it is 0."""
_ROOT = 16.0
_FAR = -_ROOT * _ROOT
"""The logit of an id that is hopeless. Every dtype holds it, and its root, exactly."""
_OF_LABELS = frozenset(("logprobs", "logsumexp", "unfiltered"))
"""What a loss may use of each token where logits are -inf. In an entropy, torch's own operations
multiply 0 by -inf."""


@property(
    "extreme-logits",
    applies=lambda candidate: candidate.starts_at.has_logits,
    fits=lambda case: _has_plain_logits(case) and not {"logits", "bias"}.isdisjoint(case.bound.batch.leaves),
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
    "suppressed-ids",
    applies=lambda candidate: candidate.head == "logits" and candidate.spec.gathered_ids is None,
    fits=lambda case: _has_plain_logits(case) and case.problem.vocab > 1 and _is_of_labels(_suppressed(case)),
    remedy="select, and do not multiply by 0; give exp(-inf - -inf) a value, where all of a tile or shard is -inf",
)
def suppressed_ids(case: Case) -> Checked:
    """Logits of -inf, of ids that are no label, give what the reference says."""
    bound, problem = _suppressed(case), case.problem
    result = case.whole(case.on_ranks(batch=lay_out(_with_low_logits(bound.batch, -torch.inf), problem)))
    oracle = Oracle(case.candidate, PlacedProblem(bound, problem), case.result.outputs)
    compared = case.compare(result, oracle.gradients, oracle)
    return Checked(comparisons=tuple(one for one in compared if _is_robust(one.output, bound)))


def _suppressed(case: Case) -> BoundProblem:
    """Returns the problem without labels in the first half of the vocabulary, whose logits are so
    low that they count for nothing.
    """

    def change(batch: GlobalBatch) -> GlobalBatch:
        size = float(batch.leaves["logits"].abs().max())
        low = -(2 * size + _NATS * max(case.bound.bound_spec.temperature, 1.0))
        return _with_labels_above(_with_low_logits(batch, low))

    return case.bound.redrawn("suppressed ids", change)


def _with_low_logits(batch: GlobalBatch, low: float) -> GlobalBatch:
    """Returns the batch with a number in place of all logits of the first half of the
    vocabulary.
    """
    logits = batch.leaves["logits"].clone()
    logits[:, : _half(batch)] = torch.tensor(low, dtype=batch.leaf_dtype).double()
    return replace(batch, leaves={**batch.leaves, "logits": logits})


def _half(batch: GlobalBatch) -> int:
    return batch.partition.vocab // 2


def _with_labels_above(batch: GlobalBatch) -> GlobalBatch:
    """Returns the batch with ids in the second half of the vocabulary only."""
    half = _half(batch)
    ids = {name: torch.where((own := batch.fields[name]) < half, own + half, own) for name in ("input_ids", "labels")}
    return replace(batch, fields={**batch.fields, **ids})


def _is_of_labels(bound: BoundProblem) -> bool:
    """Returns whether something is trained, and gradients come from labels alone."""
    trained = bool(bound.spec.trained_of(bound.batch.known).any())
    return trained and _OF_LABELS.issuperset(bound.dense.loss_stage(bound.bound_spec).upstream)


def _is_robust(output: Output, bound: BoundProblem) -> bool:
    """Returns whether nothing but labels is needed for an output."""
    return _OF_LABELS.issuperset(bound.spec.uses) or output.kind == "gradient" or output.name in ("loss", "logprobs")


@property(
    "hopeless-labels",
    applies=lambda candidate: candidate.starts_at.has_logits,
    fits=lambda case: (
        _has_plain_logits(case)
        and case.problem.vocab > 1
        and not case.problem.outliers
        and case.candidate.spec.gathered_ids is None
        and bool(case.candidate.spec.trained_of(_hopeless(case).batch.known).any())
    ),
    remedy="compute logit - logsumexp: the log of a probability that is 0 is -inf, and adding a little to it is wrong",
)
def hopeless_labels(case: Case) -> Checked:
    """Labels some hundred nats below other ids give what the reference says."""
    return Checked(comparisons=Case(case.candidate, case.problem, case.world, _hopeless(case)).comparisons)


def _hopeless(case: Case) -> BoundProblem:
    """Returns the problem with labels in the second half of the vocabulary, whose logits are far
    below those of the first half in every other row.
    """

    def change(batch: GlobalBatch) -> GlobalBatch:
        return _with_labels_above(replace(batch, leaves={**batch.leaves, **_far_below(batch)}))

    return case.bound.redrawn("hopeless labels", change)


def _far_below(batch: GlobalBatch) -> dict[str, Tensor]:
    """Returns leaves that give each id of the second half a logit far below, in every other row."""
    half = _half(batch)
    if "logits" in batch.leaves:
        logits = batch.leaves["logits"].clone()
        logits[::2, half:] = _FAR
        return {"logits": logits}
    hidden, weight = batch.leaves["hidden"].clone(), batch.leaves["weight"].clone()
    hidden[:, 0] = 0.0
    hidden[::2, 0] = _ROOT
    weight[:half, 0], weight[half:, 0] = 0.0, -_ROOT
    return {"hidden": hidden, "weight": weight}


def _has_plain_logits(case: Case) -> bool:
    """Returns whether logits enter the softmax as they are, but for the temperature."""
    return case.bound.bound_spec.softcap is None and not filters(case.bound.bound_spec.options)
