# SPDX-License-Identifier: Apache-2.0
"""Properties of logits at the edge of what a softmax can do.

Each has a reference and noise of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.materialize import lay_out
from lossgate.cases.oracle import Oracle
from lossgate.cases.placement import PlacedProblem
from lossgate.cases.untrained import untrained
from lossgate.judge.comparison import Comparison
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.properties.registry import Checked, called, property
from lossgate.properties.would_show import all_of, needing, trained_tokens
from lossgate.specs.logit_filter import filters
from lossgate.specs.outputs import Output

_NATS = 120.0
"""In float32 exp(120) overflows, and exp(-120) is 0."""
_ROOT = 32.0
_FAR = -_ROOT * _ROOT
"""The logit of a hopeless label. Every dtype holds it and ``_ROOT`` exactly."""
_LOWEST = -1e4
"""A logit that counts for nothing, and that every dtype holds nearly."""
_OF_LABELS = frozenset(("logprobs", "logsumexp", "unfiltered"))
"""The values of each token that a loss may use if logits are -inf. For an entropy, torch's own
operations multiply 0 by -inf."""
_OF_SOFTMAX = _OF_LABELS | {"entropy"}
"""The values that a logit changes by no more than its probability, if that is nearly 0."""


def _trains_from(row: int) -> Callable[[Case], bool]:
    """Returns whether every other row from this one on has a trained token."""
    return lambda case: bool(trained_tokens(case)[row::2].any())


def _has_lower_rows(case: Case) -> bool:
    return "logits" in case.bound.batch.leaves


@property(
    "extreme-logits",
    mistakes=all_of(
        needing("exp overflows", _trains_from(0)), needing("exp underflows", _trains_from(1), _has_lower_rows)
    ),
    applies=lambda candidate: candidate.starts_at.has_logits,
    fits=lambda case: _has_plain_logits(case) and not {"logits", "bias"}.isdisjoint(case.bound.batch.leaves),
    remedy="subtract each row's maximum before exp, over all of the vocabulary",
)
def extreme_logits(case: Case) -> Checked:
    """Logits that are 120 nats higher, or lower, give what the reference says."""
    return Checked(comparisons=case.varied("extreme logits", _moved).comparisons)


def _moved(batch: GlobalBatch) -> GlobalBatch:
    """Returns a batch whose logits are higher in every other row and lower in the rows between. If
    the leaf to change is the bias, all logits are higher.
    """
    name = "logits" if "logits" in batch.leaves else "bias"
    leaf = batch.leaves[name]
    rows = torch.arange(len(leaf))[:, None]
    sign = 1 - 2 * (rows % 2) if name == "logits" else 1
    moved = (leaf + sign * _NATS).to(batch.leaf_dtype).double()
    return replace(batch, leaves={**batch.leaves, name: moved})


@property(
    "suppressed-ids",
    mistakes=all_of(
        needing("the first logits of a row must not all be -inf", lambda case: not _suppressed_ids(case.problem).start),
        needing(
            "the last logits of a row must not all be -inf", lambda case: bool(_suppressed_ids(case.problem).start)
        ),
    ),
    applies=lambda candidate: candidate.head == "logits" and candidate.spec.gathered_ids is None,
    fits=lambda case: _has_plain_logits(case) and case.problem.vocab > 1 and _uses_only(_OF_SOFTMAX, _suppressed(case)),
    relaxed_by={"minus_inf": ("never",)},
    runs=2,
    remedy="select, and do not multiply by 0; give exp(-inf - -inf) a value, where all of a tile or shard is -inf",
)
def suppressed_ids(case: Case) -> Checked:
    """Logits of -1e4, or -inf, for ids that are no label give what the reference says.

    Entropies are asked for with -1e4 alone.
    """
    bound = _suppressed(case)
    found = list[Comparison]()
    asked = [(_LOWEST, "-1e4", _OF_SOFTMAX)]
    if case.candidate.conventions.minus_inf == "taken":
        asked.append((-torch.inf, "-inf", _OF_LABELS))
    for low, words, values in asked:
        if _uses_only(values, bound):
            compared = _compared_with(low, bound, case)
            robust = (one for one in compared if values.issuperset(bound.spec.uses) or _is_robust(one.output))
            found += called(f"with logits of {words}", robust)
    return Checked(comparisons=tuple(found))


def _compared_with(low: float, bound: BoundProblem, case: Case) -> Iterator[Comparison]:
    """Yields the comparisons of a call in which the logits of the suppressed ids have this value.

    Args:
        low: the logit.
        bound: the problem with suppressed ids.
        case: the case of the problem itself.
    """
    batch = _with_low_logits(bound.batch, _suppressed_ids(case.problem), low)
    result = case.whole(case.on_ranks(batch=lay_out(batch, case.problem)))
    oracle = Oracle(case.candidate, PlacedProblem(bound, case.problem), case.result.outputs)
    return case.compare(result, oracle.gradients, oracle)


def _suppressed(case: Case) -> BoundProblem:
    """Returns the problem without labels in one half of the vocabulary. The logits there are so low
    that they count for nothing.
    """
    low_ids = _suppressed_ids(case.problem)

    def change(batch: GlobalBatch) -> GlobalBatch:
        size = float(batch.leaves["logits"].abs().max())
        low = -(2 * size + _NATS * max(case.bound.bound_spec.temperature, 1.0))
        return _without_ids(_with_low_logits(batch, low_ids, low), low_ids)

    return case.bound.redrawn(f"suppressed ids {low_ids}", change)


def _suppressed_ids(problem: Problem) -> range:
    """Returns the first half of the vocabulary for odd seeds, and the second for even seeds. If the
    vocabulary is split over ranks, these are the first and the last shard.
    """
    vocab, shards = problem.vocab, [one for one in problem.partition.vocab_shards if one.start < one.end]
    ends = (shards[0].end, shards[-1].start) if len(shards) > 1 else (vocab // 2, vocab // 2)
    return range(ends[0]) if problem.seed % 2 else range(ends[1], vocab)


def _with_low_logits(batch: GlobalBatch, ids: range, low: float) -> GlobalBatch:
    """Returns the batch with a number in place of all logits of some ids."""
    logits = batch.leaves["logits"].clone()
    logits[:, ids.start : ids.stop] = torch.tensor(low, dtype=batch.leaf_dtype).double()
    return replace(batch, leaves={**batch.leaves, "logits": logits})


def _without_ids(batch: GlobalBatch, away: range) -> GlobalBatch:
    """Returns the batch with ids at one end of the vocabulary replaced by others."""

    def moved(ids: Tensor) -> Tensor:
        others = batch.partition.vocab - len(away)
        outside = away.stop + ids % others if away.start == 0 else ids % others
        return torch.where((ids >= away.start) & (ids < away.stop), outside, ids)

    ids = {name: moved(batch.fields[name]) for name in ("input_ids", "labels")}
    return replace(batch, fields={**batch.fields, **ids})


def _uses_only(values: frozenset[str], bound: BoundProblem) -> bool:
    """Returns whether something is trained, and the loss has gradients only to these values."""
    trained = bool(bound.spec.trained_of(bound.batch.known).any())
    return trained and values.issuperset(bound.dense.loss_stage(bound.bound_spec).upstream)


def _is_robust(output: Output) -> bool:
    """Returns whether an output is no metric, which may be of the logits themselves."""
    return output.kind == "gradient" or output.name in ("loss", "logprobs")


@property(
    "hopeless-labels",
    applies=lambda candidate: candidate.starts_at.has_logits and candidate.spec.gathered_ids is None,
    fits=lambda case: _has_plain_logits(case) and case.problem.vocab > 1 and _trains_hopeless_labels(case),
    remedy="compute logit - logsumexp: the log of a probability that is 0 is -inf, and adding a little to it is wrong",
)
def hopeless_labels(case: Case) -> Checked:
    """Labels whose probability is 0 in float32 give what the reference says."""
    return Checked(comparisons=Case(case.candidate, case.problem, case.world, _hopeless(case)).comparisons)


def _trains_hopeless_labels(case: Case) -> bool:
    """Returns whether a token with a hopeless label is trained. Every other token has one."""
    trained = ~untrained(case.candidate.spec, _hopeless(case).batch.known)["token"]
    return bool(trained[::2].any())


def _hopeless(case: Case) -> BoundProblem:
    """Returns the problem with all labels in the second half of the vocabulary. In every other row
    their logits are far below the others.
    """

    def change(batch: GlobalBatch) -> GlobalBatch:
        moved = _without_ids(batch, range(batch.partition.vocab // 2))
        return replace(moved, leaves={**moved.leaves, **_far_below(moved)})

    return case.bound.redrawn("hopeless labels", change)


def _far_below(batch: GlobalBatch) -> dict[str, Tensor]:
    """Returns leaves that give the ids of all labels logits far below the others, in every other
    row.

    Only those ids: a column that were the same for half of a large vocabulary would make the
    gradient of a row the sum of thousands of terms of one sign. Such a sum rounds the same way
    again and again, in torch's own product, too.
    """
    ids = batch.fields["labels"].unique()
    ids = ids[(ids >= 0) & (ids < batch.partition.vocab)]
    if "logits" in batch.leaves:
        logits = batch.leaves["logits"].clone()
        logits[::2, ids] = _FAR
        return {"logits": logits}
    hidden, weight = batch.leaves["hidden"].clone(), batch.leaves["weight"].clone()
    hidden[:, 0] = 0.0
    hidden[::2, 0] = _ROOT
    weight[:, 0] = 0.0
    weight[ids, 0] = -_ROOT
    return {"hidden": hidden, "weight": weight}


def _has_plain_logits(case: Case) -> bool:
    """Returns whether the softmax gets the logits as they are, apart from the temperature."""
    return case.bound.bound_spec.softcap is None and not filters(case.bound.bound_spec.options)
