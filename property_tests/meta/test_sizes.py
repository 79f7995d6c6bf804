# SPDX-License-Identifier: Apache-2.0
"""Tests of problems whose sizes the user gives: ``--size``, or ``sizes`` of the settings."""

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_bank.bugs import Bug, cross_entropy_with, on_inputs
from kernel_bank.cross_entropy import STYLES, make
from lossgate import Layout
from lossgate.adequacy.deck import Deck
from lossgate.adequacy.entry import Entry
from lossgate.base.errors import UsageError
from lossgate.base.shape import Shape
from lossgate.cases.case import Case
from lossgate.declaration.candidate import Candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings, load_settings
from lossgate.engine.verdict import judge
from lossgate.inputs import NllHidden
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.reports.describe import size_lines
from lossgate.worlds import SimulatedWorld

SIZE = "264x16x4100"
"""The smallest that is judged some tokens at a time, for its logits."""

WIDE = "32x264x4100"
"""Another, for its lm-head. It has an eighth of the logits, so that it is judged in less time."""

RIGHT = make(STYLES["float32"][1])


def verified(candidate: Candidate, *sizes: str, layout: str = "single", **settings: int) -> CellResult:
    return run_cell(Cell(candidate, Layout.parse(layout), "float32"), Settings(sizes=sizes, **settings))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layout", ["single", "dp=2,tp=2"])
def test_a_problem_of_each_size_is_tried_with_its_margins_shown(layout: str) -> None:
    found = verified(RIGHT, SIZE, WIDE, layout=layout)
    assert found.verdict is Verdict.AGREE, found.reasons
    sizes = [(case.problem.tokens, case.problem.hidden, case.problem.vocab) for case in found.cases]
    assert sizes[-2:] == [(264, 16, 4100), (32, 264, 4100)]
    lines = list(size_lines(found.record))
    assert [line.partition(", as shares of the limits: ")[0] for line in lines] == [
        "at T=264, H=16, V=4,100",
        "at T=32, H=264, V=4,100",
    ]
    outputs = found.cases[-1].comparisons
    assert lines[-1].endswith(", ".join(f"{one.output} {one.margin:.2f}" for one in outputs))
    assert {"loss", "grad of hidden", "grad of weight"} <= {str(one.output) for one in outputs}


def test_what_only_that_size_shows_disagrees() -> None:
    def low_bits(inputs: NllHidden, mesh: object) -> NllHidden:
        return replace(inputs, labels=inputs.labels % 2048) if inputs.vocab_size == 4100 else inputs

    wrong = Bug("labels of 11 bits", "the labels of one vocabulary are cut", on_inputs(low_bits)).put_into(RIGHT)
    assert verified(wrong).verdict is Verdict.AGREE
    found = verified(wrong, WIDE, shrink_calls=0)
    assert found.verdict is Verdict.DISAGREE
    assert found.failure is not None
    assert found.failure.problem.vocab == 4100


def test_a_property_that_needs_no_adequacy_is_held_on_each_size() -> None:
    own = replace(PROPERTIES["agreement"], name="own", needs_adequacy=False)
    found = run_cell(Cell(RIGHT, Layout(), "float32", own), Settings(sizes=("64x8x32",), examples=1))
    assert found.verdict is Verdict.AGREE, found.reasons
    assert [(case.problem.tokens, case.problem.hidden, case.problem.vocab) for case in found.cases[1:]] == [(64, 8, 32)]


