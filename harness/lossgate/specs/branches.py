# SPDX-License-Identifier: Apache-2.0
"""Branches that every loss over tokens has: where labels lie, and what is masked."""

from collections.abc import Mapping

from lossgate.problems.batch import Batch
from lossgate.specs.base import Branch

_LOGITS = ("hidden", "logits")

TOKEN_BRANCHES: Mapping[str, Branch] = {
    "trained token": Branch(meaning="a token whose label is trained"),
    "masked token": Branch(meaning="a token whose label is not"),
    "label on a shard's first row": Branch(meaning="a trained label on the first row of a tp rank's vocabulary", heads=_LOGITS),
    "label on a shard's last row": Branch(meaning="a trained label on the last row of a tp rank's vocabulary", heads=_LOGITS),
}


def visited_tokens(batch: Batch) -> set[str]:
    mask = batch.fields["mask"]
    trained = batch.fields["labels"][mask]
    seen = {"trained token"} if mask.any() else set[str]()
    seen |= {"masked token"} if not mask[batch.partition.real_tokens].all() else set()
    for shard in batch.partition.vocab_shards:
        own = trained[(trained >= shard.start) & (trained < shard.end)]
        if shard.start < shard.end and bool((own == shard.start).any()):
            seen.add("label on a shard's first row")
        if shard.start < shard.end and bool((own == shard.end - 1).any()):
            seen.add("label on a shard's last row")
    return seen
