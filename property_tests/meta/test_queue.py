# SPDX-License-Identifier: Apache-2.0
"""Workers take cells deck by deck, so that each deck is drawn once where that is possible."""

from dataclasses import replace
from multiprocessing import Pipe

import pytest

from lossgate import Candidate, Layout
from lossgate.dense_candidates import dense_candidate
from lossgate.engine import workers
from lossgate.engine.cell import Cell
from lossgate.engine.child import News
from lossgate.engine.events import CellAgrees, CellStarted
from lossgate.engine.settings import Settings
from lossgate.engine.workers import _Queue
from lossgate.losses import SPECS

NLL = dense_candidate(SPECS["nll"], "logprobs")
A, B, C = (replace(NLL, name=name, supports={"reduction": (name,)}) for name in ("a", "b", "c"))
LAYOUTS = [Layout(dp=size) for size in range(1, 9)]


def queue(**cells: int) -> tuple[_Queue, list[str]]:
    """Returns the queue of so many cells of each candidate, and whose each number is."""
    named: dict[str, Candidate] = {"a": A, "b": B, "c": C}
    found = [Cell(named[name], layout, "float32") for name, count in cells.items() for layout in LAYOUTS[:count]]
    return _Queue(found), [cell.candidate.name for cell in found]


def taken(workers: str, **cells: int) -> str:
    """Returns whose cells workers take that ask in this order, such as ``"0101"``."""
    waiting, whose = queue(**cells)
    return "".join(whose[waiting.take(int(worker))] for worker in workers)


def test_each_cell_is_taken_once_and_in_order_within_its_deck() -> None:
    waiting, whose = queue(a=3, b=2, c=4)
    numbers = [waiting.take(i % 2) for i in range(9)]
    assert not waiting
    assert sorted(numbers) == list(range(9))
    for name in "abc":
        own = [number for number in numbers if whose[number] == name]
        assert own == sorted(own)


def test_an_empty_queue_is_false() -> None:
    waiting, _ = queue(a=1)
    assert waiting
    waiting.take(0)
    assert not waiting
    assert not queue()[0]


def test_a_worker_stays_at_its_deck() -> None:
    assert taken("0001", a=3, b=3) == "aaab"
    assert taken("010101", a=3, b=3) == "ababab"


def test_free_decks_come_before_help() -> None:
    assert taken("0100", a=1, b=5, c=2) == "abcc"
    assert taken("012", a=8, b=1, c=1) == "abc"


def test_who_has_nothing_left_helps_with_the_most_cells() -> None:
    assert taken("01222", a=3, b=6, c=1) == "abcbb"
    assert taken("01222", a=6, b=3, c=1) == "abcaa"
    assert taken("0111", a=4, b=1) == "abaa"


def test_cells_of_all_layouts_share_a_deck_and_those_of_a_dtype_do_not() -> None:
    both = replace(A, precision={"float32": A.precision["float32"], "bfloat16": A.precision["float32"]})
    cells = [Cell(both, layout, dtype) for dtype in ("float32", "bfloat16") for layout in LAYOUTS[:2]]
    waiting = _Queue(cells)
    assert [waiting.take(worker) for worker in (0, 1, 0, 1)] == [0, 2, 1, 3]


NOTHING_RUN = (None, {"cases": ()})
"""A record, and what was run beside it."""


class AtOnce:
    """A process that has always finished."""

    threads_left = 0
    printed = ""

    def __init__(self, *, captured: bool) -> None:
        self.connection, self._far = Pipe()

    def start(self, *given: object) -> None:
        self._far.send(NOTHING_RUN)

    def result(self) -> object:
        return self.connection.recv()

    def end(self) -> None:
        self.connection.close()


class AgreesFirst(AtOnce):
    """A process that says that a cell agrees, and then what came of it."""

    def start(self, *given: object) -> None:
        self._far.send(News.AGREES)
        self._far.send(NOTHING_RUN)


def test_a_cell_is_said_to_agree_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "take_child", lambda: AgreesFirst(captured=True))
    monkeypatch.setattr(workers, "check_source", lambda _: None)
    planned = [Cell(dense_candidate(SPECS["nll"], "logprobs"), layout, "float32") for layout in LAYOUTS[:2]]
    steps = [*workers.run_side_by_side(planned, Settings(), 1)]
    assert [type(step) for step in steps] == [CellStarted, CellAgrees, workers.Done] * 2


@pytest.mark.parametrize(("jobs", "cells"), [(2, 3), (3, 4), (3, 2)])
def test_workers_that_finish_together_find_the_last_cells(
    jobs: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "take_child", lambda: AtOnce(captured=True))
    planned = [Cell(dense_candidate(SPECS["nll"], "logprobs"), layout, "float32") for layout in LAYOUTS[:cells]]
    monkeypatch.setattr(workers, "check_source", lambda _: None)
    steps = [*workers.run_side_by_side(planned, Settings(), jobs)]
    assert [step.result.cell for step in steps if isinstance(step, workers.Done) and step.result] == planned
    assert {id(step.cell) for step in steps if isinstance(step, CellStarted)} == set(map(id, planned))
