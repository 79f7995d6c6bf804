# SPDX-License-Identifier: Apache-2.0
"""The problems of a cell must show the mistakes that are known, or it does not agree."""

from collections import Counter
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from kernel_bank.cross_entropy import STYLES, make
from lossgate import Candidate, Layout
from lossgate.adequacy import choice, known_mistakes
from lossgate.adequacy.choice import Choice, choice_on
from lossgate.adequacy.deck import Deck
from lossgate.adequacy.entry import Placed
from lossgate.adequacy.known_mistakes import KnownMistakes
from lossgate.cases.oracle import Oracle
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.reports.verdict_table import summary
from lossgate.specs.outputs import Output

RIGHT = make(STYLES["float32"][0])
MISTAKES = [
    f"temperature {what}{where}"
    for what in ("applied twice", "ignored", "multiplied in place of divided")
    for where in ("", " in backward", " in forward")
]
"""Some that any deck shows; so many that a deck is not searched for those that survive."""


def verified(candidate: Candidate, seed: int = 0, rounds: int = 4) -> CellResult:
    return run_cell(Cell(candidate, Layout(), "float32"), Settings(seed=seed, rounds=rounds))


@pytest.mark.slow
def test_a_right_kernel_is_tried_on_problems_that_show_them() -> None:
    result = verified(RIGHT)
    assert result.verdict is Verdict.AGREE
    assert result.run.mistakes.shown > 100
    assert result.run.mistakes.surviving == ()
    assert result.run.mistakes.seconds > 0
    shown = result.record
    price = f"; 3 s; asking which known mistakes would show took {result.run.mistakes.seconds:.1f} CPU s"
    assert summary([shown], 3.0, asked=shown.mistakes_seconds).endswith(price)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that rejects nothing."""

    def accepts(self: Oracle, output: Output, results: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(results), dtype=torch.bool)

    monkeypatch.setattr(Oracle, "rejects", accepts)


@pytest.mark.usefixtures("blind")
def test_no_problem_shows_a_mistake_to_a_blind_judge() -> None:
    found = chosen(seed=34, names=MISTAKES)
    assert (found.shown, len(found.surviving)) == ([], len(MISTAKES))


def test_problems_show_mistakes_to_one_that_is_not() -> None:
    found = chosen(seed=34, names=MISTAKES)
    assert (sorted(found.shown), found.surviving) == (sorted(MISTAKES), [])


@pytest.mark.slow
@pytest.mark.usefixtures("blind")
def test_a_blind_judge_does_not_agree() -> None:
    """Were a kernel with a mistake not rejected, AGREE would say little."""
    result = verified(RIGHT, seed=32, rounds=1)  # no other test has its deck
    assert result.verdict is Verdict.INCONCLUSIVE
    assert len(result.run.mistakes.surviving) > 50
    said = [reason for reason in result.reasons if "known mistake" in reason]
    assert len(said) == 4
    assert said[0].startswith(
        f"a kernel with a known mistake would have passed every problem: {result.run.mistakes.surviving[0]}; "
    )
    more = len(result.run.mistakes.surviving) - 3
    assert said[-1] == (
        f"{more} more known mistakes would have passed; verify with --evidence, and lossgate report --cell lists them"
    )


def chosen(layout: str = "single", seed: int = 0, names: Collection[str] = ()) -> Choice:
    """Returns the choice of a deck that was drawn just now, for some mistakes or for all."""
    deck, asked = Deck(RIGHT, "float32", seed), names or counterfactuals_of(RIGHT.spec, RIGHT.head)
    return choice_on(RIGHT, deck, "float32", Layout.parse(layout), asked)


def least(placed: list[Placed], *_: object) -> list[Placed]:
    """Chooses a few problems without a bias, in place of all that are needed."""
    return [one for one in placed if not one.problem.bias][:8]


def test_problems_are_added_for_mistakes_that_the_first_ones_could_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "choose", least)
    more = chosen()
    monkeypatch.setattr(KnownMistakes, "rarely_made", lambda self: [])
    assert "bias ignored" in set(more.shown) - set(chosen().shown)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("first", [150, None])
def test_what_changes_one_problem_is_asked_about_until_another_shows_it(
    first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change nothing on many problems in between: a clip acts on few."""
    monkeypatch.setattr(Oracle, "rejects", lambda *given: torch.zeros(len(given[2]), dtype=torch.bool))
    made, kept = list[Counter[str]](), list[KnownMistakes]()
    ask = KnownMistakes.ask
    monkeypatch.setattr(KnownMistakes, "rarely_made", lambda self: [])
    monkeypatch.setattr(KnownMistakes, "survivors", [])
    monkeypatch.setattr(KnownMistakes, "ask", lambda self, *given: (kept.append(self), ask(self, *given)))
    for often in (1, 1_000):
        monkeypatch.setattr(known_mistakes, "_OFTEN", often)
        chosen(seed=33, names=list(counterfactuals_of(RIGHT.spec, RIGHT.head))[:first])
        made.append(Counter({name: kept[-1].made[name] for name in kept[-1].unseen}))
    seldom, always = made
    assert seldom
    assert seldom == {name: always[name] for name in seldom}
