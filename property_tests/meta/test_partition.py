# SPDX-License-Identifier: Apache-2.0
"""Partitions say which rank owns what. Assembling is the inverse of sharding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lossgate import Layout, UsageError
from lossgate.base.layout import layouts_up_to
from lossgate.cases.assemble import assemble, assemble_tensor
from lossgate.declaration.contract import Placements
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.problems.partition import Dims, Partition, VocabShard, split_vocab
from lossgate.specs.outputs import LOGPROBS, Output


@pytest.mark.parametrize(
    ("vocab", "tp", "how", "shards"),
    [
        (5, 2, "balanced", [(0, 3, 0), (3, 5, 0)]),
        (5, 4, "balanced", [(0, 2, 0), (2, 3, 0), (3, 4, 0), (4, 5, 0)]),
        (5, 4, "chunked", [(0, 2, 0), (2, 4, 0), (4, 5, 0), (5, 5, 0)]),
        (5, 4, "padded", [(0, 2, 0), (2, 4, 0), (4, 5, 1), (5, 5, 2)]),
        (6, 2, "even", [(0, 3, 0), (3, 6, 0)]),
        (7, 1, "padded", [(0, 7, 0)]),
    ],
)
def test_vocabulary_splits(vocab: int, tp: int, how: str, shards: list[tuple[int, int, int]]) -> None:
    assert split_vocab(vocab, tp, how) == [VocabShard(*shard) for shard in shards]  # type: ignore[arg-type]


def test_more_ranks_than_rows() -> None:
    with pytest.raises(
        UsageError,
        match="layout larger than the problem: a vocabulary of 3 has too few rows for tp=4 ranks; use tp <= 3",
    ):
        split_vocab(3, 4, "balanced")
    with pytest.raises(UsageError, match="a vocabulary of 5 does not split evenly over tp=2"):
        split_vocab(5, 2, "even")


def test_zigzag() -> None:
    """Rank r owns pieces r and 2 cp - 1 - r of each padded sequence."""
    partition = Partition(Layout(cp=2), (8, 3), vocab=1)
    assert partition.padded_lengths == (8, 4)
    assert partition.token_shards[0, 0].tolist() == [0, 1, 6, 7, 8, 11]
    assert partition.token_shards[0, 1].tolist() == [2, 3, 4, 5, 9, 10]


def test_dp_splits_sequences_and_leaves_ranks_without() -> None:
    partition = Partition(Layout(dp=3), (2, 0, 3, 1), vocab=1)
    assert [list(partition.sequences(rank)) for rank in range(3)] == [[0, 1], [2], [3]]
    assert [list(Partition(Layout(dp=3), (4,), vocab=1).sequences(rank)) for rank in range(3)] == [[0], [], []]


def test_sequences_are_padded_to_a_multiple() -> None:
    partition = Partition(Layout(cp=2), (5, 0, 1), vocab=1, pad_to_multiple=3)
    assert partition.padded_lengths == (12, 0, 12)
    assert partition.real_tokens.tolist() == [0, 1, 2, 3, 4, 12]


LAYOUTS = st.sampled_from(list(layouts_up_to(12)))
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)
DIMS = st.sampled_from([("token", "hidden"), ("vocab", "hidden"), ("vocab",), ("token", "vocab"), ("token",), ()])


@settings(deadline=None)
@given(LAYOUTS, LENGTHS, st.sampled_from(["balanced", "chunked", "padded"]), st.integers(1, 3), DIMS)
def test_assembling_is_the_inverse_of_sharding(
    layout: Layout, lengths: tuple[int, ...], how: str, pad_to_multiple: int, dims: Dims
) -> None:
    vocab, hidden = layout.tp + 3, 2
    partition = Partition(layout, lengths, vocab, how, pad_to_multiple)  # type: ignore[arg-type]
    sizes = {"token": partition.tokens, "vocab": vocab, "hidden": hidden}
    tensor = torch.randn([sizes[dim] for dim in dims], dtype=torch.float64)
    rows = max(shard.padding for shard in partition.vocab_shards)
    padding = torch.zeros([rows if dim == "vocab" else sizes[dim] for dim in dims], dtype=torch.float64)
    parts = [partition.shard(tensor, dims, rank, padding) for rank in range(layout.ranks)]
    assert [tuple(part.shape) for part in parts] == [
        partition.local_shape(dims, rank, hidden) for rank in range(layout.ranks)
    ]
    whole, faults = assemble_tensor(parts, dims, {}, partition, hidden)
    assert torch.equal(whole, tensor)
    assert not faults


def test_sums_and_averages() -> None:
    partition = Partition(Layout(dp=2, tp=2), (1, 1), vocab=2)

    def whole(parts: list[Tensor], dims: Dims, placements: Placements) -> Tensor:
        return assemble_tensor(parts, dims, placements, partition, 1)[0]

    parts = [torch.tensor(float(n)) for n in (1, 2, 3, 4)]
    assert whole(parts, (), {"dp": "sum", "tp": "sum"}) == 10
    assert whole(parts, (), {"dp": "avg", "tp": "sum"}) == 5
    shards = [torch.tensor([float(n)]) for n in (1, 1, 2, 2)]
    assert whole(shards, ("token",), {"dp": "avg"}).tolist() == [0.5, 1.0]


def test_replicas_that_differ_are_a_fault() -> None:
    partition = Partition(Layout(tp=3), (1,), vocab=3)
    parts = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.25])]
    _, faults = assemble_tensor(parts, ("token",), {"tp": "replicate"}, partition, 1)
    assert faults == ("ranks 0 and 2 should hold the same, but differ by up to 0.25",)


def test_numbers_that_should_be_replicas_and_differ_are_a_fault() -> None:
    partition = Partition(Layout(dp=2, tp=2), (1, 1), vocab=2)
    parts = [torch.tensor(number) for number in (1.0, 1.0, 2.0, 2.5)]
    whole, faults = assemble_tensor(parts, (), {"dp": "sum", "tp": "replicate"}, partition, 1)
    assert whole == 3
    assert faults == ("ranks 2 and 3 should hold the same, but differ by up to 0.5",)


@pytest.mark.parametrize("dims", [("token",), ()], ids=["per token", "number"])
def test_replicas_are_compared_bit_by_bit(dims: Dims) -> None:
    partition = Partition(Layout(tp=2), (1,), vocab=2)

    def faults(first: float, second: float) -> int:
        parts = [torch.full([1] * len(dims), number) for number in (first, second)]
        return len(assemble_tensor(parts, dims, {"tp": "replicate"}, partition, 1)[1])

    assert faults(1.0, 1.0 + 2**-23) == 1  # neighbours in float32
    assert faults(0.0, 1e-45) == 1
    assert faults(float("nan"), float("nan")) == 0  # the judge reports NaN


def test_a_gradient_of_padding_rows_is_a_fault() -> None:
    partition = Partition(Layout(tp=2), (1,), vocab=3, vocab_split="padded")
    clean, no_faults = assemble_tensor([torch.ones(2), torch.tensor([1.0, 0.0])], ("vocab",), {}, partition, 1)
    dirty, faults = assemble_tensor([torch.ones(2), torch.tensor([1.0, 0.5])], ("vocab",), {}, partition, 1)
    assert clean.tolist() == dirty.tolist() == [1, 1, 1]
    assert not no_faults
    assert faults == ("rank 1: the 1 padding rows of its vocabulary should be zero, but are not",)


def test_a_gradient_of_padding_tokens_is_a_fault() -> None:
    """The values of padding tokens mean nothing. They are dropped in either case."""
    partition = Partition(Layout(), (1, 2), vocab=2, pad_to_multiple=2)
    candidate = dense_candidate(SPECS["nll"], "hidden")
    gradient = candidate.starts_at.gradients({"hidden": torch.zeros(4, 1)})["hidden"]

    def assembled(output: Output, padding: float) -> tuple[list[float], tuple[str, ...]]:
        part = torch.tensor([1.0, padding, 2.0, 3.0])
        shaped = part[:, None] if output is gradient else part
        found = assemble([{output: shaped}], candidate, partition, 1)
        return found.outputs[output].flatten().tolist(), found.faults.get(output, ())

    assert assembled(gradient, 0.0) == ([1, 2, 3], ())
    assert assembled(LOGPROBS, 7.0) == ([1, 2, 3], ())
    leak = ("1 entries of its padding tokens should be zero, but are not",)
    assert assembled(gradient, 0.5) == ([1, 2, 3], leak)
    assert assembled(gradient, float("nan")) == ([1, 2, 3], leak)


def test_chunks_of_a_rank_are_counted_with_its_padding() -> None:
    """A kernel sums chunk by chunk over the padded tokens that it is given."""
    partition = Partition(Layout(dp=2), (1, 3, 2), vocab=2, pad_to_multiple=4)

    def chunks(size: int | None) -> list[list[list[int]]]:
        return [[chunk.tolist() for chunk in rank] for rank in partition.real_token_chunks(size)]

    assert chunks(None) == [[[0, 1, 2, 3]], [[4, 5]]]
    assert chunks(4) == [[[0], [1, 2, 3]], [[4, 5]]]
    assert chunks(2) == [[[0], [1, 2], [3]], [[4, 5]]]  # a chunk of padding alone is left out
