# SPDX-License-Identifier: Apache-2.0
"""Masks, labels and fields of tokens: ignored, shifted, wrapped round, lost at edges."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.edges import (
    edges,
    first_run,
    first_trained,
    last_run,
    last_trained,
    piece_ends,
    rank_ends,
    spans,
)
from lossgate.counterfactuals.seams import Seams
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.counterfactuals.shares import numbers_of_tokens
from lossgate.specs.spec import Spec

Change = Callable[[Setting, Tensor], Tensor]


def masks(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of masks, with the counts that are given, and with their own counts."""
    if spec.reference is None:
        return  # values per token, each for itself
    numbers = numbers_of_tokens(spec)
    for name in bools(spec):
        for what, (change, when) in _MASKS.items():
            if spec.fields.get(name, ("token",)) != ("token",) and what not in (
                "ignored",
                "true everywhere, counted so",
            ):
                continue
            changed = partial(_field, name, change)
            todo = f"select with inputs.{name} before you add up" if what == "ignored" else ""
            plain = mistake(f"{name} {what}", f"{_named(name)} is {what}", "mask", when, todo, fields=changed)
            if what in ("ignored", "turned round") and spec.fields.get(name, ("token",)) == ("token",):
                yield replace(
                    plain,
                    name=f"{name} {what}, padding too",
                    sentence=f"{_named(name)} is {what}, and padding counts too",
                    padding=True,
                    made_of=(plain,),  # without padding it says too much
                )
            yield plain
            if name == "mask" and what in ("ignored", "ignored where there is a label") and numbers:
                yield replace(
                    plain,
                    name=f"mask {what}, all else 0 there",
                    sentence=f"the mask is {what}, and {' and '.join(numbers)} {'are' if len(numbers) > 1 else 'is'} 0 "
                    "where it is false",
                    seams=Seams(fields=partial(_all_else_0, changed)),
                    todo="mask what the kernel computes of tokens itself, too",
                    made_of=(plain,),  # where these change nothing it says too much
                )
            yield mistake(
                f"{name} {what}, counted so",
                f"{_named(name)} is {what}, and counts are taken of the result",
                "mask",
                when,
                fields=partial(_counted_so, changed),
            )


