# SPDX-License-Identifier: Apache-2.0
"""Coverage goals that belong to a layout: which trained tokens and rows of the vocabulary each rank
holds.

They are the same for every loss. Most bugs of sharded kernels need trained tokens on several ranks:
a kernel that divides by its rank's own count of tokens is right if one rank has all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lossgate.base.layout import Axis
from lossgate.problems.partition import Partition
from lossgate.specs.coverage_goals import WITH_LOGITS, CoverageGoal

_PER_TOKEN = ("hidden", "logits", "logprobs", "values")
_UNPADDED = ("balanced", "even", "chunked")
_GAPS = 3
"""How many sequences must have padding behind them. A kernel that trains this padding may get away
with a few, because masks are drawn at random."""
_THREE = 3
"""The fewest ranks of which one can usefully be empty. Of two ranks one is empty only if the
vocabulary has a single row. Then the loss is 0, and only a crash can show."""
_UNEVEN = 2
"""Ranks have clearly different numbers of trained tokens if one has this many times another's."""


def _several(axis: Axis) -> str:
    return f"trained on several {axis} ranks"


NOTHING_ON_A_RANK = "rank with nothing trained"
FEW_TRAINED = "fewer trained than dp ranks"
NEED_UNTRAINED = frozenset((NOTHING_ON_A_RANK, FEW_TRAINED))
"""The goals that need a rank without a trained token."""

SHARDING_GOALS: Mapping[str, CoverageGoal] = {
    "label on a shard's first row": CoverageGoal(
        meaning="a trained label on the first row of a tp rank's vocabulary, not of the whole one",
        heads=WITH_LOGITS,
        axes=("tp",),
    ),
    "label on a shard's last row": CoverageGoal(
        meaning="a trained label on the last row of a tp rank's vocabulary, not of the whole one",
        heads=WITH_LOGITS,
        axes=("tp",),
    ),
    NOTHING_ON_A_RANK: CoverageGoal(
        meaning="a rank without any trained token, while another has some", axes=("dp", "cp"), heads=_PER_TOKEN
    ),
    FEW_TRAINED: CoverageGoal(
        meaning="some trained tokens, but fewer than dp ranks", axes=("dp",), heads=_PER_TOKEN, least_ranks=_THREE
    ),
    "rank without a sequence": CoverageGoal(
        meaning="a dp rank without any sequence", axes=("dp",), unreachable_if={"empty": ("sequence", "shard")}
    ),
    "shards of different size": CoverageGoal(
        meaning="trained tokens, and tp ranks that are given different numbers of rows of the vocabulary",
        heads=WITH_LOGITS,
        axes=("tp",),
        unreachable_if={"vocab_split": ("even", "padded")},
    ),
    "shard without a row": CoverageGoal(
        meaning="trained tokens, and a tp rank that is given no row of the vocabulary",
        heads=WITH_LOGITS,
        axes=("tp",),
        least_ranks=_THREE,
        unreachable_if={"vocab_split": ("balanced", "even", "padded"), "empty": ("sequence", "rank")},
    ),
    "shard with padding rows": CoverageGoal(
        meaning="padding rows of the vocabulary on a tp rank, and enough trained tokens to show whether a kernel "
        "counts these rows",
        heads=WITH_LOGITS,
        axes=("tp",),
        unreachable_if={"vocab_split": _UNPADDED},
    ),
    "shard of padding rows alone": CoverageGoal(
        meaning="trained tokens, and a tp rank whose rows of the vocabulary are all padding",
        heads=WITH_LOGITS,
        axes=("tp",),
        least_ranks=_THREE,
        unreachable_if={"vocab_split": _UNPADDED},
    ),
    "padding between sequences": CoverageGoal(
        meaning=f"{_GAPS} trained sequences, each followed by padding and then by another sequence on its dp rank",
        heads=_PER_TOKEN,
    ),
    _several("dp"): CoverageGoal(
        meaning=f"trained tokens on several dp ranks, at least {_UNEVEN} times as many on one as on another",
        axes=("dp",),
    ),
    _several("cp"): CoverageGoal(
        meaning=f"trained tokens on several cp ranks, at least {_UNEVEN} times as many on one as on another",
        axes=("cp",),
        heads=_PER_TOKEN,
    ),
    _several("tp"): CoverageGoal(
        meaning=f"trained labels on several tp ranks, at least {_UNEVEN} times as many on one as on another",
        axes=("tp",),
        heads=WITH_LOGITS,
    ),
}

SEVERAL_RANKS = frozenset((_several("dp"), _several("cp"), _several("tp")))
"""The goals of trained tokens on several ranks."""

IDS_GOALS: Mapping[str, CoverageGoal] = {
    "top-k on one shard": CoverageGoal(meaning="a token whose top-k lies on one tp rank", axes=("tp",)),
    "top-k on several shards": CoverageGoal(meaning="a token whose top-k lies on several tp ranks", axes=("tp",)),
}
"""Goals of losses that need the log-probabilities of several ids of each token."""