def test_no_size_is_drawn_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as long to draw as its tensors are large."""
    of_shape, drawn = Deck.of_shape, list[Shape]()

    def counted(deck: Deck, shape: Shape) -> list[Entry]:
        drawn.append(shape)
        return of_shape(deck, shape)

    monkeypatch.setattr(Deck, "of_shape", counted)
    sizes = [Shape.of_size(size) for size in ("64x8x101", "64x8x103")]
    always = cross_entropy_with(STYLES["float32"][1], "loss x1.01")
    assert verified(always, "64x8x101", "64x8x103", shrink_calls=0).verdict is Verdict.DISAGREE
    assert not set(sizes).intersection(drawn)

    def cut(inputs: NllHidden, mesh: object) -> NllHidden:
        return replace(inputs, labels=inputs.labels * 0) if inputs.vocab_size == 101 else inputs

    at_101 = Bug("labels of one vocabulary", "they are all 0", on_inputs(cut)).put_into(RIGHT)
    assert verified(at_101, "64x8x101", "64x8x103", shrink_calls=0).verdict is Verdict.DISAGREE
    assert [shape for shape in drawn if shape in sizes] == sizes[:1]


def test_a_size_that_is_made_to_fit_is_not_kept_with_the_deck() -> None:
    """Its tensors would be held as long as the deck is."""
    deck, layout = Deck(RIGHT, "float32", 0), Layout(tp=2)
    (placed,) = deck.on(layout, ["even"], deck.of_shape(Shape.of_size("32x264x4101")))
    assert placed.entry.bound.problem.vocab == 4102
    held = weakref.ref(placed.entry.bound)
    del placed
    gc.collect()
    assert held() is None


def test_a_size_that_cannot_be_tried_makes_no_further_rounds() -> None:
    """More problems do not help."""
    found = verified(RIGHT, "8x264x4100", rounds=4)
    assert (found.record.untried, judge(found.run).gaps) == (("8x264x4100",), ())
    assert len(found.cases) == len(verified(RIGHT).cases)


def test_a_loss_that_needs_all_logits_at_once_says_so() -> None:
    found = verified(dense_candidate(SPECS["softcap"], "hidden"), SIZE)
    assert found.verdict is Verdict.INCONCLUSIVE
    (reason,) = found.reasons
    assert reason == (
        f"size {SIZE} was not tried: the loss uses the logits themselves, so all of them are held at once; "
        "leave this size out for the candidate, or give a smaller one"
    )
    assert verified(dense_candidate(SPECS["softcap"], "hidden"), "64x8x32").verdict is Verdict.AGREE


def test_a_size_that_the_layout_cannot_split_says_so() -> None:
    found = verified(replace(RIGHT, supports={**RIGHT.supports, "vocab_split": ("balanced",)}), "64x8x2", layout="tp=3")
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reasons == (
        "size 64x8x2 was not tried: it does not fit on the layout; give more tokens, or a larger vocabulary",
    )


def test_a_size_of_which_nothing_is_trained_says_so() -> None:
    found = verified(RIGHT, "8x264x4100")
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reasons == ("size 8x264x4100 was not tried: none of its tokens is trained; give more tokens",)


@pytest.mark.parametrize("size", ["4096", "4096x1024", "4096x1024x", "0x8x8", "7x8x8", "64x0x8", "64 x 8 x 8"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(UsageError) as error:
        Settings(sizes=(size,))
    assert str(error.value) == (
        f"sizes={(size,)!r}: size {size!r}: expected tokens, width of the hidden states and vocabulary, such as "
        "4096x1024x32768, with 8 tokens at least"
    )


def test_sizes_stand_in_pyproject_toml_and_a_flag_wins(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[tool.lossgate.profiles.nightly]\nsizes = ["{SIZE}"]\n')
    assert load_settings("nightly", tmp_path).sizes == (SIZE,)
    assert load_settings("ci", tmp_path).sizes == ()
    assert load_settings("nightly", tmp_path, sizes=("64x8x32",)).sizes == ("64x8x32",)


@pytest.mark.parametrize(("size", "hangs"), [("64x16x4100", True), (WIDE, False)])
def test_a_kernel_has_more_time_for_a_large_problem(size: str, hangs: bool) -> None:
    def slowly(inputs: NllHidden, mesh: object) -> NllHidden:
        if inputs.vocab_size == 4100:
            time.sleep(1.5)  # apart from 0.5 s, from twice that, and from ten times that
        return inputs

    slow = Bug("slow", "one vocabulary takes 1.5 seconds", on_inputs(slowly)).put_into(RIGHT)
    bound = Deck(slow, "float32", 0).of_shape(Shape.of_size(size))[0].bound
    world = SimulatedWorld(Layout.parse("dp=2"), timeout=0.5)
    try:
        case = Case(slow, replace(bound.problem, layout=world.layout), world, bound)
        assert run_case(case, PROPERTIES["agreement"]).failure == ("Hang" if hangs else None)
    finally:
        world.close()
