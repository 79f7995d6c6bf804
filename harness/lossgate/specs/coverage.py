# SPDX-License-Identifier: Apache-2.0
"""Branches that many losses have: where labels lie, what is masked, on which side of a clip ratios lie."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lossgate.problems.batch import Batch
from lossgate.specs.spec import Branch

_LOGITS = ("hidden", "logits")

TOKEN_BRANCHES: Mapping[str, Branch] = {
    "trained token": Branch(meaning="a token whose label is trained"),
    "masked token": Branch(meaning="a token whose label is not"),
    "label on a shard's first row": Branch(
        meaning="a trained label on the first row of a tp rank's vocabulary", heads=_LOGITS
    ),
    "label on a shard's last row": Branch(
        meaning="a trained label on the last row of a tp rank's vocabulary", heads=_LOGITS
    ),
    "rank with nothing trained": Branch(
        meaning="a rank without any trained token, beside one that has some", axes=("dp", "cp")
    ),
}


def trained_tokens(batch: Batch) -> Tensor:
    """``[tokens]`` bool: in the mask, and in a sequence that counts."""
    mask, samples = batch.fields["mask"], batch.fields.get("sample_mask")
    return mask if samples is None else mask & samples[batch.fields["sequence"]]


def visited_tokens(batch: Batch) -> set[str]:
    mask = trained_tokens(batch)
    trained = batch.fields["labels"][mask]
    held = [bool(mask[own].any()) for own in batch.partition.token_shards.values()]
    seen = {"rank with nothing trained"} if any(held) and not all(held) else set[str]()
    seen |= {"trained token"} if mask.any() else set()
    seen |= {"masked token"} if not mask[batch.partition.real_tokens].all() else set()
    for shard in batch.partition.vocab_shards:
        own = trained[(trained >= shard.start) & (trained < shard.end)]
        if shard.start < shard.end and bool((own == shard.start).any()):
            seen.add("label on a shard's first row")
        if shard.start < shard.end and bool((own == shard.end - 1).any()):
            seen.add("label on a shard's last row")
    return seen


def clip_sides(unit: str, barred: Mapping[str, Any], below: Mapping[str, Any] | None = None) -> dict[str, Branch]:
    """A ratio of a ``unit`` on each side of its clip, for either sign of the advantage. ``below`` bars that side alone."""
    return {
        f"{unit} {side} the clip, A {sign} 0": Branch(
            meaning=f"a {unit}'s ratio {side} the clip, with an advantage {sign} 0",
            barred_by={**barred, **(below or {} if side == "below" else {})},
        )
        for side in ("inside", "below", "above")
        for sign in "<>"
    }


def visited_sides(unit: str, log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Iterator[str]:
    """Of those of ``clip_sides``; all ``[n]``. low, high: where the logarithm of the ratio is clipped."""
    for side, there in {
        "inside": (log_ratio > low) & (log_ratio < high),
        "below": log_ratio < low,
        "above": log_ratio > high,
    }.items():
        for sign, signed in {"<": advantage < 0, ">": advantage > 0}.items():
            if bool((there & signed).any()):
                yield f"{unit} {side} the clip, A {sign} 0"
