# SPDX-License-Identifier: Apache-2.0
"""Properties of problems at the edge: agreement, on batches that are rarely drawn.

Each has a reference and noise of its own.
"""

from dataclasses import replace
from functools import partial
from itertools import chain
from math import isnan

import torch

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.placement import takes_idle_ranks
from lossgate.cases.untrained import without_trained
from lossgate.declaration.candidate import Candidate
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.mended import with_something_trained
from lossgate.properties.registry import Checked, OwnMistake, called, property
from lossgate.specs.outputs import LOSS
from lossgate.specs.spec import Spec


def _divisions_by_0(candidate: Candidate) -> list[OwnMistake]:
    if candidate.conventions.untrained != "zero":
        return []
    return [
        OwnMistake(sentence=f"{name} divides as it is, though it may be 0", matters=partial(_is_taken_for_1, name))
        for name in candidate.spec.names_of_counts
    ]


def _is_taken_for_1(name: str, case: Case) -> bool:
    """Returns whether the reference treats a count as 1 if nothing is trained and the count is 0.

    If so, a kernel that divides by the count as it is computes 0 / 0. A loss that adds an epsilon
    to the count, or that does not divide by it, gives False.
    """
    bound, emptied = case.bound, _emptied(case)
    if case.candidate.spec.reference is None or int(case.candidate.spec.counts(emptied.known)[name]):
        return False
    given = bound.batch.fields[name]
    of_0, of_1, of_2 = (bound.loss_with({name: torch.full_like(given, count)})[0] for count in range(3))
    return torch.equal(of_0, of_1) and not torch.equal(of_1, of_2)


@property(
    "nothing-trained",
    mistakes=_divisions_by_0,
    applies=lambda candidate: _says_what_comes_of_nothing(candidate),
    relaxed_by={"untrained": ("nan", "error", "never")},
    fits=lambda case: not bool(case.candidate.spec.trained_of(_emptied(case).known).any()),
    remedy="divide by a count that is clamped to 1, and give minima and maxima over nothing a value",
    remedies={
        "raises": "give minima, maxima and loops over nothing a value",
        "not finite": "divide by a count that is clamped to 1",
    },
    mended=with_something_trained,
    may_explain=("few-tokens", "microbatches", "idle-rank"),
)
def nothing_trained(case: Case) -> Checked:
    """With nothing trained the loss is what the reference says, and gradients are exactly 0.

    If it is declared to be NaN, or to raise an error, then it is, or does.
    """
    varied = case.varied("nothing trained", lambda batch: _without(case.candidate.spec, batch))
    untrained = case.candidate.conventions.untrained
    if untrained == "error":
        return Checked(faults=() if varied.raises else ("with nothing trained it raises no error",))
    if untrained == "nan":
        losses = [float(loss) for outputs in varied.ranks if (loss := outputs.get(LOSS)) is not None]
        other = next((loss for loss in losses if not isnan(loss)), None)
        return Checked(faults=() if other is None else (f"with nothing trained the loss is {other:.6g}, not NaN",))
    return Checked(comparisons=varied.comparisons)


def _says_what_comes_of_nothing(candidate: Candidate) -> bool:
    untrained = candidate.conventions.untrained
    return untrained in ("zero", "error") or (untrained == "nan" and "loss" in candidate.spec.outputs)


def _emptied(case: Case) -> GlobalBatch:
    return _without(case.candidate.spec, case.bound.batch)


def _without(spec: Spec, batch: GlobalBatch) -> GlobalBatch:
    changed = without_trained(spec, batch.known)
    return replace(batch, fields={name: changed[name] for name in batch.fields})


@property(
    "few-tokens",
    fits=lambda case: not case.candidate.conventions.calls_need_training or case.problem.layout.cp == 1,
    runs=2,
    remedy="let loops over no tokens, and sums over one, give tensors of the right shape",
    remedies={"not finite": "look for 0 / 0: the variance of one number is, and a mean over no tokens of a rank"},
)
def few_tokens(case: Case) -> Checked:
    """Sequences of one token, and of two, give what the reference says.

    Of one token nothing is trained.
    """
    lengths = {1: "in sequences of one token", 2: "in sequences of two tokens"}
    if case.candidate.conventions.untrained != "zero":
        del lengths[1]
    found = (called(words, _of_length(case, length).comparisons) for length, words in lengths.items())
    return Checked(comparisons=tuple(chain.from_iterable(found)))


def _of_length(case: Case, length: int) -> Case:
    problem, count = case.problem, case.problem.group_size
    if not takes_idle_ranks(case.candidate) or case.candidate.conventions.calls_need_training:
        count *= problem.layout.dp
    few = replace(
        problem,
        lengths=(length,) * count,
        masks=("all",) * count,
        pad_to_multiple=1,
        forced_labels=(),
        outliers=(),
        label_boost=0.0,
    )
    name = f"{count} sequences of {length}, vocabulary {few.vocab}"
    bound = case.bound.derived(name, lambda: BoundProblem(case.candidate.spec, few))
    return Case(case.candidate, few, case.world, bound)
