# SPDX-License-Identifier: Apache-2.0
"""Mistakes of fields and differentiable inputs: another one is taken, the sign is wrong, the
gradient is lost, or memory is read in the wrong order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.sequence_sums import sums_sequences
from lossgate.counterfactuals.seams import Reduced, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def inputs(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of fields that hold numbers, and of the tokens of each sequence."""
    if spec.reference is None:
        return
    numbers = {n: f.dims for n, f in spec.added.items() if f.dtype == "float32" and f.dims and not f.unused}
    for name, dims in numbers.items():
        others = [other for other, of in numbers.items() if other != name and of == dims]
        yield from _wrong_numbers(name, others)
        if dims == ("token",) and "logprobs" in spec.uses:
            own, difference = _VALUES if head == "values" else _POLICY
            for template, (words, loss) in _FOR_POLICY.items():
                sentence = words.format(name=name, own=own, difference=difference)
                yield mistake(template.format(name=name), sentence, loss=partial(loss, name))
    if spec.trained_dim == "token":
        for by, way in ((1, "late"), (-1, "early")):
            yield mistake(
                f"{head} one token {way}",
                f"{head} is taken one token {way} on each rank",
                padding=True,
                leaves=partial(_rolled_leaves, head, by),
            )
        yield from _OF_SEQUENCES
    for one, other in combinations(numbers, 2):
        if numbers[one] == numbers[other]:
            name, swapped = f"{one} and {other} swapped", partial(_swapped, one, other)
            yield mistake(name, f"{one} and {other} are swapped", fields=swapped)


def _wrong_numbers(name: str, others: Iterable[str]) -> Iterator[Counterfactual]:
    """Yields the mistakes of a field that holds numbers. Others are fields of the same dims."""
    for what, (words, change) in _CHANGES.items():
        todo = f"use {name} as it is given"
        yield mistake(f"{name} {what}", f"{name} {words}", todo=todo, fields=partial(_changed, name, change))
    for other in others:
        taken = partial(_other, name, other)
        yield mistake(f"{other} for {name}", f"{other} stands in place of {name}", fields=taken)
    for number in (0, 1):
        yield mistake(
            f"NaN of {name} as {number}",
            f"a NaN of {name} is read as {number}",
            partial(_has_nan, name),
            fields=partial(_nan_as, name, float(number)),
        )


