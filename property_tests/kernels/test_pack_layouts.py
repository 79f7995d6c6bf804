# SPDX-License-Identifier: Apache-2.0
"""Tests of what goes in and out of a pack: rows, packed tokens, numbers of many dims, and tails."""

import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fused_losses import Pack
from lossgate import Layout
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.packs import FORMS, FakeGroup, packed, starts

MakeWorld = Callable[..., SimulatedWorld]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_labels_do_not_wrap_around() -> None:
    """The last token of a sequence has no label.

    Rolled labels end with another token instead: in NeMo-RL's kernel the first one of the row, in
    AReaL the first one of the next sequence.
    """
    ids = torch.tensor([[1, 2, 3, 9], [4, 5, 9, 9], [6, 9, 9, 9]])
    pack = Pack.of(starts([3, 2, 1]), starts([4, 2, 2]))
    expected = [2, 3, -100, -100, 5, -100, -100, -100]
    stream = torch.tensor([1, 2, 3, 9, 4, 5, 6, 9])
    for given in (ids, stream, stream[None], stream[stream != 9], stream[None, stream != 9]):
        assert pack.labels(given).tolist() == expected
    assert pack.from_rows(ids, shift=0).tolist() == [1, 2, 3, 0, 4, 5, 6, 0]


PACKS = {
    "padded": ([4, 1, 7, 2], [12, 12, 12, 24], {}),
    "with empty sequences": ([0, 4, 0, 7, 0], [0, 12, 12, 12, 0], {}),
    "of one sequence": ([5], [12], {}),
    "of an empty sequence": ([0], [12], {}),
    "of none": ([], [], {}),
    "with a dummy sequence, as AReaL's": ([4, 7, 9], [12, 12, 12], {"tail": 1}),
    "of one sequence and a dummy one": ([4, 12], [12, 12], {"tail": 1}),
    "with padded lengths as true ones, as NeMo-RL's": ([12, 12, 36], [12, 12, 36], {"row_width": 12}),
    "of one sequence with its padded length": ([24], [24], {"row_width": 9}),
    "with both": ([12, 24, 12], [12, 24, 12], {"tail": 1, "row_width": 9}),
}
"""True and padded lengths, which 1 to 3 ranks can share, and what is declared."""


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("form", ["rows", *FORMS])
@pytest.mark.parametrize("name", PACKS)
def test_entries_reach_their_tokens(name: str, form: str, shape: tuple[int, ...]) -> None:
    """Each rank's token at position t of sequence b gets entry ``t + shift`` of row b, or nothing.

    So does the gradient.
    """
    lengths, padded, declared = PACKS[name]
    sequences = len(lengths) - declared.get("tail", 0)
    width = declared.get("row_width", max(lengths, default=0))
    rows = numbers(sequences, width, *shape)
    stored = torch.nn.functional.pad(rows, [0, 0] * len(shape) + [0, 40, 0, 1])  # In the stream, tails have entries.
    given = rows.clone() if form == "rows" else packed(stored, lengths, padded, form)
    given.requires_grad_()
    for cp in (1, 2, 3):
        for group in FakeGroup.all(cp):
            pack = Pack.of(starts(lengths), starts(padded), cp_group=group, **declared)
            for shift in (0, 1, 3):  # 3 for multi-token prediction; some sequences are shorter
                found = pack.from_rows(given, shift=shift, fill=5.0)
                known = torch.zeros(len(found), dtype=torch.bool)
                for i, (b, t) in enumerate(zip(pack.sequence.tolist(), pack.position.tolist(), strict=True)):
                    known[i] = b < sequences and t + shift < min(width, lengths[b])
                    expected = rows[b, t + shift] if known[i] else torch.full(shape, 5.0, dtype=torch.float64)
                    assert torch.equal(found[i], expected)
                if found.requires_grad:
                    (gradient,) = torch.autograd.grad(found.square().sum(), given)
                    reached = gradient != 0
                    assert torch.equal(gradient, torch.where(reached, 2 * given.detach(), 0.0))
                    assert int(reached.sum()) == int(known.sum()) * torch.Size(shape).numel()


