# SPDX-License-Identifier: Apache-2.0
"""Goals of layouts: which of them a problem reaches, by what its ranks hold."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lossgate import Layout, Problem
from lossgate.base.layout import layouts_up_to
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.placement import PlacedProblem
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.problems.partition import Partition, VocabSplit
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS, Trained, _counts, covered_sharding_goals


def split(layout: str, lengths: tuple[int, ...] = (4, 4), vocab: int = 8, **changes: Any) -> Partition:
    return Partition(Layout.parse(layout), lengths, vocab, **changes)


def trained(*tokens: tuple[int, int], ids: Sequence[Sequence[int]] = ()) -> Trained:
    """Returns trained tokens.

    Args:
        tokens: ``(sequence, position)`` of each.
        ids: the rows that each of them needs; by default row 0.
    """
    sequence, position = np.array(tokens, dtype=np.int64).reshape(-1, 2).T
    rows = np.array(ids, dtype=np.int64) if len(ids) else np.zeros((len(tokens), 1), dtype=np.int64)
    return Trained(sequence, position, rows)


def labels(*rows: int) -> Trained:
    """Returns trained tokens of one sequence that have these labels."""
    return trained(*((0, i) for i in range(len(rows))), ids=[[row] for row in rows])


def whole(*sequences: int) -> Trained:
    """Returns trained sequences, for a loss that knows no tokens."""
    chosen = np.array(sequences, dtype=np.int64)
    return Trained(chosen, 0 * chosen, np.zeros((len(chosen), 0), dtype=np.int64))


# goal: problems that reach it, problems that miss it
TABLE: dict[str, tuple[list[tuple[Partition, Trained]], list[tuple[Partition, Trained]]]] = {
    "label on a shard's first row": (
        [(split("tp=2"), labels(4)), (split("tp=3", vocab=4, vocab_split="padded"), labels(2))],
        [(split("tp=2"), labels(0, 3, 5, 7)), (split("dp=2"), labels(4)), (split("tp=2"), labels())],
    ),
    "label on a shard's last row": (
        [(split("tp=2"), labels(3)), (split("tp=4", vocab=9, vocab_split="chunked"), labels(1, 5))],
        # Rows 2, 5 and 8 are the last ones of ranks 0 to 2. Row 8 ends the vocabulary, and rank 3
        # has no row.
        [
            (split("tp=2"), labels(0, 2, 4, 7)),
            (split("tp=4", vocab=9, vocab_split="chunked"), labels(8)),
            (split("tp=3", vocab=4, vocab_split="padded"), labels(3)),
        ],
    ),
    "rank with nothing trained": (
        [
            (split("dp=2"), trained((0, 0))),
            (split("cp=2"), trained((0, 0), (1, 3))),
            (split("dp=2,cp=2"), trained((0, 0), (0, 1), (1, 0))),
        ],
        [
            (split("dp=2"), trained((0, 0), (1, 0))),
            (split("dp=2"), trained()),
            (split("cp=2"), trained((0, 0), (1, 1))),
            (split("tp=2"), trained((0, 0))),
        ],
    ),
    "fewer trained than dp ranks": (
        [
            (split("dp=2"), trained((0, 0))),
            (split("dp=3", (4, 4, 4)), trained((0, 0), (2, 1))),
            (split("dp=4", (4,) * 4), whole(0, 1)),
        ],
        [
            (split("dp=2"), trained()),
            (split("dp=2"), trained((0, 0), (0, 1))),
            (split("cp=2"), trained((0, 0))),
        ],
    ),
    "rank without a sequence": (
        [(split("dp=3"), trained((0, 0))), (split("dp=2", group_size=2), trained((0, 0)))],
        [(split("dp=2", (4, 0)), trained((0, 0))), (split("dp=2", (1,) * 4, group_size=2), trained((0, 0)))],
    ),
    "shards of different size": (
        [(split("tp=2", vocab=7), labels(0)), (split("tp=3", vocab=7, vocab_split="chunked"), labels(0))],
        [
            (split("tp=2", vocab=8), labels(0)),
            (split("dp=2", vocab=7), labels(0)),
            (split("tp=2", vocab=7), labels()),
            (split("tp=3", vocab=7, vocab_split="padded"), labels(0)),
        ],
    ),
    "shard without a row": (
        [(split("tp=4", vocab=5, vocab_split="chunked"), labels(0))],
        [
            (split("tp=2", vocab=1, vocab_split="chunked"), labels(0)),
            (split("tp=4", vocab=5), labels(0)),
            (split("tp=4", vocab=7, vocab_split="chunked"), labels(0)),
            (split("tp=4", vocab=5, vocab_split="chunked"), labels()),
            (split("tp=4", vocab=1, vocab_split="chunked"), labels(0)),
            (split("tp=4", vocab=5, vocab_split="padded"), labels(0)),
        ],
    ),
    "shard with padding rows": (
        # 3 padding rows for 5 of the vocabulary: two tokens are as good as 6 in 5.
        [(split("tp=4", vocab=5, vocab_split="padded"), labels(0, 1))],
        [
            (split("tp=4", vocab=5, vocab_split="padded"), labels(0)),
            (split("tp=4", vocab=5, vocab_split="padded"), labels()),
            (split("tp=4", vocab=5, vocab_split="chunked"), labels(0, 1)),
            (split("tp=4", vocab=8, vocab_split="padded"), labels(0, 1)),
        ],
    ),
    "shard of padding rows alone": (
        [(split("tp=4", vocab=5, vocab_split="padded"), labels(0))],
        [
            (split("tp=4", vocab=7, vocab_split="padded"), labels(0)),
            (split("tp=4", vocab=5, vocab_split="padded"), labels()),
            (split("tp=4", vocab=1, vocab_split="padded"), labels(0)),
            (split("tp=4", vocab=5, vocab_split="chunked"), labels(0)),
        ],
    ),
    "padding between sequences": (
        [
            (split("single", (4, 2, 4, 1, 3), pad_to_multiple=3), trained((0, 0), (1, 0), (2, 0))),
            (split("cp=2", (3, 3, 0, 5, 4)), trained((0, 0), (1, 0), (3, 0))),
        ],
        [
            (split("single", (4, 2, 4, 1, 3)), trained((0, 0), (1, 0), (2, 0))),
            (split("single", (4, 2, 4, 1, 3), pad_to_multiple=3), trained((0, 0), (1, 0))),
            (split("single", (4, 2, 4, 0), pad_to_multiple=3), trained((0, 0), (1, 0), (2, 0))),
            (split("dp=2", (4, 2, 4, 1), pad_to_multiple=3), trained((0, 0), (1, 0), (2, 0))),
        ],
    ),
    "trained on several dp ranks": (
        [
            (split("dp=2"), trained((0, 0), (1, 0), (1, 1))),
            (split("dp=3", (4, 4, 4)), trained((0, 0), (2, 0), (2, 1))),
            (split("dp=2", (4,) * 3), whole(0, 1, 2)),
        ],
        [
            (split("dp=2"), trained((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))),
            (split("dp=2"), trained((1, 0), (1, 1))),
            (split("dp=2"), whole(0, 1)),
            (split("cp=2"), trained((0, 0), (0, 1), (0, 2))),
        ],
    ),
    "trained on several cp ranks": (
        # Rank 0 has positions 0 and 3 of each sequence, rank 1 has 1 and 2.
        [
            (split("cp=2"), trained((0, 0), (0, 1), (0, 2))),
            (split("cp=2"), trained((0, 0), (0, 3), (1, 1))),
            (split("dp=2,cp=2"), trained((0, 0), (1, 3), (1, 1))),
        ],
        [
            (split("cp=2"), trained((0, 0), (0, 1))),
            (split("cp=2"), trained((0, 1), (0, 2))),
            (split("dp=2"), trained((0, 0), (1, 0), (1, 1))),
        ],
    ),
    "trained on several tp ranks": (
        [(split("tp=2"), labels(0, 1, 4)), (split("tp=4", vocab=5, vocab_split="padded"), labels(4, 1, 0))],
        [
            (split("tp=2"), labels(0, 1, 4, 5, 6)),
            (split("tp=2"), labels(0, 1, 2)),
            (split("tp=2"), labels()),
            (split("dp=2"), labels(0, 1, 4)),
        ],
    ),
    "top-k on one shard": (
        [(split("tp=2"), trained((0, 0), (0, 1), ids=[[0, 5], [4, 7]]))],
        [(split("tp=2"), trained((0, 0), ids=[[3, 4]])), (split("tp=2"), labels(0))],
    ),
    "top-k on several shards": (
        [(split("tp=2"), trained((0, 0), (0, 1), ids=[[0, 1], [3, 4]]))],
        [(split("tp=2"), trained((0, 0), ids=[[0, 3]])), (split("tp=2"), labels(0, 7))],
    ),
}


def test_every_goal_of_layouts_is_in_the_table() -> None:
    assert set(TABLE) == {*SHARDING_GOALS, *IDS_GOALS}
    assert all(reach and miss for reach, miss in TABLE.values())


@pytest.mark.parametrize("goal", TABLE)
def test_goals_are_reached_by_what_ranks_hold(goal: str) -> None:
    reach, miss = TABLE[goal]
    for partition, tokens in reach:
        assert goal in set(covered_sharding_goals(partition, tokens)), partition
    for partition, tokens in miss:
        assert goal not in set(covered_sharding_goals(partition, tokens)), partition


def random_case(chance: random.Random) -> tuple[Partition, Trained]:
    """Returns a random split, and random tokens with random labels."""
    group = chance.choice((1, 1, 2))
    count = group * chance.randint(1, 6)
    lengths = tuple(chance.choice((0, 1, 2, 3, 5, 8, 13)) for _ in range(count))
    layout = chance.choice(list(layouts_up_to(8, ("dp", "cp", "tp"))))
    splits: tuple[VocabSplit, ...] = ("balanced", "chunked", "padded")
    how = chance.choice(splits)
    vocab = chance.randint(layout.tp, 12)
    partition = Partition(layout, lengths, vocab, how, chance.choice((1, 1, 3)), group)
    tokens = [(s, i) for s, length in enumerate(lengths) for i in range(length) if chance.random() < 0.3]
    return partition, trained(*tokens, ids=[[chance.randrange(vocab)] for _ in tokens])


def slowly_counted(partition: Partition, tokens: Trained) -> list[list[int]]:
    """Returns the same as ``_counts``, by what the ranks are given."""
    mask = torch.zeros(partition.tokens, dtype=torch.bool)
    for sequence, position in zip(tokens.sequence, tokens.position, strict=True):
        mask[partition.starts[sequence] + position] = True
    layout = partition.layout
    held = {at: int(mask[own].sum()) for at, own in partition.token_shards.items()}
    return [[held[dp, cp] for cp in range(layout.cp)] for dp in range(layout.dp)]


def test_ranks_are_counted_as_they_are_given_tokens() -> None:
    chance = random.Random(0)
    several = 0
    for _ in range(400):
        partition, tokens = random_case(chance)
        found = _counts(partition, tokens)
        assert found.tolist() == slowly_counted(partition, tokens), partition
        several += (found > 0).sum() > 1
    assert several > 100


def test_labels_are_on_the_rows_that_ranks_hold() -> None:
    """The goals of the vocabulary, asked shard by shard."""
    chance = random.Random(1)
    seen: set[str] = set()
    for _ in range(400):
        partition, tokens = random_case(chance)
        rows, shards = tokens.ids.ravel().tolist(), partition.vocab_shards
        held = [shard for shard in shards if shard.end > shard.start]
        counts = [n for s in held if (n := sum(s.start <= row < s.end for row in rows))]
        expected = {
            "label on a shard's first row": any(s.start in rows for s in held[1:]),
            "label on a shard's last row": any(s.end - 1 in rows for s in held[:-1]),
            "shards of different size": len({s.rows for s in shards}) > 1 and bool(rows),
            "shard without a row": 0 in [s.rows for s in shards] and bool(rows) and partition.vocab > 1,
            "shard of padding rows alone": any(s.start == s.end and s.padding for s in shards)
            and bool(rows)
            and partition.vocab > 1,
            "shard with padding rows": partition.vocab <= len(tokens.ids) * sum(s.padding for s in shards),
            "trained on several tp ranks": len(counts) > 1 and max(counts) >= 2 * min(counts),
        }
        found = set(covered_sharding_goals(partition, tokens))
        assert found & set(expected) == {name for name, there in expected.items() if there}, partition
        seen |= found
    assert seen == set(SHARDING_GOALS)


@pytest.mark.parametrize(
    ("family", "head"), [("nll", "hidden"), ("dpo", "logprobs"), ("preference", "rewards"), ("distill", "logits")]
)
def test_problems_say_what_is_trained(family: str, head: str) -> None:
    """What a problem says is trained is what ranks get of its masks."""
    several = 0
    for problem in Draws(dense_candidate(SPECS[family], head), "float32", "goals", 15).all():
        placed_problem = replace(problem, layout=Layout(dp=2, cp=2), pad_to_multiple=2)
        placed = PlacedProblem(BoundProblem(SPECS[family], problem), placed_problem)
        chosen = SPECS[family].trained_of(placed.batch.known)
        found = _counts(placed.partition, placed.bound.trained)
        if SPECS[family].trained_dim == "sequence":
            own = [int(chosen[list(placed.partition.sequences(dp))].sum()) for dp in range(2)]
            assert found.sum(1).tolist() == own
        else:
            shards = placed.partition.token_shards
            assert found.tolist() == [[int(chosen[shards[dp, cp]].sum()) for cp in range(2)] for dp in range(2)]
        assert placed.coverage == placed.bound.coverage | set(
            covered_sharding_goals(placed.partition, placed.bound.trained)
        )
        several += (found > 0).sum() > 1
    assert several >= 3


def test_a_loss_needs_the_labels_or_the_ids_that_it_gathers() -> None:
    distill = Draws(dense_candidate(SPECS["distill"], "logits"), "float32", "ids", 8, rich=True).all()
    for problem in distill:
        bound = BoundProblem(SPECS["distill"], problem)
        mask = bound.batch.fields["mask"]
        assert bound.trained.ids.tolist() == bound.batch.fields["teacher_indices"][mask].tolist()
    plain = Problem(
        spec="nll",
        head="logits",
        dtype="float32",
        lengths=(3, 2),
        masks=("all", "all"),
        hidden=1,
        vocab=5,
        forced_labels=((0, 4), (3, 2)),
    )
    bound = BoundProblem(SPECS["nll"], plain)
    assert bound.trained.sequence.tolist() == [0, 0, 1]
    assert bound.trained.position.tolist() == [0, 1, 0]
    assert bound.trained.ids[:, 0].tolist() == bound.batch.fields["labels"][[0, 1, 3]].tolist()
    assert bound.trained.ids[[0, 2], 0].tolist() == [4, 2]
