# SPDX-License-Identifier: Apache-2.0
"""A deck and what it shows are found once, and kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kernel_bank.cross_entropy import STYLES, make
from lossgate import Candidate, Layout
from lossgate.adequacy import choice, store
from lossgate.adequacy import deck as decks
from lossgate.adequacy.deck import WANTED, Deck
from lossgate.adequacy.entry import Entry, Placed
from lossgate.adequacy.entry_drawer import EntryDrawer
from lossgate.cases.oracle import Oracle
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.problems.partition import VocabSplit
from lossgate.specs.outputs import Output

ROOT = Path(__file__).parents[2]
RIGHT = make(STYLES["float32"][0])
OURS = {one.name: one for one in load_candidates(str(ROOT / "ci/candidates/ours.py"))}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps what is found in a folder of the test, and forgets the decks of this process."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "store"))
    monkeypatch.setenv(store.ANEW, "yes")
    monkeypatch.setattr(decks, "_DECKS", type(decks._DECKS)())
    return tmp_path / "store"


def refuse(*given: object) -> None:
    raise AssertionError("nothing is found anew")


def contents(entries: list[Entry]) -> list[object]:
    def plain(entry: Entry) -> object:
        return entry.bound.problem, entry.drawn, replace(entry.draws, candidate=RIGHT), dict(entry.kills)

    return [plain(entry) for entry in entries]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "fused_linear_clipped_pg"])
def test_a_deck_that_was_kept_is_the_one_that_was_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[object]:
        deck = Deck(OURS[name], "bfloat16", 0)
        goal = next(iter(deck.entries[0].bound.coverage))
        several = [deck.entries, deck.reaching(goal, 1), deck.more(0)]
        drawn = deck.drawn_for(goal, Layout())
        return [*map(contents, map(list, several)), deck.equivalent, deck.alike, drawn]

    drawn = found()
    monkeypatch.setattr(EntryDrawer, "entry", refuse)
    monkeypatch.setattr(EntryDrawer, "problems", refuse)
    assert found() == drawn


def test_what_is_drawn_for_one_declaration_is_not_taken_for_another() -> None:
    """Which problems may show a mistake of a property hangs on the precision, too."""
    deck = Deck(RIGHT, "float32", 0)
    assert deck.sought("show a mistake", "float32 sums", None, lambda entry: False) == []
    assert len(deck.sought("show a mistake", "bfloat16 sums", None, lambda entry: True)) == WANTED


def test_what_is_drawn_for_a_property_hangs_on_all_code(monkeypatch: pytest.MonkeyPatch) -> None:
    given, kept = dict[str, str](), store.kept

    def noted(key: str, *others: Any, of: str, **more: Any) -> Any:
        given[key.rpartition("\n")[2]] = of
        return kept(key, *others, of=of, **more)

    monkeypatch.setattr(store, "kept", noted)
    Deck(RIGHT, "float32", 0).sought("show a mistake", "float32 sums", None, lambda entry: True)
    assert given == {"show a mistake float32 sums": "all"}


@pytest.mark.slow
def test_a_choice_of_another_deck_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came along, and one that was drawn on another machine, may differ."""
    chosen = choice.choice_of(RIGHT, Deck(RIGHT, "float32", 0), "float32")
    without = list(chosen.problems)[1:]
    other = Deck(RIGHT, "float32", 0)
    entries = [entry for entry in other.entries if entry.drawn.to_json() in without]
    monkeypatch.setattr(Deck, "entries", property(lambda self: entries))
    anew = choice.choice_of(RIGHT, other, "float32")
    assert anew.problems.keys() <= {*without}


def verified(candidate: Candidate, layout: str = "dp=2") -> CellResult:
    return run_cell(Cell(candidate, Layout.parse(layout), "float32"), Settings(examples=3))


@pytest.mark.slow
def test_a_cell_is_the_same_with_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = verified(RIGHT)
    decks._DECKS.clear()
    monkeypatch.setattr(choice, "_choose", refuse)
    monkeypatch.setattr(Deck, "_draw_first", refuse)
    again = verified(RIGHT)
    assert again.verdict is drawn.verdict is Verdict.AGREE
    assert [case.problem for case in again.cases] == [case.problem for case in drawn.cases]
    assert replace(again.run.mistakes, seconds=0.0) == replace(drawn.run.mistakes, seconds=0.0)
    assert drawn.record.mistakes_shown > 100


@pytest.mark.slow
def test_a_failure_is_made_small_with_a_deck_that_was_kept() -> None:
    smallest = list[object]()
    for _ in range(2):
        decks._DECKS.clear()  # as in another process
        failure = verified(_wrong()).failure
        assert failure is not None
        smallest.append(failure.problem)
    assert smallest[0] == smallest[1]


def _wrong() -> Candidate:
    def twice(inputs: object, options: object, mesh: object) -> object:
        return 2 * RIGHT.kernel(inputs, options, mesh)

    return replace(RIGHT, name="twice", kernel=twice)


@pytest.mark.slow
def test_all_cells_of_a_declaration_have_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    first = verified(RIGHT)
    monkeypatch.setattr(choice, "_choose", refuse)
    for layout in ("dp=3", "cp=2", "single"):
        assert verified(RIGHT, layout).record.mistakes_shown == first.record.mistakes_shown


