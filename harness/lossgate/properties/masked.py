# SPDX-License-Identifier: Apache-2.0
"""Properties of what counts for nothing: masked tokens, and padding."""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from lossgate.cases.case import Case
from lossgate.cases.untrained import replaced, untrained
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.registry import Checked, property
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec
from lossgate.worlds.base import RankRaised

_NATS = 500.0
"""As far off as no log-probability of a float32 softmax can be; its exp overflows."""
_HIDDEN = 16.0
"""Entries of hidden states, which become logits of some hundreds."""
_ABSENT = -100
"""The id that stands for no label in many frameworks."""


@property(
    "masked-values",
    remedy="select before computing: torch.where(mask, x, 0.0), because 0 * inf is NaN",
)
def masked_values(case: Case) -> Checked:
    """Wild but finite numbers, and other ids, where nothing counts change nothing.

    Metrics of all tokens, or of all sequences, are left out: their reference changes, too.
    """
    return _poisoned(case, _with_wild_values, _kept(case, "masked values", _with_wild_values))


@property(
    "masked-nan",
    fits=lambda case: case.placed.batch is not _with_nan(case.candidate.spec, case.placed.batch),
    remedy="select before computing: torch.where(mask, x, 0.0), because 0 * NaN is NaN",
)
def masked_nan(case: Case) -> Checked:
    """NaN in numbers of masked tokens, such as old log-probabilities, changes nothing."""
    return _poisoned(case, _with_nan, _kept(case, "masked NaN", _with_nan))


@property(
    "masked-ids",
    applies=lambda candidate: candidate.starts_at.has_logits,
    fits=lambda case: case.world.repeatable,
    remedy="set labels to a valid id where mask is false, before indexing with them",
)
def masked_ids(case: Case) -> Checked:
    """Labels of -100 where nothing counts change nothing, or are refused by an error."""
    try:
        return _poisoned(case, _without_labels)
    except RankRaised:
        return Checked()


def _poisoned(
    case: Case, change: Callable[[Spec, GlobalBatch], GlobalBatch], among: Collection[Output] | None = None
) -> Checked:
    """Compares a call with changed numbers where nothing counts, padding included."""
    ranks = case.on_ranks(batch=change(case.candidate.spec, case.placed.batch))
    return Checked(comparisons=case.judged(ranks, among=among))


def _kept(case: Case, name: str, change: Callable[[Spec, GlobalBatch], GlobalBatch]) -> list[Output]:
    """Returns the outputs whose reference a change of the batch leaves as it is."""
    changed = case.bound.varied(name, lambda batch: change(case.candidate.spec, batch))
    return case.kept(changed.reference(case.result.outputs))


def _with_wild_values(spec: Spec, batch: GlobalBatch) -> GlobalBatch:
    """Returns a batch with numbers far off, and other ids, where nothing is trained."""
    away, vocab = untrained(spec, batch.known), batch.partition.vocab

    def wild(name: str, tensor: Tensor) -> Tensor:
        size = _HIDDEN if name == "hidden" else _NATS
        sign = 1 - 2 * (torch.arange(tensor.numel()).view(tensor.shape) % 2)
        return replaced(tensor, away["token"], size * sign.to(tensor))

    fields = {name: wild(name, field) for name, field in _token_floats(batch).items()}
    ids = {name for name in ("labels", spec.gathered_ids) if name is not None}
    fields |= {name: replaced(batch.fields[name], away["token"], (batch.fields[name] + 1) % vocab) for name in ids}
    leaves = {name: wild(name, leaf) for name, leaf in batch.leaves.items() if _is_of_tokens(name)}
    return replace(batch, fields={**batch.fields, **fields}, leaves={**batch.leaves, **leaves})


def _with_nan(spec: Spec, batch: GlobalBatch) -> GlobalBatch:
    """Returns a batch with NaN where the mask is false; the same if nothing can be NaN.

    A token in a sequence that does not count is left as it is, if the mask is true there: kernels
    may multiply what belongs to a sequence by 0.
    Hidden states and logits are left as they are, a teacher's too: the gradient of a weight is a
    product with all hidden states, masked ones too, and a softmax of NaN has no gradient of 0.
    """
    away, numbers = ~batch.fields["mask"], _token_floats(batch)
    fields = {name: replaced(field, away) for name, field in numbers.items() if field.dim() == 1}
    given = [name for name, leaf in batch.leaves.items() if _is_of_tokens(name) and leaf.dim() == 1]
    leaves = {name: replaced(batch.leaves[name], away) for name in given}
    if not fields and not leaves:
        return batch
    return replace(batch, fields={**batch.fields, **fields}, leaves={**batch.leaves, **leaves})


def _without_labels(spec: Spec, batch: GlobalBatch) -> GlobalBatch:
    """Returns a batch without labels where nothing is trained."""
    away = untrained(spec, batch.known)["token"]
    return replace(batch, fields={**batch.fields, "labels": replaced(batch.fields["labels"], away, _ABSENT)})


def _token_floats(batch: GlobalBatch) -> dict[str, Tensor]:
    """Returns the fields of numbers that belong to tokens."""
    dims = batch.field_dims
    return {n: batch.fields[n] for n in dims if dims[n][:1] == ("token",) and batch.fields[n].is_floating_point()}


def _is_of_tokens(leaf: str) -> bool:
    return any(head.leaves.get(leaf, ())[:1] == ("token",) for head in HEADS.values())
