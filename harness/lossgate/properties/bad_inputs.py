# SPDX-License-Identifier: Apache-2.0
"""A property of bad input: a kernel refuses what it says it refuses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lossgate.cases.case import Case
from lossgate.cases.rank_call import RankCall, RankOutputs, plainly
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.registry import Checked, property
from lossgate.worlds.base import RankRaised


@property(
    "bad-inputs",
    applies=lambda candidate: bool(candidate.refuses),
    fits=lambda case: case.world.repeatable and bool(case.placed.batch.fields["mask"].any()),
    runs=3,
    remedy="raise an error, or take the kind out of refuses",
    shrinks=False,
)
def bad_inputs(case: Case) -> Checked:
    """Bad input that the candidate declares to refuse raises an error on some rank."""
    vocab, faults = case.problem.vocab, list[str]()
    if "labels" in case.candidate.refuses:
        for label in (vocab, -1):
            bad = _with_label(case.placed.batch, label)
            if _takes(lambda batch=bad: case.on_ranks(batch=batch)):
                faults.append(f"the label {label} of a trained token raises no error, with a vocabulary of {vocab}")
    if "shapes" in case.candidate.refuses and _takes(lambda: case.on_ranks(_with_short_ids)):
        faults.append("labels, or ids, that are one token too short raise no error")
    return Checked(faults=tuple(faults))


def _takes(call: Callable[[], Sequence[Any]]) -> bool:
    """Returns whether a call on all ranks raises nothing."""
    try:
        call()
    except RankRaised:
        return False
    return True


def _with_label(batch: GlobalBatch, label: int) -> GlobalBatch:
    """Returns the batch with another label of the first trained token, as the id of the next one,
    too.
    """
    trained = int(batch.fields["mask"].nonzero()[0])
    labels, ids = batch.fields["labels"].clone(), batch.fields["input_ids"].clone()
    labels[trained] = ids[trained + 1] = label  # the last token of a sequence is not trained
    return replace(batch, fields={**batch.fields, "labels": labels, "input_ids": ids})


def _with_short_ids(call: RankCall) -> RankOutputs:
    name = "labels" if "labels" in call.tensors else "input_ids"
    call.replace(**{name: call.tensors[name][..., :-1]})
    return plainly(call)
