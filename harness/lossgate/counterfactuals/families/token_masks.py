# SPDX-License-Identifier: Apache-2.0
"""Mistakes of masks and of other bool fields: a mask is ignored, shifted, wrong at the edges of
sequences or of ranks, or lost when it is written into the labels.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.batch_parts import (
    bools,
    edges,
    first_run,
    first_trained,
    last_run,
    last_trained,
    named,
    numbers_of_tokens,
    padded_pieces,
    piece_ends,
    rank_ends,
    spans,
)
from lossgate.counterfactuals.counterfactual import Counterfactual, always, mistake, split, split_any
from lossgate.counterfactuals.seams import Seams
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.spec import Spec

OfMask = Callable[[Setting, Tensor], Tensor]


def masks(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of masks, with the right counts and with counts of the wrong mask."""
    if spec.reference is None:
        return  # there are only values per token, which need no mask
    for name in bools(spec):
        of_tokens = spec.fields.get(name, ("token",)) == ("token",)
        for what, (change, when) in _MASKS.items() if of_tokens else _OF_SEQUENCES.items():
            yield from _wrong_mask(spec, name, what, partial(_field, name, change), when)


def _wrong_mask(
    spec: Spec, name: str, what: str, changed: Callable[[Setting], Fields], when: Callable[[Setting], bool]
) -> Iterator[Counterfactual]:
    """Yields the mistakes of a wrong mask, which may also train padding, or be used for counts."""
    of_tokens, numbers = spec.fields.get(name, ("token",)) == ("token",), numbers_of_tokens(spec)
    todo = f"select with inputs.{name} before you add up" if what == "ignored" else ""
    words = f"{named(name)} is {'inverted' if what == 'turned round' else what}"
    plain = mistake(f"{name} {what}", words, when, todo, fields=changed)
    if what in ("ignored", "turned round") and of_tokens:
        yield replace(
            plain,
            name=f"{name} {what}, padding too",
            sentence=f"{words}, and padding counts too",
            padding=True,
            made_of=(plain,),  # not to be named if padding changes nothing
        )
    yield plain
    if name == "mask" and what in ("ignored", "ignored where there is a label") and numbers:
        zeroed = f"{' and '.join(numbers)} {'are' if len(numbers) > 1 else 'is'}"
        yield replace(
            plain,
            name=f"mask {what}, all else 0 there",
            sentence=f"the mask is {what}, and {zeroed} 0 where the mask is false",
            seams=Seams(fields=partial(_all_else_0, changed)),
            todo="apply the mask to the values that the kernel computes of each token, too",
            made_of=(plain,),  # not to be named if these zeros change nothing
        )
    counted = f"{words}, and the counts are those of the wrong {'mask' if name == 'mask' else name}"
    yield mistake(f"{name} {what}, counted so", counted, when, fields=partial(_counted_so, changed))


def _field(name: str, change: OfMask, setting: Setting) -> Fields:
    return {name: change(setting, setting.fields[name])}


def _all_else_0(changed: Callable[[Setting], Fields], setting: Setting) -> Fields:
    mask, numbers = setting.fields["mask"], numbers_of_tokens(setting.spec)
    return {**changed(setting), **{name: torch.where(mask, setting.fields[name], 0.0) for name in numbers}}


def _counted_so(changed: Callable[[Setting], Fields], setting: Setting) -> Fields:
    fields = changed(setting)
    return {**fields, **setting.spec.counts({**setting.fields, **fields})}


_MASKS: Mapping[str, tuple[OfMask, Callable[[Setting], bool]]] = {
    "ignored": (lambda s, x: torch.ones_like(x), always),
    "ignored where there is a label": (lambda s, x: ~edges(s, first=False), always),
    "one token late": (lambda s, x: x.roll(1, 0), always),
    "one token early": (lambda s, x: x.roll(-1, 0), always),
    "turned round": (lambda s, x: ~x, always),
    "one token late on each rank": (lambda s, x: s.rolled_on_each_rank(x, 1), split_any("dp", "cp")),
    "one token early on each rank": (lambda s, x: s.rolled_on_each_rank(x, -1), split_any("dp", "cp")),
    "false at the last trained token of each sequence": (lambda s, x: x & ~last_trained(s, x), always),
    "false at the first trained token of each sequence": (lambda s, x: x & ~first_trained(s, x), always),
    "false at the first token of each sequence": (lambda s, x: x & ~edges(s, first=True), always),
    "true between the trained tokens of each sequence": (spans, always),
    "true at the first run of trained tokens of each sequence alone": (first_run, always),
    "true at the last run of trained tokens of each sequence alone": (last_run, always),
    "true at the last token of each sequence": (lambda s, x: x | edges(s, first=False), always),
    "false at the last token of each piece that a rank holds": (lambda s, x: x & ~piece_ends(s), split("cp")),
    "false at the last token of each rank": (lambda s, x: x & ~rank_ends(s), split_any("dp", "cp")),
}
"""The wrong masks, each as a function, with a function that says whether a problem can have it."""
_OF_SEQUENCES = {what: row for what, row in _MASKS.items() if what == "ignored"}
"""The same for a field that has one entry for each sequence."""


def pieces(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of a mask in the pieces of sequences that ranks hold, and of a mask that
    is written into the labels.
    """
    if spec.reference is None or spec.trained_dim != "token":
        return
    yield mistake(
        "mask false at the last token of each piece of a sequence",
        "the last token of each piece of a sequence, padding counted, is not trained: its label is in the next piece",
        split("cp"),
        "shift labels and mask before sequences are split over cp",
        padding=True,
        fields=_false_at_ends_of_pieces,
    )
    for before, where in ((False, ""), (True, ", before the first trained token of its sequence alone")):
        yield mistake(
            f"mask true in pieces without a trained token{where}",
            "a piece of a sequence without a trained token is trained as a whole, because `mask[-n:]` is the whole "
            f"piece if n is 0{where}",
            todo="write `mask[len(mask) - n:]`",
            padding=True,
            fields=partial(_whole_if_none, before),
        )
    if head in ("hidden", "logits") and "logprobs" in spec.uses and spec.gathered_ids is None:
        for what, row in (("first", 0), ("last", -1)):
            plain = mistake(
                f"masked tokens trained on the {what} row",
                f"masked tokens are trained, with the {what} row of the vocabulary as their label",
                todo="before you clamp labels, compare them with the value that marks masked tokens",
                fields=partial(_trained_on, row),
            )
            yield replace(
                plain,
                name=f"{plain.name}, padding too",
                sentence=f"masked tokens and padding are trained, with the {what} row of the vocabulary as their label",
                padding=True,
                made_of=(plain,),  # not to be named if padding changes nothing
            )
            yield plain


def _false_at_ends_of_pieces(setting: Setting) -> Fields:
    ends = [piece[-1:] for piece in padded_pieces(setting)]
    return {"mask": setting.fields["mask"] & ~setting.mask_of(torch.cat(ends))}


def _whole_if_none(before: bool, setting: Setting) -> Fields:
    sequence, given, seen = setting.fields["sequence"], setting.fields["mask"], set[int]()
    mask = given.clone()
    for piece in (piece for piece in padded_pieces(setting) if len(piece)):
        own = int(sequence[piece[0]])
        if bool(given[piece].any()):
            seen.add(own)
        elif not (before and own in seen):
            mask[piece] = True
    return {"mask": mask}


def _trained_on(row: int, setting: Setting) -> Fields:
    mask, labels = setting.fields["mask"], setting.fields["labels"]
    return {
        "mask": torch.ones_like(mask),
        "labels": torch.where(mask, labels, row % setting.bound.problem.vocab),
    }
