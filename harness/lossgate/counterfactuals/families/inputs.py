# SPDX-License-Identifier: Apache-2.0
"""Fields of a loss: one in another's place, with the other sign, left out, detached or not."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.sequence_sums import sums_sequences
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def inputs(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of fields that hold numbers."""
    if spec.reference is None:
        return
    values = head == "values"
    own = "the values" if values else "the policy's own log-probabilities"
    difference = "difference of the values" if values else "log-ratio of the policy"
    numbers = {n: f.dims for n, f in spec.added.items() if f.dtype == "float32" and f.dims and not f.unused}
    for name, dims in numbers.items():
        for what in _CHANGES:
            yield mistake(f"{name} {what}", f"{name} {_WORDS[what]}", "field", fields=partial(_changed, name, what))
        for other, dims_of_other in numbers.items():
            if other != name and dims == dims_of_other:
                yield mistake(
                    f"{other} for {name}",
                    f"{other} stands in place of {name}",
                    "field",
                    fields=partial(_other, name, other),
                )
        for number in (0, 1):
            yield mistake(
                f"NaN of {name} as {number}",
                f"a NaN of {name} is read as {number}",
                "field",
                partial(_has_nan, name),
                fields=partial(_nan_as, name, float(number)),
            )
        if dims == ("token",) and "logprobs" in spec.uses:
            yield mistake(
                f"logprobs for {name}",
                f"{own} stand in place of {name}",
                "field",
                loss=partial(_policy_for, name, False),
            )
            yield mistake(
                f"logprobs for {name}, attached",
                f"{own}, with their gradient, stand in place of {name}",
                "detach",
                loss=partial(_policy_for, name, True),
            )
            yield mistake(
                f"logprobs and {name} swapped",
                f"{own} and {name} are swapped",
                "field",
                loss=partial(_swapped_with_policy, name),
            )
            yield mistake(
                f"log-ratio to {name} turned round",
                f"the {difference} to {name} has the other sign",
                "field",
                loss=partial(_turned, name, True),
            )
            yield mistake(
                f"log-ratio to {name} turned round, without a gradient through it",
                f"{name} is moved to the other side of {own}",
                "field",
                loss=partial(_turned, name, False),
            )
    if spec.trained_dim == "token":
        for by, way in ((1, "late"), (-1, "early")):
            yield mistake(
                f"{head} one token {way}",
                f"{head} is taken from the wrong tokens: one token {way}, on each rank",
                "shift",
                padding=True,
                leaves=partial(_rolled_leaves, head, by),
            )
        yield mistake(
            "sequences begin one token late",
            "the first token of a sequence, on each rank, counts to the sequence before it in sums over a sequence",
            "field",
            sums_sequences,
            "take start <= token < end of cu_seqlens",
            padding=True,
            fields=_begun_late,
        )
        yield mistake(
            "one sequence on each rank",
            "all tokens of a dp rank are taken for one sequence",
            "field",
            lambda setting: len(setting.lengths) > setting.size("dp"),
            fields=_one_sequence,
        )
        yield mistake(
            "cu_seqlens for cu_seqlens_padded",
            "the tokens of a sequence are sought by cu_seqlens, which does not count padding",
            "field",
            lambda setting: setting.size("cp") == 1,
            "use cu_seqlens_padded where padding stands between sequences",
            padding=True,
            fields=_by_ranges_without_padding,
        )
        yield mistake(
            "cu_seqlens for cu_seqlens_padded, in ids and masks",
            "the pack is cut by cu_seqlens, which does not count padding, and ids and masks are shifted in each piece",
            "field",
            lambda setting: setting.given_tokens == "packed" and setting.size("cp") == 1,
            "use cu_seqlens_padded where padding stands between sequences",
            padding=True,
            fields=_cut_without_padding,
        )
    names = list(numbers)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            if numbers[one] == numbers[other]:
                yield mistake(
                    f"{one} and {other} swapped",
                    f"{one} and {other} are swapped",
                    "field",
                    fields=partial(_swapped, one, other),
                )