def labels(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of labels, and those of all that belongs to a label."""
    if spec.trained_dim != "token":
        return
    if head in ("hidden", "logits"):
        for what, (change, when) in _SHIFTS.items():
            yield mistake(
                f"labels {what}", f"labels are {what}", "labels", when, fields=partial(_field, "labels", change)
            )
        yield mistake(
            "labels are input_ids",
            "labels are not shifted: each token is its own label",
            "labels",
            fields=lambda setting: {"labels": setting.fields["input_ids"]},
        )
        for within, source in _WITHIN.items():
            yield mistake(
                f"labels are input_ids shifted within {within}",
                f"labels are input_ids, shifted within {within}: those at the ends of its tokens are wrong",
                "labels",
                _over("cp"),
                "shift the ids before they are split over cp, or take labels as they are given",
                fields=partial(_ids_within, source),
            )
    used = {name: field.dims for name, field in spec.added.items() if not field.unused}
    of_tokens = [name for name, dims in used.items() if dims[:1] == ("token",) and name not in bools(spec)]
    for name in of_tokens:
        for what, (change, when) in _SHIFTS.items():
            yield mistake(f"{name} {what}", f"{name} is {what}", "shift", when, fields=partial(_field, name, change))


_WITHIN: Mapping[str, Callable[[Setting], Tensor]] = {
    "what each rank holds": lambda s: s.source_on_each_rank(-1),
    "what each rank holds, with 0 at its end": lambda s: s.source_on_each_rank(-1).where(~_ends_of_ranks(s), -1),
    "what each rank holds of a sequence": lambda s: s.source_in_each_sequence(-1),
}


def _ends_of_ranks(setting: Setting) -> Tensor:
    ends = [held[-1:] for held in setting.partition.token_shards.values()]
    return torch.zeros(setting.partition.tokens, dtype=torch.bool).index_fill(0, torch.cat(ends), True)


def _ids_within(source: Callable[[Setting], Tensor], setting: Setting) -> Fields:
    moved = source(setting)
    ids = setting.padded("input_ids")[moved.clamp(min=0)]
    return {"labels": ids.where(moved >= 0, 0)[setting.partition.real_tokens]}


_TOGETHER = "all that belongs to labels"


def moves(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields what goes wrong where ranks move or split what they hold, padding included: each field
    alone, and all that belong to labels together.
    """
    own = [name for name, dims in spec.fields.items() if dims == ("token",)]
    names = [*(("labels",) if head in ("hidden", "logits") else ()), *(("mask",) if spec.reference else ()), *own]
    together = [name for name in names if name not in spec.unshifted]
    groups = [(name,) for name in names] + ([tuple(together)] if len(together) > 1 else [])
    if spec.trained_dim != "token":
        return
    for group in groups:
        name, what = (group[0], _named(group[0])) if len(group) == 1 else (_TOGETHER, _TOGETHER)
        for how, move in _MOVES.items():
            if how == "neither shifted nor split" and spec.unshifted.issuperset(group):
                continue  # nothing is to be shifted
            yield mistake(
                f"{name} {how}",
                f"{what} {move.words}",
                "shift",
                move.when,
                padding=True,
                fields=partial(_moved, group, move),
            )


@dataclass(frozen=True)
class _Move:
    """Where each entry of the padded pack comes from."""

    words: str
    source: Callable[[Setting], Tensor]
    when: Callable[[Setting], bool]
    given: bool = False
    """Whether it comes from whole sequences, as they are given."""


def _moved(names: tuple[str, ...], move: _Move, setting: Setting) -> Fields:
    return {name: setting.moved_with_padding(name, move.source(setting), given=move.given) for name in names}


def shifted(names: tuple[str, ...], setting: Setting) -> Fields:
    """Returns some fields of tokens, one token early."""
    return {name: _early(setting, setting.fields[name]) for name in names}


def bools(spec: Spec) -> list[str]:
    """Returns the names of the mask and of other bool fields, as far as a loss has them."""
    own = [name for name, field in spec.added.items() if field.dtype == "bool" and len(field.dims) == 1]
    return ["mask", *own] if spec.trained_dim == "token" else own


def _named(name: str) -> str:
    return "the mask" if name == "mask" else name


def _field(name: str, change: Change, setting: Setting) -> Fields:
    return {name: change(setting, setting.fields[name])}


def _all_else_0(changed: Callable[[Setting], Fields], setting: Setting) -> Fields:
    mask, numbers = setting.fields["mask"], numbers_of_tokens(setting.spec)
    return {**changed(setting), **{name: torch.where(mask, setting.fields[name], 0.0) for name in numbers}}


def _counted_so(changed: Callable[[Setting], Fields], setting: Setting) -> Fields:
    fields = changed(setting)
    return {**fields, **setting.spec.counts({**setting.fields, **fields})}


def _late(setting: Setting, x: Tensor) -> Tensor:
    return x.roll(1, 0)


def _early(setting: Setting, x: Tensor) -> Tensor:
    return x.roll(-1, 0)


def _late_on_ranks(setting: Setting, x: Tensor) -> Tensor:
    return setting.moved_on_each_rank(x, lambda own: own.roll(1, 0))


def _early_on_ranks(setting: Setting, x: Tensor) -> Tensor:
    return setting.moved_on_each_rank(x, lambda own: own.roll(-1, 0))


def _wrapped_on_ranks(setting: Setting, x: Tensor) -> Tensor:
    """Takes what belongs to a token from its rank's own tokens: wrong at the end of each piece."""
    return setting.moved_on_each_rank(x.roll(1, 0), lambda own: own.roll(-1, 0))


def _in_sequences(setting: Setting, x: Tensor, by: int) -> Tensor:
    return torch.cat([part.roll(by, 0) for part in x.split(list(setting.lengths))])


def _always(setting: Setting) -> bool:
    return True


def _over(*axes: Axis) -> Callable[[Setting], bool]:
    return lambda setting: any(setting.size(axis) > 1 for axis in axes)


_MASKS: dict[str, tuple[Change, Callable[[Setting], bool]]] = {
    "ignored": (lambda s, x: torch.ones_like(x), _always),
    "ignored where there is a label": (lambda s, x: ~edges(s, first=False), _always),
    "one token late": (_late, _always),
    "one token early": (_early, _always),
    "turned round": (lambda s, x: ~x, _always),
    "one token late on each rank": (_late_on_ranks, _over("dp", "cp")),
    "one token early on each rank": (_early_on_ranks, _over("dp", "cp")),
    "false at the last trained token of each sequence": (
        lambda s, x: x & ~last_trained(s, x),
        _always,
    ),
    "false at the first trained token of each sequence": (
        lambda s, x: x & ~first_trained(s, x),
        _always,
    ),
    "false at the first token of each sequence": (lambda s, x: x & ~edges(s, first=True), _always),
    "true between the trained tokens of each sequence": (spans, _always),
    "true at the first run of trained tokens of each sequence alone": (first_run, _always),
    "true at the last run of trained tokens of each sequence alone": (last_run, _always),
    "true at the last token of each sequence": (lambda s, x: x | edges(s, first=False), _always),
    "false at the last token of each piece that a rank holds": (lambda s, x: x & ~piece_ends(s), _over("cp")),
    "false at the last token of each rank": (lambda s, x: x & ~rank_ends(s), _over("dp", "cp")),
}
_SHIFTS: dict[str, tuple[Change, Callable[[Setting], bool]]] = {
    "shifted twice": (_early, _always),
    "shifted the other way": (_late, _always),
    "shifted after the split, so that those at the ends of a rank's tokens are wrong": (
        _wrapped_on_ranks,
        _over("dp", "cp"),
    ),
    "shifted once more on each rank": (_early_on_ranks, _over("dp", "cp")),
    "wrapped round each sequence": (lambda s, x: _in_sequences(s, x, -1), _always),
}


def _is_given_whole(setting: Setting) -> bool:
    return setting.given_tokens != "shard"


def _in_place(setting: Setting) -> Tensor:
    return torch.arange(setting.partition.tokens)


_MOVES: Mapping[str, _Move] = {
    "rolled back on each rank": _Move(
        "is rolled by one token to the right on each rank, padding included",
        lambda s: s.source_on_each_rank(1),
        _always,
    ),
    "rolled on on each rank": _Move(
        "is rolled by one token to the left on each rank, padding included",
        lambda s: s.source_on_each_rank(-1),
        _always,
    ),
    "rolled to the right, not to the left": _Move(
        "is shifted to the right on each rank, where it should be to the left",
        lambda s: s.source_on_each_rank(2),
        _always,
    ),
    "not shifted": _Move(
        "is not shifted: what belongs to a token is taken for what belongs to its prediction of the next one",
        _in_place,
        _is_given_whole,
        given=True,
    ),
    "shifted after the split": _Move(
        "is shifted after the split over cp, within what each rank holds, not before it",
        lambda s: s.source_on_each_rank(-1),
        _is_given_whole,
        given=True,
    ),
    "shifted after the split, sequence by sequence": _Move(
        "is shifted after the split over cp, within what each rank holds of a sequence, not before it",
        lambda s: s.source_in_each_sequence(-1),
        lambda s: _is_given_whole(s) and s.size("cp") > 1,
        given=True,
    ),
    "split in order": _Move(
        "is split over cp in order, sequence by sequence, and everything else in a zigzag",
        lambda s: s.source_in_order,
        _over("cp"),
    ),
    "split as one sequence": _Move(
        "is split over cp in a zigzag as if the pack were one sequence",
        lambda s: s.source_as_one_sequence,
        _over("cp"),
    ),
    "not split": _Move(
        "is not split over cp: each rank takes the first tokens of the pack", lambda s: s.source_unsplit, _over("cp")
    ),
    "neither shifted nor split": _Move(
        "is neither shifted nor split over cp: each rank takes the first tokens of the pack",
        lambda s: s.source_unsplit,
        lambda s: _is_given_whole(s) and s.size("cp") > 1,
        given=True,
    ),
    "split end to end": _Move(
        "is split over cp end to end, and everything else in a zigzag", lambda s: s.source_end_to_end, _over("cp")
    ),
}
"""What may happen to what ranks hold, padding included."""
