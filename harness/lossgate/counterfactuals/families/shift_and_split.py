# SPDX-License-Identifier: Apache-2.0
"""Mistakes of shifting labels and other fields of tokens, and of splitting them over cp."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.batch_parts import bools, fields_of_tokens, named
from lossgate.counterfactuals.counterfactual import Counterfactual, always, mistake, split, split_any
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.spec import Spec

OfTokens = Callable[[Setting, Tensor], Tensor]


def labels(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of shifting labels, and other fields of tokens that are no bools."""
    if spec.trained_dim != "token":
        return
    if head in ("hidden", "logits"):
        yield from _shifts("labels", "are")
        yield mistake(
            "labels are input_ids",
            "labels are not shifted: each token is its own label",
            fields=lambda setting: {"labels": setting.fields["input_ids"]},
        )
        for within, source in _WITHIN.items():
            yield mistake(
                f"labels are input_ids shifted within {within}",
                f"labels are input_ids that are shifted within {within}: the labels at its ends are wrong",
                split("cp"),
                "shift the ids before they are split over cp, or take labels as they are given",
                fields=partial(_ids_within, source),
            )
    for name, field in spec.added.items():
        if not field.unused and field.dims[:1] == ("token",) and name not in bools(spec):
            yield from _shifts(name, "is")


def _shifts(name: str, verb: str) -> Iterator[Counterfactual]:
    for what, (words, shift, when) in _SHIFTS.items():
        yield mistake(f"{name} {what}", f"{name} {verb} {words}", when, fields=partial(_shifted, name, shift))


def _shifted(name: str, shift: OfTokens, setting: Setting) -> Fields:
    return {name: shift(setting, setting.fields[name])}


_SHIFTS: Mapping[str, tuple[str, OfTokens, Callable[[Setting], bool]]] = {
    "shifted twice": ("shifted twice", lambda s, x: x.roll(-1, 0), always),
    "shifted the other way": ("one token late", lambda s, x: x.roll(1, 0), always),
    "shifted after the split, so that those at the ends of a rank's tokens are wrong": (
        "shifted after the split, so that the entries at the ends of a rank's tokens are wrong",
        lambda s, x: s.rolled_on_each_rank(x.roll(1, 0), -1),
        split_any("dp", "cp"),
    ),
    "shifted once more on each rank": (
        "shifted once more on each rank",
        lambda s, x: s.rolled_on_each_rank(x, -1),
        split_any("dp", "cp"),
    ),
    "wrapped round each sequence": (
        "shifted once more within each sequence, whose first entry comes to its end",
        lambda s, x: torch.cat([part.roll(-1, 0) for part in x.split(list(s.lengths))]),
        always,
    ),
}
"""The wrong shifts, each in words, as a function, and with the problems that can have it."""
_WITHIN: Mapping[str, Callable[[Setting], Tensor]] = {
    "what each rank holds": lambda s: s.source_on_each_rank(-1),
    "what each rank holds, with 0 at its end": lambda s: s.source_on_each_rank(-1).where(~_ends_of_ranks(s), -1),
    "what each rank holds of a sequence": lambda s: _in_each_sequence(s),
}
"""The places from which labels come if each rank shifts its ids. -1 stands for a label of 0."""


def _ends_of_ranks(setting: Setting) -> Tensor:
    ends = [held[-1:] for held in setting.partition.token_shards.values()]
    return torch.zeros(setting.partition.tokens, dtype=torch.bool).index_fill(0, torch.cat(ends), True)


def _ids_within(source: Callable[[Setting], Tensor], setting: Setting) -> Fields:
    moved = source(setting)
    ids = setting.padded("input_ids")[moved.clamp(min=0)]
    return {"labels": ids.where(moved >= 0, 0)[setting.partition.real_tokens]}


