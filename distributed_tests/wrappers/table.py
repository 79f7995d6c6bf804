# SPDX-License-Identifier: Apache-2.0
"""The table of wrappers, kinds of lm-head, and heads that are tiled or not."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from distributed_tests.wrappers.model import HEADS, RANKS
from distributed_tests.wrappers.step import Cell, Step, run_steps
from distributed_tests.wrappers.step_checks import findings
from distributed_tests.wrappers.wrappers import GATHERED_APART, NOT_UNIFORM, UNTIED, WRAPPERS
from lossgate import Layout
from lossgate.worlds import World, make_world
from lossgate.worlds.base import RankRaised
from lossgate.worlds.pool import close_pool

COLUMNS: Mapping[str, Sequence[str]] = {
    "tiled": ("tiled_token_logprobs",),
    "tiled, one pass": ("tiled_grpo_loss",),
    "not tiled": ("linear_logprobs", "linear_cross_entropy", "linear_sft_loss"),
}


@dataclass(frozen=True)
class WayOut:
    """What to do where torch itself refuses a wrapper for some models, also for a dense head."""

    text: str
    wrapper: Callable[[str], str]
    """From the row of the refusal to the row of the table in which the way out works."""


_NO_FSDP_OF_ITS_OWN = WayOut("leave the head to the model's FSDP", lambda wrapper: "FSDP FULL_SHARD")

WAYS_OUT: Mapping[str, WayOut] = {
    NOT_UNIFORM: WayOut("use_orig_params=True", lambda wrapper: wrapper.removesuffix(", flat")),
    GATHERED_APART: _NO_FSDP_OF_ITS_OWN,
    UNTIED: _NO_FSDP_OF_ITS_OWN,
}
"""By what the messages of refusals contain."""


@dataclass(frozen=True)
class Entry:
    """What a cell of the table says."""

    refused: str = ""
    """The message of the refusal."""
    way_out: WayOut | None = None
    """What to do instead."""
    wrong: tuple[str, ...] = ()
    """What does not hold, in words."""

    def __str__(self) -> str:
        if self.wrong:
            return "WRONG"
        return f"refused: {self.way_out.text}" if self.way_out else "works"


def cells(wrapper: str, head: str, column: str, *, full: bool) -> Iterator[Cell]:
    """Yields the steps behind a cell of the table.

    Args:
        wrapper: the row.
        head: kind of lm-head.
        column: one of ``COLUMNS``.
        full: whether to take all ways to a loss and all options, or one step.
    """
    first, *others = COLUMNS[column]
    plain = Cell(wrapper, head, first)
    yield plain
    if not full:
        return
    yield from (Cell(wrapper, head, other) for other in others)
    yield replace(plain, microbatches=2)
    yield replace(plain, checkpointing=True)
    yield replace(plain, empty=True)
    yield replace(plain, dtype="bfloat16")


@contextmanager
def new_world() -> Iterator[World]:
    """Makes new processes, and ends them afterwards: DeepSpeed changes a process for good."""
    close_pool()
    try:
        yield make_world("gloo", Layout(dp=RANKS), timeout=300.0)
    finally:
        close_pool()


RARE_ERROR = re.compile(
    r"ZeRO-3, (\S+, dense|.*in wrap\n.*in initialize\n).*the tensor already had autograd metadata", re.DOTALL
)
"""Two tables met this error of torch where no kernel of ours had run: in a dense step of ZeRO-3,
and where DeepSpeed prints the parameters before the first step. The cause is not known."""


def results(asked: Sequence[Cell]) -> dict[Cell, Entry]:
    """Runs steps on two processes, and judges each."""
    every = list(dict.fromkeys([*(cell.dense() for cell in asked), *asked]))
    try:
        by_rank = _run(every)
    except RankRaised as error:
        if not RARE_ERROR.search(str(error)):
            raise
        print(f"tried again: {error}")
        by_rank = _run(every)
    found = dict(zip(every, zip(*by_rank, strict=True), strict=True))
    return {cell: judged(cell, found[cell], found[cell.dense()]) for cell in asked}


def _run(steps: Sequence[Cell]) -> list[list[Step | str]]:
    with new_world() as world:
        return world.run(partial(run_steps, steps))


def judged(cell: Cell, steps: Sequence[Step | str], dense: Sequence[Step | str]) -> Entry:
    """Returns what a cell's step amounts to, given the dense step of the same cell."""
    refusals = [step for step in steps if isinstance(step, str)]
    if refusals:
        everywhere = [*steps, *dense]
        for message, way_out in WAYS_OUT.items():
            if all(isinstance(step, str) and message in step for step in everywhere):
                return Entry(refusals[0], way_out)
        return Entry(wrong=tuple(refusals))
    unsuitable = [step for step in dense if isinstance(step, str)]
    if unsuitable:
        return Entry(wrong=(f"the dense head is refused: {unsuitable[0]}",))
    both = [[step for step in each if isinstance(step, Step)] for each in (steps, dense)]
    return Entry(wrong=tuple(findings(cell, *both)))


def table(*, full: bool) -> dict[tuple[str, str, str], Entry]:
    """Returns each cell's entry by wrapper, kind of head and column."""
    places = [(wrapper, head, column) for wrapper in WRAPPERS for head in HEADS for column in COLUMNS]
    behind = {place: list(cells(*place, full=full)) for place in places}
    found = results([cell for each in behind.values() for cell in each])
    return with_ways_out({place: _merged((cell, found[cell]) for cell in each) for place, each in behind.items()})


def with_ways_out(entries: Mapping[tuple[str, str, str], Entry]) -> dict[tuple[str, str, str], Entry]:
    """Returns the entries of a table, in which a refusal is wrong if its way out does not work."""
    checked = dict(entries)
    for (wrapper, head, column), entry in entries.items():
        if entry.way_out and str(entries[other := entry.way_out.wrapper(wrapper), head, column]) != "works":
            checked[wrapper, head, column] = Entry(wrong=(f"its way out does not work: {other}, {head}, {column}",))
    return checked


def _merged(steps: Iterable[tuple[Cell, Entry]]) -> Entry:
    """Returns the entry of a cell of the table, from those of its steps."""
    entries = list(steps)
    refused = [(cell, entry) for cell, entry in entries if entry.refused]
    if len(refused) == len(entries):
        return refused[0][1]
    wrong = [f"{cell}: {text}" for cell, entry in entries for text in entry.wrong]
    return Entry(wrong=(*wrong, *(f"{cell}: {entry.refused}" for cell, entry in refused)))
