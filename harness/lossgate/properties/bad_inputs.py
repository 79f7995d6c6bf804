# SPDX-License-Identifier: Apache-2.0
"""A property of bad input: a kernel refuses what it says it refuses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lossgate.cases.case import Case
from lossgate.cases.rank_call import RankCall, RankOutputs, plainly
from lossgate.cases.untrained import untrained
from lossgate.errors import CandidateError, UsageError
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.registry import Checked, property
from lossgate.worlds.base import RankRaised


@property(
    "bad-inputs",
    applies=lambda candidate: bool(candidate.refuses),
    fits=lambda case: case.world.repeatable and bool(_trained(case).any()),
    runs=3,
    remedy="raise an error, or take the kind out of refuses",
    shrinks=False,
)
def bad_inputs(case: Case) -> Checked:
    """Bad input that the candidate declares to refuse raises an error on some rank."""
    vocab, faults = case.problem.vocab, list[str]()
    if "labels" in case.candidate.refuses:
        for label in (vocab, -1):
            bad = _with_label(case.placed.batch, int(_trained(case).nonzero()[0]), label)
            if _takes(lambda batch=bad: case.on_ranks(batch=batch)):
                faults.append(f"the label {label} of a trained token raises no error, with a vocabulary of {vocab}")
    if "shapes" in case.candidate.refuses and _takes(lambda: case.on_ranks(_with_short_ids)):
        faults.append("a tensor of labels, or of ids, that is one token too short raises no error")
    return Checked(faults=tuple(faults))


def _takes(call: Callable[[], Sequence[Any]]) -> bool:
    """Returns whether a call on all ranks raises nothing."""
    try:
        call()
    except RankRaised:
        return False
    except CandidateError as error:  # it returned something of a wrong shape
        return not isinstance(error.__cause__, UsageError)
    return True


def _trained(case: Case) -> Tensor:
    """Returns which tokens of the padded pack are trained."""
    return ~untrained(case.candidate.spec, case.placed.batch.known)["token"]


def _with_label(batch: GlobalBatch, token: int, label: int) -> GlobalBatch:
    """Returns the batch with another label of a token, and so another id of the next one."""
    labels, ids = batch.fields["labels"].clone(), batch.fields["input_ids"].clone()
    labels[token] = ids[token + 1] = label  # the last token of a sequence is not trained
    return replace(batch, fields={**batch.fields, "labels": labels, "input_ids": ids})


def _with_short_ids(call: RankCall) -> RankOutputs:
    name = "labels" if "labels" in call.tensors else "input_ids"
    call.replace(**{name: call.tensors[name][..., :-1]})
    return plainly(call)
