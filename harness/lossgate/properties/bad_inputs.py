# SPDX-License-Identifier: Apache-2.0
"""The property ``bad-inputs``: a kernel refuses the bad input that it declares to refuse."""

from dataclasses import replace
from itertools import product

from torch import Tensor

from lossgate.base.errors import CandidateError, UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.microbatches import in_microbatches, split_in_two
from lossgate.cases.rank_call import How, RankCall, plainly
from lossgate.cases.untrained import untrained
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.registry import Checked, property
from lossgate.properties.would_show import all_of, needing
from lossgate.worlds.base import RankRaised

_BROADCAST = 2
"""With one token less than this, a single one is left, which torch broadcasts to any number."""


def _may_lose_one(case: Case) -> bool:
    return any(len(shard) > _BROADCAST for shard in case.placed.partition.token_shards.values())


def _refuses_shapes(case: Case) -> bool:
    return "shapes" in case.candidate.refuses


def _refuses_labels_of_groups(case: Case) -> bool:
    return "labels" in case.candidate.refuses and case.problem.group_size > 1


def _first_of_each_place(case: Case) -> list[int]:
    """Returns the first trained token of each place in a group: of chosen responses, and of
    rejected ones. It has fewer if a place trains nothing.
    """
    tokens = _trained(case).nonzero().squeeze(1)
    places = case.placed.batch.fields["sequence"][tokens] % case.problem.group_size
    return [int(tokens[places == place][0]) for place in places.unique()]


@property(
    "bad-inputs",
    mistakes=all_of(
        needing("labels that are too few are broadcast", _may_lose_one, _refuses_shapes),
        needing(
            "the labels of one response of a group are not checked",
            lambda case: len(_first_of_each_place(case)) == case.problem.group_size,
            _refuses_labels_of_groups,
        ),
    ),
    applies=lambda candidate: bool(candidate.refuses) or candidate.conventions.empty_ranks == "refused",
    fits=lambda case: case.world.repeatable and bool(_trained(case).any()),
    runs=5,
    remedy="raise an error, or remove this kind of input from refuses, or from conventions",
    shrinks=False,
)
def bad_inputs(case: Case) -> Checked:
    """Bad input that the candidate declares to refuse raises an error on some rank.

    So does a rank without a token, if its conventions say so.
    """
    vocab, faults = case.problem.vocab, list[str]()
    if "labels" in case.candidate.refuses:
        trained = _trained(case).nonzero().squeeze(1).tolist()
        for label, token in product((vocab, -1), dict.fromkeys((*_first_of_each_place(case), trained[-1]))):
            if _takes(case, _as_given, _with_label(case.placed.batch, token, label)):
                faults.append(f"the label {label} of a trained token raises no error, with a vocabulary of {vocab}")
    if "shapes" in case.candidate.refuses and _takes(case, _with_short_ids, case.placed.batch):
        faults.append("a tensor of labels, or of ids, that is one token too short raises no error")
    if case.candidate.conventions.empty_ranks == "refused" and not _raises_without_tokens(case):
        faults.append("a rank without a token raises no error")
    return Checked(faults=tuple(dict.fromkeys(faults)))


def _raises_without_tokens(case: Case) -> bool:
    """Returns whether a call without a token raises an error. Of two microbatches one is empty."""
    group = case.problem.group_size
    few = replace(case.problem, lengths=(4,) * group, masks=("all",) * group, forced_labels=(), outliers=())
    bound = case.bound.derived("one group", lambda: BoundProblem(case.candidate.spec, few))
    return in_microbatches(case, split_in_two(few), bound).raises


def _takes(case: Case, how: How[bool], batch: GlobalBatch) -> bool:
    """Returns whether some rank gets bad input, and no rank raises an error."""
    try:
        return any(case.on_ranks(how, batch=batch))
    except RankRaised:
        return False
    except CandidateError as error:
        refused = isinstance(error.__cause__, UsageError)  # else it returned something wrong, such as a wrong shape
        return not refused


def _as_given(call: RankCall) -> bool:
    plainly(call)
    return True


def _with_short_ids(call: RankCall) -> bool:
    """Calls a kernel with one label or id too few. Returns whether there were enough to leave one
    out.
    """
    name = "labels" if "labels" in call.tensors else "input_ids"
    ids = call.tensors[name]
    enough = ids.shape[-1] > _BROADCAST
    if enough:
        call.replace(**{name: ids[..., :-1]})
    plainly(call)
    return enough


def _trained(case: Case) -> Tensor:
    """Returns the mask of the trained tokens of the padded pack."""
    return ~untrained(case.candidate.spec, case.placed.batch.known)["token"]


def _with_label(batch: GlobalBatch, token: int, label: int) -> GlobalBatch:
    """Returns the batch with another label of a token, which is also the id of the next token."""
    labels, ids = batch.fields["labels"].clone(), batch.fields["input_ids"].clone()
    labels[token] = ids[token + 1] = label  # the last token of a sequence is not trained
    return replace(batch, fields={**batch.fields, "labels": labels, "input_ids": ids})