def _rolled_leaves(head: str, by: int, setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    source = torch.arange(setting.tokens)
    for own in setting.token_shards:
        source[own] = own.roll(by)
    return {name: leaf[source] if name == head else leaf for name, leaf in leaves.items()}


def _begun_late(setting: Setting) -> Fields:
    sequence = setting.fields["sequence"].clone()
    for rank, own in enumerate(setting.token_shards):
        sequences = setting.partition.sequences(rank // setting.size("cp"))
        held = sequence[own].roll(1)
        held[:1] = sequences.start
        sequence[own] = held
    return {"sequence": sequence}


def _one_sequence(setting: Setting) -> Fields:
    sequence = setting.fields["sequence"].clone()
    for dp in range(setting.size("dp")):
        own = setting.partition.sequences(dp)
        sequence[(sequence >= own.start) & (sequence < own.stop)] = own.start
    return {"sequence": sequence}


def _by_ranges_without_padding(setting: Setting) -> Fields:
    partition, lengths = setting.partition, torch.tensor(setting.lengths)
    sequence, mask = setting.fields["sequence"].clone(), setting.fields["mask"].clone()
    for (dp, _), held in partition.token_shards.items():
        own = partition.sequences(dp)
        ends = lengths[own.start : own.stop].cumsum(0)
        found = torch.searchsorted(ends, torch.arange(len(held)), right=True)
        mask[held] &= found < len(ends)
        sequence[held] = own.start + found.clamp(max=max(len(ends) - 1, 0)).to(sequence.dtype)
    return {"sequence": sequence, "mask": mask}


def _cut_without_padding(setting: Setting) -> Fields:
    found = dict(_by_ranges_without_padding(setting))
    lengths, inside = torch.tensor(setting.lengths), torch.zeros(setting.tokens, dtype=torch.bool)
    for (dp, _), held in setting.partition.token_shards.items():
        own = setting.partition.sequences(dp)
        ends = lengths[own.start : own.stop].cumsum(0)
        place = torch.arange(len(held))
        inside[held] = (place < (int(ends[-1]) if len(ends) else 0)) & ~torch.isin(place + 1, ends)
    mask = setting.moved_with_padding("mask", setting.source_on_each_rank(-1), given=True)
    ids = setting.padded("input_ids")[setting.source_on_each_rank(-1)]
    return {**found, "mask": mask & inside, "labels": ids}


_CHANGES: dict[str, Any] = {
    "ignored": torch.zeros_like,
    "as 1": torch.ones_like,
    "negated": torch.neg,
    "absolute": torch.abs,
    "doubled": lambda x: 2 * x,
    "halved": lambda x: x / 2,
    "squared": torch.square,
    "where negative dropped": lambda x: x.clamp(min=0),
    "where positive dropped": lambda x: x.clamp(max=0),
}
_WORDS = {
    "ignored": "is taken for 0",
    "as 1": "is taken for 1",
    "negated": "has the other sign",
    "absolute": "loses its sign",
    "doubled": "counts twice",
    "halved": "counts half",
    "squared": "is squared",
    "where negative dropped": "is taken for 0 where it is negative",
    "where positive dropped": "is taken for 0 where it is positive",
}


def _nan_as(name: str, number: float, setting: Setting) -> Fields:
    return {name: setting.fields[name].nan_to_num(nan=number)}


def _has_nan(name: str, setting: Setting) -> bool:
    return bool(setting.fields[name].isnan().any())


def _changed(name: str, what: str, setting: Setting) -> Fields:
    return {name: _CHANGES[what](setting.fields[name])}


def _other(name: str, other: str, setting: Setting) -> Fields:
    return {name: setting.fields[other]}


def _swapped(one: str, other: str, setting: Setting) -> Fields:
    return {one: setting.fields[other], other: setting.fields[one]}


Reduced = tuple[Tensor, dict[str, Tensor]]


def _policy_for(name: str, attached: bool, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    own = values.logprobs if attached else values.logprobs.detach()
    return bound.loss(values, {**fields, name: own})


def _swapped_with_policy(name: str, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    return bound.loss(values.replace(logprobs=fields[name]), {**fields, name: values.logprobs})


def _turned(name: str, attached: bool, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    mirrored = 2 * values.logprobs - fields[name]
    return bound.loss(values, {**fields, name: mirrored if attached else mirrored.detach()})


def detached(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of values per token without their gradient, and of a loss without one."""
    if spec.reference is None:
        return
    for name in [use for use in spec.uses if use not in ("lowest", "highest")]:
        yield mistake(
            f"{name} detached",
            f"the gradient through {name} is lost",
            "detach",
            partial(_used, name),
            values=partial(_detach, name),
        )


def _used(name: str, setting: Setting) -> bool:
    return name == "logprobs" or setting.head.has_logits


def _detach(name: str, setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(**{name: values.given[name].detach()}) if name in values.given else values