def test_labels_further_ahead_by_hand() -> None:
    """For multi-token prediction at depth 1 and 3, over the ends of pieces and of sequences."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0]])
    expected = {
        2: ([3, 4, -100, -100, 9, -100], [5, 6, -100, -100, -100, -100]),
        4: ([5, 6, -100, -100, -100, -100], [-100] * 6),
    }
    for shift, ranks in expected.items():
        for group, labels in zip(FakeGroup.all(2), ranks, strict=True):
            pack = Pack.of(starts([6, 3]), starts([8, 4]), cp_group=group)
            assert pack.labels(ids, shift=shift).tolist() == labels
            assert pack.labels(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9]), shift=shift).tolist() == labels


@hypothesis.given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(FORMS),
    st.data(),
)
def test_packed_ids_have_the_labels_of_rows(
    lengths: list[int], cp: int, filler: int, form: str, data: st.DataObject
) -> None:
    """The labels of packed ids are those of rows on every rank, with or without a tail."""
    pieces = 2 * cp if cp > 1 else 1
    padded = [-(-length // pieces) * pieces for length in lengths]
    padded[-1] += filler * pieces
    tail = data.draw(st.integers(0, len(lengths)))
    ids = torch.randint(11, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    stream = packed(ids, lengths, padded, form)
    for group in FakeGroup.all(cp):
        pack = Pack.of(starts(lengths), starts(padded), cp_group=group, tail=tail)
        assert torch.equal(pack.labels(stream), pack.labels(ids[: len(lengths) - tail]))


def test_rows_may_be_narrower_than_an_inflated_last_sequence() -> None:
    """The sizes are those of a crash in NeMo-RL: rows of 7040, and a last length of 9472."""
    ids = torch.randint(11, (2, 7040), generator=torch.Generator().manual_seed(0))
    pack = Pack.of(starts([512, 9472]), row_width=7040)
    labels = pack.labels(ids)
    assert torch.equal(labels[512 : 512 + 7039], ids[1, 1:])
    assert labels[512 + 7039 :].unique().tolist() == [-100]
    assert int(pack.real.sum()) == 512 + 7040


def test_what_a_tail_declares_is_padding() -> None:
    """Neither a dummy sequence nor what is beyond the rows' width counts as real."""
    pack = Pack.of(starts([3, 2, 5, 4]), tail=1, row_width=3)
    assert pack.lengths.tolist() == [3, 2, 3, 0]
    assert (pack.sequences, pack.rows, pack.longest) == (4, 3, 3)
    assert pack.real.tolist() == [True] * 8 + [False] * 6
    assert pack.to_rows(torch.ones(14), 4, None).tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]


