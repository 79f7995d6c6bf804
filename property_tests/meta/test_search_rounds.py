# SPDX-License-Identifier: Apache-2.0
"""Rounds of a cell run new problems, and look for what is missing."""

from dataclasses import replace

import pytest

from lossgate import Candidate, Layout
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.specs.sharding_goals import IDS_GOALS
from lossgate.worlds import SimulatedWorld


def rounds(candidate: Candidate, layout: Layout, examples: int, count: int) -> tuple[Search, list[int]]:
    """Returns the search, and how many cases it has after each round."""
    world = SimulatedWorld(layout)
    found, counts = Search(Cell(candidate, layout, "float32"), world, Settings(examples=examples)), list[int]()
    for round_ in range(count):
        found.run(round_)
        counts.append(len(found.cases))
    world.close()
    return found, counts


@pytest.mark.slow
@pytest.mark.parametrize("split", ["even", "balanced"])
def test_no_problem_is_run_twice(split: str) -> None:
    nll = replace(dense_candidate(SPECS["nll"], "logits"), supports={"vocab_split": split})
    found, _ = rounds(nll, Layout(tp=4), 30, 2)
    texts = [case.problem.to_json() for case in found.cases]
    assert len(set(texts)) == len(texts)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("examples", [20, 60, 100])
def test_each_round_runs_as_many_problems_again(examples: int) -> None:
    nll = replace(dense_candidate(SPECS["nll"], "logprobs"), supports={})
    _, counts = rounds(nll, Layout(), examples, 4)
    assert counts == [examples, 2 * examples, 3 * examples, 4 * examples]


@pytest.mark.parametrize("goal", IDS_GOALS)
def test_missing_goals_of_ids_are_looked_for(goal: str) -> None:
    cell = Cell(dense_candidate(SPECS["distill"], "logits"), Layout(tp=2), "float32")
    world = SimulatedWorld(cell.layout)
    found = Search(cell, world, Settings(examples=1))._draw_reaching(goal, 1)
    world.close()
    assert found
