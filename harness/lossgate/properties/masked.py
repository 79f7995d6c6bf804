# SPDX-License-Identifier: Apache-2.0
"""Properties of tokens that count for nothing: masked tokens, and padding."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lossgate.cases.assemble import equal
from lossgate.cases.case import Case
from lossgate.cases.untrained import replaced, untrained
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.mended import with_zeros
from lossgate.properties.registry import Checked, called, property
from lossgate.properties.would_show import all_of, masked_token_counts, padding_counts
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec
from lossgate.worlds.base import RankRaised

_NATS = 500.0
"""Further off than any log-probability of a float32 softmax can be. Its exp overflows."""
_HIDDEN = 16.0
"""The size of wild entries of hidden states. They give logits of some hundreds."""
_ABSENT = -100
"""The id that stands for no label in many frameworks."""


Poison = Callable[[Spec, GlobalBatch, Collection[str], int], GlobalBatch]
"""Returns a batch with changed numbers where nothing counts. It gets the names of the fields and
leaves to change, and the sign of the changes."""


@property(
    "masked-values",
    mistakes=all_of(masked_token_counts, padding_counts),
    remedy="select before computing: torch.where(mask, x, 0.0), because 0 * inf is NaN",
    mended=with_zeros,
    may_explain=("masked-nan",),
    relaxed_by={"under_mask": ("usual",)},
)
def masked_values(case: Case) -> Checked:
    """Wild but finite numbers, and other ids, change nothing at tokens that do not count.

    Metrics of all tokens, or of all sequences, are left out: their reference changes, too. If
    callers keep to usual numbers under the mask, the numbers are those of other tokens.
    """
    if case.candidate.conventions.under_mask == "usual":
        return _poisoned_where_unused(case, "usual masked values", _with_values_of_others)
    return _poisoned_where_unused(case, "masked values", _with_wild_values)


@property(
    "masked-nan",
    mistakes=all_of(masked_token_counts, padding_counts),
    applies=lambda candidate: candidate.conventions.under_mask == "anything",
    relaxed_by={"under_mask": ("finite",)},
    fits=lambda case: _with_nan(case.candidate.spec, case.placed.batch, _names(case), 1) is not case.placed.batch,
    remedy="select before computing: torch.where(mask, x, 0.0), because 0 * NaN is NaN",
)
def masked_nan(case: Case) -> Checked:
    """NaN in numbers of masked tokens, such as old log-probabilities, changes nothing."""
    found = _poisoned_where_unused(case, "masked NaN", _with_nan).comparisons
    return Checked(comparisons=tuple(called("with NaN at masked tokens", found)))


@property(
    "masked-ids",
    mistakes=masked_token_counts,
    applies=lambda candidate: candidate.starts_at.has_logits and candidate.conventions.under_mask != "usual",
    relaxed_by={"under_mask": ("usual",)},
    fits=lambda case: case.world.repeatable,
    remedy="set labels to a valid id where mask is false, before indexing with them",
)
def masked_ids(case: Case) -> Checked:
    """Labels of -100 where the mask is false change nothing, or raise an error."""
    batch = _without_labels(case.placed.batch)
    try:
        return Checked(comparisons=case.judged(case.on_ranks(batch=batch)))
    except RankRaised:
        return Checked()


def _poisoned_where_unused(case: Case, name: str, change: Poison) -> Checked:
    """Compares a call whose numbers are changed where nothing counts, padding included."""
    names = _unused(case, name, change)
    batch = change(case.candidate.spec, case.placed.batch, names, 1)
    return Checked(comparisons=case.judged(case.on_ranks(batch=batch), among=_kept(case, name, change, names)))


def _names(case: Case) -> tuple[str, ...]:
    """Returns the names of fields and leaves that have floating-point numbers for each token."""
    batch = case.bound.batch
    return (*_token_floats(batch), *(name for name in batch.leaves if _is_of_tokens(name)))


def _unused(case: Case, name: str, change: Poison) -> tuple[str, ...]:
    """Returns the names of the fields and leaves that count for nothing where the mask is false.

    An option may align a field differently: DPO's reference log-probabilities can belong to the
    token that is read. Then the reference needs some of them where the mask is false.
    """
    names = _names(case)
    trained = {output for output in case.result.outputs if output.kind not in ("metric", "token value")}
    if trained <= set(_kept(case, name, change, names)):
        return names
    return tuple(changed for changed in names if trained <= set(_kept(case, name, change, (changed,))))


def _kept(case: Case, name: str, change: Poison, names: Collection[str]) -> list[Output]:
    """Returns the outputs whose reference keeps all bits under a change of either sign. With only
    one sign, a reference that saturates could keep them by chance.
    """
    spec, returned = case.candidate.spec, case.result.outputs
    plain, kept = case.bound.reference(returned), list(returned)
    signs = (1,) if change is _with_nan else (1, -1)  # NaN is the same with either sign
    for sign in signs:
        label = f"{name} {sign:+} of {', '.join(names)}"
        changed = case.bound.varied(label, lambda batch, sign=sign: change(spec, batch, names, sign))
        other = changed.reference(returned)
        kept = [output for output in kept if _same(plain[output], other[output], output, case)]
    return kept


def _same(one: Tensor, other: Tensor, output: Output, case: Case) -> bool:
    """Returns whether two references have the same bits. Values of masked tokens do not count."""
    if output.kind == "token value":
        mask = case.bound.batch.fields["mask"]
        return equal(one[mask], other[mask])
    return equal(one, other)


def _with_wild_values(spec: Spec, batch: GlobalBatch, names: Collection[str], sign: int) -> GlobalBatch:
    """Returns a batch with numbers far off, and other ids, where nothing is trained.

    The numbers of each field have a size of their own, so that differences of two fields are far
    off, too.
    """
    away, floats = untrained(spec, batch.known)["token"], _token_floats(batch)
    factors = {name: factor for factor, name in enumerate((*floats, *batch.leaves), 1)}

    def wild(name: str, tensor: Tensor) -> Tensor:
        size = _HIDDEN if name == "hidden" else _NATS * factors[name]
        signs = sign * (1 - 2 * (torch.arange(tensor.numel()).view(tensor.shape) % 2))
        return replaced(tensor, away, size * signs.to(tensor))

    def next_id(ids: Tensor) -> Tensor:
        return replaced(ids, away, (ids + 1) % batch.partition.vocab)

    fields = {name: wild(name, field) for name, field in floats.items() if name in names}
    fields |= {name: next_id(batch.fields[name]) for name in ("labels", spec.gathered_ids) if name is not None}
    leaves = {name: wild(name, leaf) for name, leaf in batch.leaves.items() if name in names}
    return replace(batch, fields={**batch.fields, **fields}, leaves={**batch.leaves, **leaves})


def _with_values_of_others(spec: Spec, batch: GlobalBatch, names: Collection[str], sign: int) -> GlobalBatch:
    """Returns a batch with the numbers and ids of trained tokens where nothing is trained. Another
    sign takes those of other tokens.
    """
    away = untrained(spec, batch.known)["token"]
    trained = (~away).nonzero().squeeze(1)
    if not len(trained):
        return batch
    others = trained[(torch.arange(len(away)) + sign) % len(trained)]
    given, ids = {**_token_floats(batch), **batch.leaves}, [one for one in ("labels", spec.gathered_ids) if one]
    tensors = {**{name: given[name] for name in names}, **{name: batch.fields[name] for name in ids}}
    moved = {name: replaced(tensor, away, tensor[others]) for name, tensor in tensors.items()}
    fields = {name: moved[name] for name in moved if name not in batch.leaves}
    leaves = {name: moved[name] for name in moved if name in batch.leaves}
    return replace(batch, fields={**batch.fields, **fields}, leaves={**batch.leaves, **leaves})


def _with_nan(spec: Spec, batch: GlobalBatch, names: Collection[str], sign: int) -> GlobalBatch:
    """Returns a batch with NaN where the mask is false, or the same batch if nothing can be NaN.

    Tokens in a sequence that does not count stay as they are if their mask is true, because kernels
    may multiply the values of a sequence by 0. Hidden states and logits stay as they are, also a
    teacher's: the gradient of a weight is a product with all hidden states, even masked ones, and a
    softmax of NaN has no gradient of 0.
    """
    away = ~batch.fields["mask"]

    def poisoned(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: replaced(one, away) for name, one in given.items() if name in names and one.dim() == 1}

    fields, leaves = poisoned(_token_floats(batch)), poisoned(batch.leaves)
    if not fields and not leaves:
        return batch
    return replace(batch, fields={**batch.fields, **fields}, leaves={**batch.leaves, **leaves})


def _without_labels(batch: GlobalBatch) -> GlobalBatch:
    """Returns a batch without labels where the mask is false.

    Where the mask is true a label stays even if its sequence does not count, because kernels return
    its log-probability.
    """
    labels = replaced(batch.fields["labels"], ~batch.fields["mask"], _ABSENT)
    return replace(batch, fields={**batch.fields, "labels": labels})


def _token_floats(batch: GlobalBatch) -> dict[str, Tensor]:
    """Returns the fields that have a floating-point number, or several, for each token."""
    dims = batch.field_dims
    return {n: batch.fields[n] for n in dims if dims[n][:1] == ("token",) and batch.fields[n].is_floating_point()}


def _is_of_tokens(leaf: str) -> bool:
    return any(head.leaves.get(leaf, ())[:1] == ("token",) for head in HEADS.values())