@dataclass(frozen=True)
class Trained:
    """The trained tokens of a problem, or the trained sequences for a loss of whole sequences.
    There are n of them.
    """

    sequence: np.ndarray
    """``[n]``: the number of each token's sequence, or of the sequence itself."""
    position: np.ndarray
    """``[n]``: the place of each token in its sequence; 0 for a whole sequence."""
    ids: np.ndarray
    """``[n, k]``: the rows of the vocabulary that the loss looks up for each; k is 0 if it needs
    none."""


def covered_sharding_goals(partition: Partition, trained: Trained) -> Iterator[str]:
    """Yields the names of the ``SHARDING_GOALS`` and ``IDS_GOALS`` that a problem reaches."""
    counts = _counts(partition, trained)
    if counts.any() and not counts.all():
        yield NOTHING_ON_A_RANK
    if 0 < counts.sum() < partition.layout.dp:
        yield FEW_TRAINED
    if not all(partition.sequences(rank) for rank in range(partition.layout.dp)):
        yield "rank without a sequence"
    if _on_several(counts.sum(1)):
        yield _several("dp")
    if _on_several(counts.sum(0)):
        yield _several("cp")
    if _padded_between(partition, trained.sequence) >= _GAPS:
        yield "padding between sequences"
    if partition.layout.tp > 1:
        yield from _covered_of_vocabulary(partition, trained.ids)


_OF_SIZES = (
    "shards of different size",
    "shard without a row",
    "shard of padding rows alone",
    "padding between sequences",
)
"""The goals that some sizes can't reach, whatever the tokens and masks are."""


def may_reach(goal: str, partition: Partition) -> bool:
    """Returns whether a problem of these sizes may reach a goal. It is quick, because it draws no
    labels and masks: it takes all tokens as trained.
    """
    if goal not in _OF_SIZES:
        return True
    sequence = np.repeat(np.arange(len(partition.lengths)), partition.lengths)
    everything = Trained(sequence, 0 * sequence, np.zeros((len(sequence), 1), dtype=np.int64))
    return goal in set(covered_sharding_goals(partition, everything))


def _counts(partition: Partition, trained: Trained) -> np.ndarray:
    """Returns ``[dp, cp]``: how many trained tokens each rank holds.

    Context parallelism cuts each sequence into 2 cp pieces, and rank r has pieces r and
    2 cp - 1 - r.
    """
    layout = partition.layout
    first = [partition.sequences(rank).start for rank in range(layout.dp)]
    dp = np.searchsorted(first, trained.sequence, side="right") - 1
    piece_lengths = np.maximum(np.array(partition.padded_lengths) // (2 * layout.cp), 1)
    piece = trained.position // piece_lengths[trained.sequence]
    cp = np.minimum(piece, 2 * layout.cp - 1 - piece) if layout.cp > 1 else 0 * piece
    return np.bincount(dp * layout.cp + cp, minlength=layout.dp * layout.cp).reshape(layout.dp, layout.cp)


def _on_several(counts: np.ndarray) -> bool:
    held = counts[counts > 0]
    return len(held) > 1 and bool(held.max() >= _UNEVEN * held.min())


def _padded_between(partition: Partition, trained: np.ndarray) -> int:
    """Returns how many trained sequences are followed by padding, and then by another sequence of
    their dp rank.
    """
    found, lengths, padded = 0, partition.lengths, partition.padded_lengths
    for rank in range(partition.layout.dp):
        held = [sequence for sequence in partition.sequences(rank) if lengths[sequence]]
        for sequence in held[:-1]:  # no other follows the last
            found += padded[sequence] > lengths[sequence] and sequence in trained
    return found


def _covered_of_shards(partition: Partition) -> Iterator[str]:
    shards = partition.vocab_shards
    if len({shard.rows for shard in shards}) > 1:
        yield "shards of different size"
    if partition.vocab > 1:
        if not all(shard.rows for shard in shards):
            yield "shard without a row"
        if any(shard.padding == shard.rows > 0 for shard in shards):
            yield "shard of padding rows alone"


def _covered_of_vocabulary(partition: Partition, ids: np.ndarray) -> Iterator[str]:
    shards = partition.vocab_shards
    rows = [shard.end - shard.start for shard in shards]
    if len(ids):
        yield from _covered_of_shards(partition)
    # If a kernel counts padding rows, each token has about so many more rows in its softmax.
    if len(ids) * sum(shard.padding for shard in shards) >= partition.vocab:
        yield "shard with padding rows"
    held = [shard for shard, count in zip(shards, rows, strict=True) if count]
    starts = np.array([shard.start for shard in held])
    if np.isin(ids, starts[1:]).any():
        yield "label on a shard's first row"
    if np.isin(ids, starts[1:] - 1).any():
        yield "label on a shard's last row"
    owners = np.searchsorted(starts, ids, side="right") - 1
    if _on_several(np.bincount(owners.ravel(), minlength=1)):
        yield _several("tp")
    if ids.shape[1] > 1 and len(ids):
        alike = (owners == owners[:, :1]).all(1)
        if alike.any():
            yield "top-k on one shard"
        if not alike.all():
            yield "top-k on several shards"
