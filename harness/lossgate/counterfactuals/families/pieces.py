# SPDX-License-Identifier: Apache-2.0
"""Masks in the pieces of sequences that ranks hold, and masks that are written into the labels."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.edges import padded_pieces
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.spec import Spec


def pieces(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of a mask in the pieces of sequences that ranks hold, and of a mask that
    is written into the labels.
    """
    if spec.reference is None or spec.trained_dim != "token":
        return
    yield mistake(
        "mask false at the last token of each piece of a sequence",
        "the last token of each piece of a sequence that a rank holds, padding counted, is not trained: its label is "
        "in the next piece",
        "mask",
        split("cp"),
        "shift labels and mask before sequences are split over cp",
        padding=True,
        fields=_false_at_ends_of_pieces,
    )
    for before, where in ((False, ""), (True, ", before the first trained token of its sequence alone")):
        yield mistake(
            f"mask true in pieces without a trained token{where}",
            "a piece of a sequence that holds no trained token is trained as a whole, because `mask[-n:]` is the whole "
            f"piece where n is 0{where}",
            "mask",
            todo="write `mask[len(mask) - n:]`",
            padding=True,
            fields=partial(_whole_if_none, before),
        )
    if head in ("hidden", "logits") and "logprobs" in spec.uses and spec.gathered_ids is None:
        for what, row in (("first", 0), ("last", -1)):
            plain = mistake(
                f"masked tokens trained on the {what} row",
                f"masked tokens are trained, with the {what} row of the vocabulary as their label",
                "mask",
                todo="compare labels with the value that stands for masked ones before you clamp them",
                fields=partial(_trained_on, row),
            )
            yield replace(
                plain,
                name=f"{plain.name}, padding too",
                sentence=f"masked tokens and padding are trained, with the {what} row of the vocabulary as their label",
                padding=True,
                made_of=(plain,),  # without padding it says too much
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
