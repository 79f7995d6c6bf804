# SPDX-License-Identifier: Apache-2.0
"""The problems of a cell must show the mistakes that are known, or it does not agree."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from lossgate import Candidate, Layout
from lossgate.adequacy import known_mistakes
from lossgate.adequacy.entry import Placed
from lossgate.adequacy.known_mistakes import required_outputs
from lossgate.bank.cross_entropy import STYLES, make
from lossgate.cases.oracle import Oracle
from lossgate.cases.placed_problem import PlacedProblem
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.seams import Outputs
from lossgate.counterfactuals.setting import Setting
from lossgate.engine import search
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.reports.shown_cell import of_result
from lossgate.reports.verdict_table import summary
from lossgate.specs.outputs import Output
from lossgate.worlds import make_world

RIGHT = make(STYLES["float32"][0])


def searched(layout: str, settings: Settings) -> Search:
    world = make_world("simulated", Layout.parse(layout), 60.0)
    found = Search(Cell(RIGHT, Layout.parse(layout), "float32"), world, settings)
    try:
        found.run()
    finally:
        world.close()
    return found


def verified(candidate: Candidate, seed: int = 0, rounds: int = 4) -> CellResult:
    return run_cell(Cell(candidate, Layout(), "float32"), Settings(seed=seed, rounds=rounds))


def test_a_right_kernel_is_tried_on_problems_that_show_them() -> None:
    result = verified(RIGHT)
    assert result.verdict is Verdict.AGREE
    assert result.mistakes.shown > 100
    assert result.mistakes.surviving == ()
    assert result.mistakes.seconds > 0
    shown = of_result(result)
    price = f"; 3 s; asking which known mistakes would show took {result.mistakes.seconds:.1f} CPU s"
    assert summary([shown], 3.0, asked=shown.mistakes_seconds).endswith(price)


def test_a_blind_judge_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a kernel with a mistake not rejected, AGREE would say little."""

    def accepts(self: Oracle, output: Output, results: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(results), dtype=torch.bool)

    monkeypatch.setattr(Oracle, "rejects", accepts)
    result = verified(RIGHT, seed=32, rounds=1)  # no other test has its deck
    assert result.verdict is Verdict.INCONCLUSIVE
    assert len(result.mistakes.surviving) > 50
    said = [reason for reason in result.reasons if "known mistake" in reason]
    assert len(said) == 4
    assert said[0].startswith(
        f"a kernel with a known mistake would have passed every problem: {result.mistakes.surviving[0]}; "
    )
    more = len(result.mistakes.surviving) - 3
    assert (
        said[-1]
        == f"{more} more known mistakes would have passed; lossgate report --cell names them, of a run with --evidence"
    )


def least(placed: list[Placed], *_: object) -> list[Placed]:
    """Chooses a few problems without a bias, in place of all that are needed."""
    return [one for one in placed if not one.problem.bias][:8]


def test_problems_are_added_for_mistakes_that_the_first_ones_could_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "choose", least)
    monkeypatch.setattr(Search, "_large", lambda *_: [])
    few, more = (searched("single", Settings(examples=1, rounds=rounds)) for rounds in (1, 2))
    assert few.mistakes is not None
    assert more.mistakes is not None
    assert "bias ignored" in more.mistakes.seen.keys() - few.mistakes.seen.keys()


@pytest.mark.slow
def test_what_changes_one_problem_is_asked_about_until_another_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change nothing on many problems in between: a clip acts on few."""
    monkeypatch.setattr(Oracle, "rejects", lambda *given: torch.zeros(len(given[2]), dtype=torch.bool))
    made: list[Counter[str]] = []
    for often in (1, 1_000):
        monkeypatch.setattr(known_mistakes, "_OFTEN", often)
        mistakes = searched("single", Settings(seed=33, rounds=1)).mistakes
        assert mistakes is not None
        made.append(Counter({name: mistakes.made[name] for name in mistakes.unseen}))
    seldom, always = made
    assert seldom
    assert seldom == {name: always[name] for name in seldom}


def test_what_does_not_hang_on_the_layout_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    run = Counterfactual.run

    def counting(self: Counterfactual, setting: Setting) -> Outputs | None:
        asked.append(self.name)
        return run(self, setting)

    monkeypatch.setattr(Counterfactual, "run", counting)
    first = searched("dp=2", Settings(seed=31))
    assert first.mistakes is not None
    assert "temperature ignored" in asked
    asked.clear()
    again = searched("dp=2", Settings(seed=31))
    assert again.mistakes is not None
    assert again.mistakes.seen == first.mistakes.seen
    assert "temperature ignored" not in asked
    assert "valid_tokens local over dp" in asked


def test_what_sees_padding_hangs_on_the_layout() -> None:
    world = make_world("simulated", Layout(), 60.0)
    placed = Search(Cell(RIGHT, Layout(), "float32"), world, Settings()).first_problems()[0]
    world.close()
    setting = Setting(PlacedProblem(placed.entry.bound, placed.problem), required_outputs(RIGHT))
    for _ in range(2):  # what was looked for once counts as well
        for asked in ("with_padding", "partition", "token_shards", "place_on_rank", "vocab_shards"):
            setting.hangs_on_layout = False
            getattr(setting, asked)
            assert setting.hangs_on_layout, asked
    setting.hangs_on_layout = False
    assert setting.lengths
    assert setting.fields
    assert not setting.hangs_on_layout
