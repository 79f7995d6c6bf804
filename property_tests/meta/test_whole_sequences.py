# SPDX-License-Identifier: Apache-2.0
"""Candidates that are given whole sequences, as frameworks have them before shift and split."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_bank.whole_sequences import INPUT_BUGS, OUTPUT_BUGS, InputBug, OutputBug, given_whole, returning_whole
from lossgate import Candidate, CandidateError, Contract, Layout, Outputs, Problem, candidate
from lossgate.cases.case import Case
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.problems.partition import Partition
from lossgate.problems.whole_sequences import Tokens, WholeSequences
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

BOTH: tuple[Tokens, ...] = ("rows", "packed")
EITHER = pytest.mark.parametrize("tokens", BOTH)


# What candidates get

PARTITION = Partition(Layout(dp=2), (3, 0, 2, 1), vocab=7, pad_to_multiple=2)
"""Padded to 4, 0, 2 and 2 tokens; two sequences for each dp rank."""

ROWS = {0: [[0, 1, 2], [-1, -1, -1]], 1: [[4, 5, -1], [6, -1, -1]]}
PACKED = {0: [[0, 1, 2, -1]], 1: [[4, 5, 6, -1]]}


@pytest.mark.parametrize(("tokens", "expected"), [("rows", ROWS), ("packed", PACKED)])
def test_where_tokens_lie(tokens: Tokens, expected: dict[int, list[list[int]]]) -> None:
    for rank, of_rank in expected.items():
        whole, width = WholeSequences.of(PARTITION, tokens, rank), len(of_rank[0])
        assert whole.token[:, :width].tolist() == of_rank
        assert (whole.token[:, width:] == -1).all()
        starts = [0, 4, 4, 6]
        predicted = [[-1 if t in starts or t < 0 else t - 1 for t in row] for row in of_rank]
        assert whole.predicted_at[:, :width].tolist() == predicted


def test_rows_may_be_wider_than_the_longest_sequence() -> None:
    partitions = [Partition(Layout(), (5, n, m), vocab=3) for n in range(4) for m in range(4)]
    widths = {WholeSequences.of(partition, "rows", 0).token.shape[1] - 5 for partition in partitions}
    assert widths == {0, 1, 2}


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(BOTH),
)
def test_packing_undoes_laying(lengths: list[int], dp: int, multiple: int, tokens: Tokens) -> None:
    """Every token but the last of a sequence comes back from where its prediction was laid."""
    partition = Partition(Layout(dp=dp, cp=2), tuple(lengths), vocab=3, pad_to_multiple=multiple)
    field = torch.arange(partition.tokens) + 1.0
    packed = torch.zeros_like(field)
    for rank in range(0, dp * 2, 2):
        whole = WholeSequences.of(partition, tokens, rank)
        packed += whole.pack(whole.lay(field, shifted=True))
        assert torch.equal(whole.lay(field, shifted=False)[whole.token >= 0], whole.token[whole.token >= 0] + 1.0)
        upstream = whole.lay_upstream(field)
        assert torch.equal(upstream, (whole.predicted_at + 1.0).clamp(min=0))
    last = torch.tensor([s + n - 1 for s, n in zip(partition.starts[:-1], lengths, strict=True) if n])
    kept = torch.isin(torch.arange(partition.tokens), partition.real_tokens) & ~torch.isin(
        torch.arange(partition.tokens), last
    )
    assert torch.equal(packed, torch.where(kept, field, 0.0))


PROBLEM = Problem(
    spec="clipped_pg",
    head="logprobs",
    dtype="float32",
    layout=Layout(dp=2, cp=2),
    lengths=(9, 4, 7, 0, 6, 5),
    masks=("all", "holes", "response", "all", "none", "all"),
    hidden=1,
    vocab=11,
    seed=5,
)


def record(tokens: Tokens, problem: Problem, world: SimulatedWorld) -> dict[int, Any]:
    """Returns what each rank is given."""
    got: dict[int, Any] = {}

    def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
        got[mesh.get_rank()] = inputs
        return inputs.logprobs.sum()

    axes = ("dp", "cp", "tp")
    _ = Case(candidate(problem.spec, head=problem.head, tokens=tokens, axes=axes)(kernel), problem, world).ranks
    return got


@EITHER
def test_whole_sequences_hold_what_shards_hold(make_world: MakeWorld, tokens: Tokens) -> None:
    """Shards of every cp rank, laid out by hand, are the whole sequences of their dp rank."""
    world = make_world("dp=2,cp=2")
    shards, given_ = record("shard", PROBLEM, world), record(tokens, PROBLEM, world)
    partition = PROBLEM.partition
    for rank, whole in given_.items():
        dp = rank // 2
        own = partition.sequences(dp)
        assert len(whole.input_ids) == (len(own) if tokens == "rows" else 1)
        for name in ("input_ids", "labels", "mask", "advantages", "prev_logprobs", "sequence"):
            parts = [(partition.token_shards[dp, cp], getattr(shards[2 * dp + cp], name)) for cp in range(2)]
            pack = torch.zeros(partition.tokens, dtype=parts[0][1].dtype)
            for index, part in parts:
                pack[index] = part
            for number, sequence in enumerate(own):
                start, length = partition.starts[sequence], partition.lengths[sequence]
                row = getattr(whole, name)
                row = row[number] if tokens == "rows" else row[0, start - partition.starts[own.start] :]
                if name in ("input_ids", "sequence"):
                    assert torch.equal(row[:length], pack[start : start + length])
                else:
                    assert torch.equal(row[1:length], pack[start : start + max(length - 1, 0)])
        assert torch.equal(whole.cu_seqlens, shards[rank].cu_seqlens)
        assert torch.equal(whole.logprobs, shards[rank].logprobs)  # this rank's own tokens
        assert torch.equal(whole.advantages, given_[2 * dp].advantages)  # equal on all cp ranks


@EITHER
def test_entries_without_a_meaning_are_there_to_be_seen(make_world: MakeWorld, tokens: Tokens) -> None:
    """The mask of a first token may be true; that of padding is false."""
    first: list[bool] = []
    for seed in range(8):
        for rank, whole in record(tokens, replace(PROBLEM, seed=seed), make_world("dp=2,cp=2")).items():
            where = WholeSequences.of(PROBLEM.partition, tokens, rank)
            first += whole.mask[(where.token >= 0) & (where.predicted_at < 0)].tolist()
            assert not whole.mask[where.token < 0].any()
    assert len(set(first)) == 2


@pytest.mark.parametrize(
    ("spec", "head", "field"),
    [
        ("nll", "logprobs", "real"),
        ("dpo", "logprobs", "reference_logprobs"),
        ("distill", "logits", "teacher_indices"),
        ("value", "values", "mask"),
    ],
)
@EITHER
def test_fields_that_are_not_shifted(make_world: MakeWorld, spec: str, head: str, field: str, tokens: Tokens) -> None:
    """What a model gave, or what an option aligns, stays where it is."""
    world = make_world("cp=2")
    shapes = {"group_size": 2} if spec == "dpo" else {}
    problem = replace(PROBLEM, spec=spec, head=head, layout=world.layout, **shapes)
    given_: dict[str, Any] = {}

    def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
        given_[f"{tokens} {mesh.get_rank()}"] = getattr(inputs, field)
        return getattr(inputs, head).sum()

    case = Case(candidate(spec, head=head, tokens=tokens, axes=("cp",))(kernel), problem, world)
    _ = case.ranks
    where, found = WholeSequences.of(problem.partition, tokens, 0), given_[f"{tokens} 0"]
    there = where.token >= 0
    assert torch.equal(found[there].double(), case.placed.batch.fields[field][where.token[there]].double())


# Right and wrong candidates

SETTINGS = Settings(examples=12, rounds=8, shrink_calls=1)


@cache
def shards_of(spec: str) -> Candidate:
    return dense_candidate(SPECS[spec], "logits" if "logits" in SPECS[spec].inputs else next(iter(SPECS[spec].inputs)))


def verdict_on(candidate: Candidate, layout: str) -> Verdict:
    """Returns the verdict, which is not that on an exception."""
    result = run_cell(Cell(candidate, Layout.parse(layout), "float32"), SETTINGS)
    assert not any("raised" in reason for reason in result.reasons), result.reasons
    return result.verdict


def group(spec: str, *values: Any) -> Any:
    """Tests of a spec run in one worker, because they share decks: with each other, and with
    ``property_tests/test_specs.py``.
    """
    return pytest.param(spec, *values, id="-".join((spec, *values)), marks=pytest.mark.xdist_group(spec))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [group(spec) for spec in SPECS])
@EITHER
def test_a_right_candidate_agrees(spec: str, tokens: Tokens) -> None:
    assert verdict_on(given_whole(shards_of(spec), tokens), "dp=2,cp=2,tp=2") is Verdict.AGREE


HAVE_NO_SHIFTED_FIELDS = ("dpo", "nll")


@pytest.mark.slow(but=8)
@pytest.mark.parametrize(
    ("spec", "bug"),
    [
        group(spec, bug)
        for spec in ("clipped_pg", "dpo", "grpo", "nll")
        for bug in INPUT_BUGS
        if not (bug == "fields not shifted" and spec in HAVE_NO_SHIFTED_FIELDS)
    ],
)
@EITHER
def test_bugs_of_shift_and_split_disagree(spec: str, bug: InputBug, tokens: Tokens) -> None:
    if bug == "padding before a sequence trained":  # in rows, nothing follows the padding
        tokens = "packed"
    assert verdict_on(given_whole(shards_of(spec), tokens, bug), "cp=2") is Verdict.DISAGREE


@pytest.mark.parametrize("seed", range(4))
def test_padding_between_sequences_is_asked_for_on_a_single_rank(seed: int) -> None:
    """Before it was a coverage goal, a kernel that trains it agreed in 4 of 12 cells."""
    wrong = given_whole(shards_of("value"), "packed", "padding before a sequence trained")
    found = run_cell(Cell(wrong, Layout(), "float32"), Settings(shrink_calls=0, seed=seed))
    assert found.verdict is Verdict.DISAGREE


@pytest.mark.slow(but=1)
@pytest.mark.xdist_group("token_logprobs")
@EITHER
def test_whole_sequences_may_be_returned(tokens: Tokens) -> None:
    right = returning_whole(given_whole(shards_of("token_logprobs"), tokens))
    assert verdict_on(right, "dp=2,cp=2,tp=2") is Verdict.AGREE


@pytest.mark.xdist_group("token_logprobs")
@pytest.mark.parametrize("bug", OUTPUT_BUGS)
@EITHER
def test_bugs_of_what_is_returned_disagree(tokens: Tokens, bug: OutputBug) -> None:
    wrong = returning_whole(given_whole(shards_of("token_logprobs"), tokens), bug)
    assert verdict_on(wrong, "cp=2") is Verdict.DISAGREE


@EITHER
def test_the_shape_of_what_is_returned(make_world: MakeWorld, tokens: Tokens) -> None:
    problem = Problem(
        spec="token_logprobs",
        head="logits",
        dtype="float32",
        layout=Layout(cp=2),
        lengths=(4, 3),
        masks=("all", "all"),
        hidden=1,
        vocab=3,
        cotangent="logprobs",
    )
    declare = candidate(
        "token_logprobs",
        head="logits",
        tokens=tokens,
        axes=("cp",),
        contract=Contract(logprobs={"cp": "replicate"}),
        name="of_shard",
    )
    of_shard = declare(lambda inputs, options, mesh: Outputs(logprobs=inputs.logits.sum(1)))
    with pytest.raises(CandidateError) as error:
        _ = Case(of_shard, problem, make_world("cp=2")).ranks
    shape = list(WholeSequences.of(problem.partition, tokens, 0).token.shape)
    assert f"returned logprobs of shape [4]; expected {shape}" in str(error.value)