SHAPES = ((), (3,), (2, 3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["single", "cp=2", "cp=3"])
def test_gathering_undoes_splitting_and_its_gradient_is_not_multiplied(
    make_world: MakeWorld, layout: str, shape: tuple[int, ...]
) -> None:
    """A loss that every rank computes in full needs no division by cp.

    In NeMo-RL and AReaL, the gradient through the gather is too large by cp and must be corrected.
    """
    cp = Layout.parse(layout).cp
    true, padded = starts([4, 0, 7, 1]), starts([12, 0, 12, 12])
    whole_pack, coefficients = numbers(36, *shape), numbers(36, *shape, seed=1)

    def body(context: RankContext) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        group = context.mesh.get_group("cp")
        pack = Pack.of(true, padded, cp_group=group)
        local = pack.split(whole_pack).requires_grad_()
        assert torch.equal(pack.gather(local.detach(), group), whole_pack)
        assert torch.equal(pack.gather(local.detach()[None], group), whole_pack)
        rows = pack.to_rows(local, 7, group)
        (of_rows,) = torch.autograd.grad(rows.square().sum(), local)
        (of_pack,) = torch.autograd.grad((pack.gather(local, group) * coefficients).sum(), local)
        real = pack.real.view(-1, *[1] * len(shape))
        return rows.detach(), of_rows, torch.where(real, 2 * local.detach(), 0.0), of_pack, pack.split(coefficients)

    world = make_world(layout)
    for rows, of_rows, expected, of_pack, own_coefficients in world.run(body):
        torch.testing.assert_close(of_rows, expected)
        assert torch.equal(of_pack, own_coefficients)
        assert torch.equal(rows[2], whole_pack[12:19])
        assert not rows[3, 1:].any()
        assert not rows[1].any()
    gathers = [logged for logged in world.log if logged.rank == 0]
    assert len(gathers) == (4 if cp > 1 else 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["single", "cp=2", "cp=3"])
@pytest.mark.parametrize("shift", [1, 2])
def test_rows_with_leading_zeros_are_undone_and_made(
    make_world: MakeWorld, shift: int, layout: str, shape: tuple[int, ...]
) -> None:
    """``to_rows(shift=1)`` makes NeMo-RL's ``prev_logprobs``: of a token, in its own column.

    A value without a next token has no column. What is at padding does not matter, nor does its
    gradient.
    """
    lengths, rows = [4, 0, 7, 1], numbers(4, 9, *shape)
    rows[:, :shift] = 0
    for i, length in enumerate(lengths):
        rows[i, length:] = 0

    def body(context: RankContext) -> tuple[Tensor, Tensor, Tensor]:
        group = context.mesh.get_group("cp")
        pack = Pack.of(starts([*lengths, 12]), starts([12, 0, 12, 12, 12]), cp_group=group, tail=1)
        local = pack.from_rows(rows, shift=shift, fill=float("nan")).requires_grad_()
        found = pack.to_rows(local, 9, group, shift=shift)
        (gradient,) = torch.autograd.grad(found.sum(), local)
        assert torch.equal(pack.from_rows(found.detach(), shift=shift, fill=float("nan")).isnan(), local.isnan())
        return found.detach(), gradient, (~local.isnan()).to(gradient)

    for found, gradient, expected in make_world(layout).run(body):
        assert torch.equal(found, rows)
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_pack_is_split_as_models_hold_it(shape: tuple[int, ...]) -> None:
    """``[T, ...]``, a batch of one, and Megatron's ``[T, 1, ...]`` by name."""
    whole = numbers(12, *shape)
    for group in FakeGroup.all(3):
        pack = Pack.of(starts([5]), starts([12]), cp_group=group)
        for found in (pack.split(whole), pack.split(whole[None]), pack.split(whole[:, None], layout="sbh")):
            assert torch.equal(found, whole[pack.index])


def of_four(cp: int = 1, **declared: Any) -> Pack:
    """Returns a pack of 4 sequences of 20 tokens, 28 with padding; the longest has 9."""
    group: Any = FakeGroup(cp, 0)
    return Pack.of(starts([4, 5, 9, 2]), starts([4, 8, 12, 4]), cp_group=group, **declared)


ROWS = (
    "expected 4 rows [4, width, ...], one for each sequence, or packed tokens [T, ...] or [1, T, ...] "
    "with T=28, or 20 without padding"
)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no start": (
        lambda: Pack.of(torch.tensor([1, 3])),
        "cu_seqlens [1, 3]: expected 0 first, and then numbers that never decrease",
    ),
    "lengths that shrink": (
        lambda: Pack.of(torch.tensor([0, 4]), torch.tensor([0, -4])),
        "cu_seqlens_padded [0, -4]: expected 0 first, and then numbers that never decrease",
    ),
    "lengths that are no integers": (
        lambda: Pack.of(torch.tensor([0, 2.5])),
        "cu_seqlens [2] of torch.float32: expected [S + 1] integers",
    ),
    "another number of sequences with padding": (
        lambda: Pack.of(starts([4]), starts([4, 4])),
        "cu_seqlens of 1 sequences and cu_seqlens_padded of 2: expected [S + 1] for both",
    ),
    "too little padding": (
        lambda: Pack.of(starts([4]), starts([3])),
        "sequence 0 has 3 tokens with padding and 4 without",
    ),
    "a length that ranks cannot share": (
        lambda: Pack.of(starts([4, 6]), cp_group=FakeGroup(2, 0)),  # type: ignore[arg-type]
        "sequence 1 has 6 tokens, expected a multiple of 4",
    ),
    "another number of tokens": (lambda: Pack.of(starts([4]), tokens=5), "tokens 5: cu_seqlens_padded ends at 4"),
    "a tail that is too long": (lambda: Pack.of(starts([4]), tail=2), "tail 2: expected how many of the 1 sequences"),
    "a negative tail": (lambda: Pack.of(starts([4]), tail=-1), "tail -1: expected an integer from 0"),
    "a negative width": (
        lambda: Pack.of(starts([4]), row_width=-1),
        "row_width -1: expected an integer from 0, the number of columns",
    ),
    "a shift backward": (
        lambda: of_four().from_rows(torch.ones(4, 9), shift=-1),
        "shift -1: expected an integer from 0, or 1 for entries that belong to the next token, or more for tokens",
    ),
    "half a shift": (
        lambda: of_four().from_rows(torch.ones(4, 9), shift=1.5),  # type: ignore[arg-type]
        "shift 1.5: expected an integer",
    ),
    "no shift of labels": (
        lambda: of_four().labels(torch.ones(4, 9).long(), shift=0),
        "shift 0: expected an integer from 1, tokens ahead; 1 for the next token",
    ),
    "another shift of rows out": (
        lambda: of_four().to_rows(torch.ones(28), 9, None, shift=-1),
        "shift -1: expected an integer from 0",
    ),
    "too few rows": (
        lambda: of_four().from_rows(torch.ones(3, 9), shift=1),
        f"rows [3, 9]: {ROWS}; if sequences at the end have no row, declare Pack.of(..., tail=...)",
    ),
    "too few rows for empty sequences": (
        lambda: Pack.of(starts([4, 0])).from_rows(torch.ones(1, 5), shift=1),
        "rows [1, 5]: expected 2 rows [2, width, ...]",
    ),
    "too many rows": (
        lambda: of_four().labels(torch.ones(5, 9).long()),
        f"rows [5, 9]: {ROWS}",
    ),
    "a row for the tail": (
        lambda: of_four(tail=1).from_rows(torch.ones(4, 9), shift=1),
        "rows [4, 9]: expected 3 rows [3, width, ...], one for each sequence but the tail",
    ),
    "rows that are too narrow": (
        lambda: of_four().labels(torch.ones(4, 8).long()),
        "expected at least 9 columns, as many as the longest sequence has tokens; if lengths contain padding, declare",
    ),
    "predictions without a last column": (
        lambda: of_four().from_rows(torch.ones(4, 8), shift=0),
        "if these are predictions, append a column: F.pad(rows, (0, 1))",
    ),
    "rows of another width than declared": (
        lambda: of_four(row_width=7).from_rows(torch.ones(4, 9), shift=1),
        "rows [4, 9]: expected the width 7 that Pack.of was given as row_width",
    ),
    "hidden states that are too narrow": (
        lambda: of_four().from_rows(torch.ones(4, 7, 3), shift=0),
        "rows [4, 7, 3]: expected at least 9 columns",
    ),
    "packed ids of another length": (
        lambda: of_four().labels(torch.ones(1, 27).long()),
        f"rows [1, 27]: {ROWS}",
    ),
    "packed ids in one dim of another length": (
        lambda: of_four().labels(torch.ones(27).long()),
        f"rows [27]: {ROWS}",
    ),
    "ids of this rank alone": (lambda: of_four(cp=2).labels(torch.ones(14).long()), "rows [14]: expected 4 rows"),
    "one number": (lambda: of_four().from_rows(torch.ones(()), shift=0), "rows []: expected 4 rows"),
    "ids with a dim too many": (
        lambda: of_four().labels(torch.ones(28, 2).long()),
        "input_ids [28, 2]: expected one id for each token, as [B, width], [T] or [1, T]",
    ),
    "ids in a dtype without -100": (
        lambda: of_four().labels(torch.ones(28).to(torch.uint8)),
        "input_ids of torch.uint8: expected ids in int64, int32 or int16; call .long()",
    ),
    "ids in float": (lambda: of_four().labels(torch.ones(28)), "input_ids of torch.float32: expected ids in int64"),
    "a whole pack of another length": (
        lambda: Pack.of(starts([4])).split(torch.ones(5)),
        "whole [5]: expected the 4 tokens of the padded pack",
    ),
    "a whole pack of another length in a batch of one": (
        lambda: of_four().split(torch.ones(1, 27, 3)),
        "whole [1, 27, 3]: expected the 28 tokens of the padded pack",
    ),
    "a batch of several packs": (
        lambda: of_four().split(torch.ones(28, 2, 3), layout="sbh"),
        "whole [28, 2, 3]: layout 'sbh' expects [28, 1, ...]",
    ),
    "an unknown layout": (
        lambda: of_four().split(torch.ones(28), layout="shb"),  # type: ignore[arg-type]
        "layout 'shb': expected 'bsh' for [batch, sequence, hidden], or 'sbh'",
    ),
    "a group other than the pack's": (
        lambda: of_four(cp=2).gather(torch.ones(14), None),
        "cp_group of 1 ranks: this pack is split over 2",
    ),
    "another number of local tokens": (
        lambda: of_four().gather(torch.ones(27), None),
        "local [27]: expected a number for each of 28 tokens",
    ),
    "too few columns": (
        lambda: of_four().to_rows(torch.ones(28), 8, None),
        "width 8: the longest sequence has 9 tokens; expected at least as many columns",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_match_the_sequences_is_refused(name: str) -> None:
    """NeMo-RL checks none of this: integer division drops tails, and rows are cut in silence."""
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