def _rolled_leaves(head: str, by: int, setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    source = setting.source_on_each_rank(by)
    return {name: leaf[source] if name == head else leaf for name, leaf in leaves.items()}


def _begun_late(setting: Setting) -> Fields:
    """Returns the sequence of each token, rolled to the right on each rank."""
    sequence = setting.fields["sequence"].clone()
    for rank, own in enumerate(setting.token_shards):
        sequences = setting.partition.sequences(rank // setting.size("cp"))
        held = sequence[own].roll(1)
        held[:1] = sequences.start
        sequence[own] = held
    return {"sequence": sequence}


def _one_sequence(setting: Setting) -> Fields:
    """Returns the first sequence of its dp rank for each token."""
    sequence = setting.fields["sequence"].clone()
    for dp in range(setting.size("dp")):
        own = setting.partition.sequences(dp)
        sequence[(sequence >= own.start) & (sequence < own.stop)] = own.start
    return {"sequence": sequence}


def _by_ranges_without_padding(setting: Setting) -> Fields:
    """Returns the sequence of each token, found by the lengths of sequences without padding.

    Tokens after the end of the last sequence are masked.
    """
    partition, lengths = setting.partition, torch.tensor(setting.lengths)
    sequence, mask = setting.fields["sequence"].clone(), setting.fields["mask"].clone()
    for (dp, _), held in partition.token_shards.items():
        own = partition.sequences(dp)
        ends = lengths[own.start : own.stop].cumsum(0)
        number = torch.searchsorted(ends, torch.arange(len(held)), right=True)
        mask[held] &= number < len(ends)
        sequence[held] = own.start + number.clamp(max=max(len(ends) - 1, 0)).to(sequence.dtype)
    return {"sequence": sequence, "mask": mask}


def _cut_without_padding(setting: Setting) -> Fields:
    """Returns the same sequences, with labels and mask that are shifted within them."""
    lengths, has_label = torch.tensor(setting.lengths), torch.zeros(setting.tokens, dtype=torch.bool)
    for (dp, _), held in setting.partition.token_shards.items():
        own = setting.partition.sequences(dp)
        ends = lengths[own.start : own.stop].cumsum(0)
        end, place = int(ends[-1]) if len(ends) else 0, torch.arange(len(held))
        has_label[held] = (place < end) & ~torch.isin(place + 1, ends)
    source = setting.source_on_each_rank(-1)
    mask = setting.moved_with_padding("mask", source, given=True) & has_label
    return {**_by_ranges_without_padding(setting), "mask": mask, "labels": setting.padded("input_ids")[source]}


_CHANGES: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "ignored": ("counts as 0", torch.zeros_like),
    "as 1": ("counts as 1", torch.ones_like),
    "negated": ("has the other sign", torch.neg),
    "absolute": ("loses its sign", torch.abs),
    "doubled": ("counts twice", lambda x: 2 * x),
    "halved": ("counts half", lambda x: x / 2),
    "squared": ("is squared", torch.square),
    "where negative dropped": ("counts as 0 where it is negative", lambda x: x.clamp(min=0)),
    "where positive dropped": ("counts as 0 where it is positive", lambda x: x.clamp(max=0)),
}
"""The changes that may be made to a field of numbers, each in words and as a function."""
_OF_SEQUENCES = (
    mistake(
        "sequences begin one token late",
        "in sums over a sequence, the first token of a sequence on each rank counts to the sequence before it",
        sums_sequences,
        "take start <= token < end as the tokens of a sequence, with start and end of cu_seqlens",
        padding=True,
        fields=_begun_late,
    ),
    mistake(
        "one sequence on each rank",
        "all tokens of a dp rank are treated as one sequence",
        lambda setting: len(setting.lengths) > setting.size("dp"),
        fields=_one_sequence,
    ),
    mistake(
        "cu_seqlens for cu_seqlens_padded",
        "the tokens of a sequence are found by cu_seqlens, which does not count padding",
        lambda setting: setting.size("cp") == 1,
        "use cu_seqlens_padded: there may be padding between sequences",
        padding=True,
        fields=_by_ranges_without_padding,
    ),
    mistake(
        "cu_seqlens for cu_seqlens_padded, in ids and masks",
        "the pack is cut by cu_seqlens, which does not count padding, and ids and masks are shifted within each piece",
        lambda setting: setting.given_tokens == "packed" and setting.size("cp") == 1,
        "use cu_seqlens_padded: there may be padding between sequences",
        padding=True,
        fields=_cut_without_padding,
    ),
)


def _nan_as(name: str, number: float, setting: Setting) -> Fields:
    return {name: setting.fields[name].nan_to_num(nan=number)}


def _has_nan(name: str, setting: Setting) -> bool:
    return bool(setting.fields[name].isnan().any())


def _changed(name: str, change: Callable[[Tensor], Tensor], setting: Setting) -> Fields:
    return {name: change(setting.fields[name])}


def _other(name: str, other: str, setting: Setting) -> Fields:
    return {name: setting.fields[other]}


def _swapped(one: str, other: str, setting: Setting) -> Fields:
    return {one: setting.fields[other], other: setting.fields[one]}


def _policy_for(name: str, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    return bound.loss(values, {**fields, name: values.logprobs.detach()})


def _attached_policy_for(name: str, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    return bound.loss(values, {**fields, name: values.logprobs})


def _swapped_with_policy(name: str, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    return bound.loss(values.replace(logprobs=fields[name]), {**fields, name: values.logprobs})


def _turned(name: str, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    return bound.loss(values, {**fields, name: 2 * values.logprobs - fields[name]})


def _turned_without_gradient(name: str, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    return bound.loss(values, {**fields, name: (2 * values.logprobs - fields[name]).detach()})


_POLICY = "the policy's own log-probabilities", "log-ratio of the policy"
_VALUES = "the values", "difference of the values"
"""The words for what a kernel computes of each token, and for its difference to a field."""
_FOR_POLICY: Mapping[str, tuple[str, Callable[..., Reduced]]] = {
    "logprobs for {name}": ("{own} stand in place of {name}", _policy_for),
    "logprobs for {name}, attached": ("{own}, with their gradient, stand in place of {name}", _attached_policy_for),
    "logprobs and {name} swapped": ("{own} and {name} are swapped", _swapped_with_policy),
    "log-ratio to {name} turned round": ("the {difference} to {name} has the wrong sign", _turned),
    "log-ratio to {name} turned round, without a gradient through it": (
        "the {difference} to {name} has the wrong sign, but backward has the right sign",
        _turned_without_gradient,
    ),
}
"""The mistakes between a field and what the kernel itself computes: in words, and the loss."""


def detached(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of losing the gradient of a value per token."""
    if spec.reference is None:
        return
    for name in (use for use in spec.uses if use not in ("lowest", "highest")):
        yield mistake(
            f"{name} detached",
            f"the gradient through {name} is lost",
            partial(_used, name),
            values=partial(_detach, name),
        )


def _used(name: str, setting: Setting) -> bool:
    return name == "logprobs" or setting.head.has_logits


def _detach(name: str, setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(**{name: values.given[name].detach()}) if name in values.given else values


def memory(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of reading a transposed view by its pointer, without its strides."""
    for name in {"hidden": ("weight", "hidden"), "logits": ("logits",)}.get(head, ()):
        for backward_too, words in ((True, ""), (False, ", in forward alone")):
            yield mistake(
                f"transposed view of {name} read as if contiguous{words}",
                f"the transposed view of {name} is read as if its rows followed one another in memory{words}",
                _not_padded,
                todo="use the strides of the view, or make it contiguous before you read it by its pointer",
                padding=True,
                leaves=partial(_reordered, name, backward_too),
            )


def _not_padded(setting: Setting) -> bool:
    return not any(shard.padding for shard in setting.vocab_shards)


def _reordered(name: str, backward_too: bool, setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns leaves of which one is read in the order of memory, rank by rank."""
    leaf = leaves[name]
    if name == "hidden":
        read = setting.moved_on_each_rank(leaf, _as_if_contiguous)
    elif name == "weight":
        read = torch.cat([_as_if_contiguous(leaf[shard.start : shard.end]) for shard in setting.vocab_shards])
    else:
        columns = [leaf[:, shard.start : shard.end] for shard in setting.vocab_shards]
        read = torch.cat([setting.moved_on_each_rank(own, _as_if_contiguous) for own in columns], 1)
    return {**leaves, name: read if backward_too else with_gradient_of(read, leaf)}


def _as_if_contiguous(x: Tensor) -> Tensor:
    return x.reshape(x.shape[::-1]).t()