def moves(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of shifting and splitting fields with their padding.

    Each field is moved alone, and then all fields together that are shifted with the labels.
    """
    if spec.trained_dim != "token":
        return
    names = [name for name in fields_of_tokens(spec, head) if name != "mask" or spec.reference]
    for name in names:
        yield from _moves_of((name,), spec, name, named(name))
    together = tuple(name for name in names if name not in spec.unshifted)
    if len(together) > 1:
        yield from _moves_of(together, spec, "all that belongs to labels", "every field that is shifted with labels")


def _moves_of(fields: tuple[str, ...], spec: Spec, name: str, words: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of moving some fields, given their name and words as a group."""
    for how, move in _MOVES.items():
        if how == "neither shifted nor split" and spec.unshifted.issuperset(fields):
            continue  # these fields are not shifted anyway
        moved = partial(_moved, fields, move)
        yield mistake(f"{name} {how}", f"{words} {move.words}", move.when, padding=True, fields=moved)


@dataclass(frozen=True)
class _Move:
    """A wrong place for each entry of the padded pack."""

    words: str
    source: Callable[[Setting], Tensor]
    """Returns the places; see ``Setting.moved_with_padding``."""
    when: Callable[[Setting], bool] = always
    given: bool = False
    """Whether these are places in the field as it is given."""


def _moved(names: tuple[str, ...], move: _Move, setting: Setting) -> Fields:
    source = setting.once(f"source of what {move.words}", lambda: move.source(setting))
    return {name: setting.moved_with_padding(name, source, given=move.given) for name in names}


def _in_each_sequence(setting: Setting) -> Tensor:
    """Returns the places if each rank shifts its part of each sequence by itself. The last entry of
    a part becomes 0.
    """
    source, sequence = setting.source_on_each_rank(-1), setting.partition.sequence_of_token
    source = source.where(sequence == sequence[source], -1)
    for own in setting.partition.token_shards.values():
        source[own[-1:]] = -1
    return source


def _in_order(setting: Setting) -> Tensor:
    """Returns the places if sequences are split over cp in order, not in a zigzag."""
    source, partition, cp = torch.arange(setting.partition.tokens), setting.partition, setting.size("cp")
    for start, length in zip(partition.starts[:-1], partition.padded_lengths, strict=True):
        piece = length // (2 * cp)
        for rank in range(cp):
            zigzag = (rank, 2 * cp - 1 - rank)  # the pieces that the rank should hold
            for place, index in enumerate(zigzag):
                held, taken = start + index * piece, start + (2 * rank + place) * piece
                source[held : held + piece] = torch.arange(taken, taken + piece)
    return source


def _of_pack(pick: Callable[[Tensor, int, int], Tensor], setting: Setting) -> Tensor:
    """Returns the places if each rank picks its entries from the pack of its dp rank.

    Args:
        pick: gets the places of the pack, the index on cp and the number of cp ranks. Returns the
            places of the rank.
        setting: the problem with its padding.
    """
    source, partition = torch.arange(setting.partition.tokens), setting.partition
    for (dp, cp), held in partition.token_shards.items():
        own = partition.sequences(dp)
        pack = torch.arange(partition.starts[own.start], partition.starts[own.stop])
        source[held] = pick(pack, cp, partition.layout.cp)[: len(held)]
    return source


def _zigzag(pack: Tensor, cp: int, ranks: int) -> Tensor:
    pieces = pack.tensor_split(2 * ranks)
    return torch.cat([pieces[cp], pieces[2 * ranks - 1 - cp]])


_first_tokens = partial(_of_pack, lambda pack, cp, ranks: pack)


def _is_given_whole(setting: Setting) -> bool:
    return setting.given_tokens != "shard"


def _is_given_whole_and_split(setting: Setting) -> bool:
    return _is_given_whole(setting) and setting.size("cp") > 1


_MOVES: Mapping[str, _Move] = {
    "rolled back on each rank": _Move(
        "is rolled by one token to the right on each rank, padding included", lambda s: s.source_on_each_rank(1)
    ),
    "rolled on on each rank": _Move(
        "is rolled by one token to the left on each rank, padding included", lambda s: s.source_on_each_rank(-1)
    ),
    "rolled to the right, not to the left": _Move(
        "is shifted to the right on each rank, not to the left", lambda s: s.source_on_each_rank(2)
    ),
    "not shifted": _Move(
        "is not shifted: the entry of a token is used for its prediction of the next token",
        lambda s: torch.arange(s.partition.tokens),
        _is_given_whole,
        given=True,
    ),
    "shifted after the split": _Move(
        "is shifted within what each rank holds, after the split over cp and not before it",
        lambda s: s.source_on_each_rank(-1),
        _is_given_whole,
        given=True,
    ),
    "shifted after the split, sequence by sequence": _Move(
        "is shifted within what each rank holds of a sequence, after the split over cp and not before it",
        _in_each_sequence,
        _is_given_whole_and_split,
        given=True,
    ),
    "split in order": _Move(
        "is split over cp in order, sequence by sequence, and everything else in a zigzag", _in_order, split("cp")
    ),
    "split as one sequence": _Move(
        "is split over cp in a zigzag as if the pack were one sequence", partial(_of_pack, _zigzag), split("cp")
    ),
    "not split": _Move(
        "is not split over cp: each rank takes the first tokens of the pack", _first_tokens, split("cp")
    ),
    "neither shifted nor split": _Move(
        "is neither shifted nor split over cp: each rank takes the first tokens of the pack",
        _first_tokens,
        _is_given_whole_and_split,
        given=True,
    ),
    "split end to end": _Move(
        "is split over cp end to end, and everything else in a zigzag",
        partial(_of_pack, lambda pack, cp, ranks: pack.tensor_split(ranks)[cp]),
        split("cp"),
    ),
}
"""The wrong places of the entries that ranks hold, padding included."""