@pytest.mark.slow
def test_for_mistakes_that_no_problem_of_the_deck_shows_others_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that matters on few problems may need one that was not drawn."""
    more, rejects, drawn = Deck.more, Oracle.rejects, list[int]()

    def counted(self: Deck, number: int) -> Sequence[Entry]:
        drawn.append(number)
        return more(self, number)

    def late(self: Oracle, output: Output, results: Tensor, dtype: torch.dtype) -> Tensor:
        return rejects(self, output, results, dtype) & (len(drawn) > 0)

    monkeypatch.setattr(Deck, "entries", property(lambda self: self._first[0][:1]))
    monkeypatch.setattr(Deck, "more", counted)
    monkeypatch.setattr(Oracle, "rejects", late)
    deck, names = Deck(RIGHT, "float32", 0), ["loss times 2", "all above the sum ignored"]
    chosen = choice.choice_on(RIGHT, deck, "float32", Layout(), names)
    assert (chosen.more, sorted(chosen.shown), chosen.surviving) == (1, sorted(names), [])
    assert chosen.entries(deck).keys() == chosen.problems.keys()
    assert not {entry.drawn.to_json() for entry in deck.entries}.intersection(chosen.problems)
    drawn.clear()
    decks._DECKS.clear()
    several = [*names, "loss times -1"]
    monkeypatch.setattr(choice, "_MORE", 0)
    assert len(choice.choice_on(RIGHT, deck, "float32", Layout(), several).surviving) == 3
    deck._known.clear()
    monkeypatch.setattr(choice, "_MORE", 4)
    monkeypatch.setattr(choice, "_FEW", 2)  # more than these are hidden by the precision
    monkeypatch.setenv(store.FOLDER, "")
    assert len(choice.choice_on(RIGHT, deck, "float32", Layout(), several).surviving) == 3
    assert drawn == []


def test_all_axes_have_one_choice_unless_a_mistake_of_another_axis_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    deck, asked, choose = Deck(RIGHT, "float32", 0), list[str](), choice._choose

    def counted(candidate: Candidate, deck: Deck, dtype: str, layout: Layout, names: object) -> choice.Choice:
        asked.append(str(layout))
        found = choose(candidate, deck, dtype, layout, ["loss times -1"])
        return msgspec.structs.replace(found, surviving=["a mistake of tp"] if survives and layout.tp > 1 else [])

    monkeypatch.setattr(choice, "_choose", counted)
    for survives in (False, True):
        asked.clear()
        deck._known.clear()
        decks._DECKS.clear()
        monkeypatch.setenv(store.FOLDER, "")
        for axes in (("dp", "cp", "tp"), ("dp",), ("dp", "cp")):
            own = choice.choice_of(replace(RIGHT, axes=axes), deck, "float32")
            assert bool(own.surviving) is (survives and "tp" in axes)
        assert asked == ["dp=2,cp=2,tp=2", *(["dp=2", "dp=2,cp=2"] if survives else [])]


@pytest.mark.slow
def test_mistakes_are_asked_again_where_a_problem_that_shows_them_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choice.choice_of(RIGHT, Deck(RIGHT, "float32", 0), "float32")
    unfit, names = next(iter(chosen.problems.items()))
    on = Deck.on

    def without(self: Deck, layout: Layout, splits: Sequence[VocabSplit], entries: Sequence[Entry]) -> list[Placed]:
        return on(self, layout, splits, [one for one in entries if one.drawn.to_json() != unfit])

    def shown() -> int:
        decks._DECKS.clear()
        result = verified(RIGHT, "dp=2,cp=2,tp=2")
        assert unfit not in [case.problem.to_json() for case in result.cases]
        return result.record.mistakes_shown

    monkeypatch.setattr(Deck, "on", without)
    monkeypatch.setattr("lossgate.engine.search.choice_of", lambda *given: chosen)
    assert len(names) > 20
    assert shown() > len(chosen.shown) - 5, "others show nearly all of them"
    nothing = choice.Choice({}, ["a mistake survives"], [])
    monkeypatch.setattr(
        "lossgate.engine.search.choice_on", lambda *given: nothing if set(given[-1]) == {*names} else None
    )
    assert shown() == len(chosen.shown) - len(names)
    assert verified(RIGHT, "dp=2,cp=2,tp=2").verdict is Verdict.INCONCLUSIVE


def test_nothing_is_kept_of_what_hangs_on_code_of_a_user(folder: Path) -> None:
    assert Deck(RIGHT, "float32", 0).is_kept
    own = replace(RIGHT, spec=replace(RIGHT.spec))
    deck = Deck(own, "float32", 0)
    assert not deck.is_kept
    deck.once("anything", int, lambda: 1)
    assert not folder.exists()


def test_tests_may_leave_the_asking_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "asks_mistakes", False)
    monkeypatch.setattr(choice, "_choose", refuse)
    assert verified(RIGHT).record.mistakes_shown == 0


@pytest.mark.slow
def test_what_stops_the_gradient_must_be_shown_in_each_of_its_uses() -> None:
    """One problem in eight has the options with which the rollout weight hangs on the policy. A
    weight that was not detached was met by luck.
    """
    deck = Deck(OURS["fused_linear_clipped_pg"], "float32", 0)
    shown = choice.choice_of(OURS["fused_linear_clipped_pg"], deck, "float32").shown
    uses = [name for name in shown if name.startswith("clipped_pg.") and "detach: not in" in name]
    assert [name for name in uses if "sub and importance." in name]
