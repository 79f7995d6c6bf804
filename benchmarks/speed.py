# SPDX-License-Identifier: Apache-2.0
"""Measures what verification costs.

    python benchmarks/speed.py

1. The whole of ``ci/verify``: CPU seconds, and the time from start to the first verdict.
2. Its parts, in one process: drawing, batches, references, noise, ranks, comparing; the share of
   the candidates' own code, and how many different problems each candidate was tried on.
3. A cold cell of each family, which draws its problems, and a warm one, which finds them drawn.
4. Judging a problem, ensemble included, compared with running candidate and reference on it.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, wraps
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from threading import Lock
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lossgate import Candidate, Layout, Problem
from lossgate.adequacy import deck
from lossgate.bank.cross_entropy import STYLES, make
from lossgate.bank.dense_candidates import dense_candidate
from lossgate.cases import bound_problem, case, placed_problem, task
from lossgate.cases.assemble import Assembled, assemble
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.oracle import Oracle
from lossgate.cases.placed_problem import PlacedProblem
from lossgate.cases.reference import DenseRun
from lossgate.cases.task import RankTask
from lossgate.declaration.loading import load_candidates
from lossgate.engine import case_result, search
from lossgate.engine.cell import Cell
from lossgate.engine.matrix import layouts_and_dtypes
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES, Settings
from lossgate.losses import SPECS
from lossgate.worlds import SimulatedWorld

ROOT = Path(__file__).parents[1]
TARGETS = [
    str(ROOT / "ci/candidates/ours.py"),
    str(ROOT / "ci/candidates/pytorch.py"),
    *([str(ROOT / "examples/triton_cross_entropy.py")] if sys.platform == "linux" else []),
]
"""What ``ci/verify`` verifies."""
TOKENS, WIDTH = 64, 48


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the median time of so many calls, after one to warm up."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)


def measure_judge(candidate: Candidate, dtype: str) -> None:
    """Prints what judging a candidate takes, and what running it and the reference takes."""
    problem = Problem(
        spec="nll", head="hidden", dtype=dtype, lengths=(TOKENS,), masks=("all",), hidden=WIDTH, vocab=301
    )
    placed, world = PlacedProblem(BoundProblem(candidate.spec, problem), problem), SimulatedWorld(Layout())

    def run() -> Assembled:
        return assemble(
            world.run(RankTask(candidate, problem.options, placed.batch)), candidate, placed.partition, problem.hidden
        )

    result = run()

    def judge() -> None:
        again = PlacedProblem(BoundProblem(candidate.spec, problem), problem)  # else noise is found made
        oracle = Oracle(candidate, again, result.outputs)
        for output, tensor in result.outputs.items():
            oracle.compare(output, tensor, result.dtypes[output])

    ran, judged = seconds(run, 100), seconds(judge, 50)
    reference = seconds(lambda: DenseRun(placed.batch, problem.head).outputs(placed.bound.bound_spec), 100)
    world.close()
    print(
        f"judging {candidate.name} in {dtype}: candidate {1e3 * ran:.1f} ms, reference {1e3 * reference:.1f} ms, "
        f"judge {1e3 * judged:.1f} ms: {judged / (ran + reference):.1f} times both"
    )


# The whole of ci/verify, and its parts


class Stopwatch:
    """Adds up CPU seconds by part; what a part spends in another counts for the other alone."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        self._lock = Lock()

    def time(self, owner: Any, name: str, part: str) -> None:
        """Times a function, or a cached property, wherever ``owner`` calls it by ``name``."""
        found = vars(owner)[name]
        if isinstance(found, cached_property):
            timed = cached_property(self._timed(found.func, part))
            timed.__set_name__(owner, name)
            setattr(owner, name, timed)
        else:
            setattr(owner, name, self._timed(found, part))

    def time_on_ranks(self, owner: Any, name: str, part: str) -> None:
        """Times a function that ranks call, each in its own thread."""
        found = vars(owner)[name]

        @wraps(found)
        def timed(*args: Any) -> Any:
            start = thread_time()
            try:
                return found(*args)
            finally:
                with self._lock:
                    self.seconds[part] += thread_time() - start

        setattr(owner, name, timed)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **given: Any) -> Any:
            start = process_time()
            self._inner.append(0.0)
            try:
                return function(*args, **given)
            finally:
                took = process_time() - start
                self.seconds[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed


PARTS: Sequence[tuple[Any, str, str]] = (
    (deck.Deck, "_first", "drawing"),
    (deck.Deck, "_seek", "drawing"),
    (deck.Deck, "more", "drawing"),
    (deck.Deck, "on", "choosing"),
    (search, "choose", "choosing"),
    (bound_problem.BoundProblem, "batch", "batches"),
    (placed_problem.PlacedProblem, "batch", "batches"),
    (bound_problem.BoundProblem, "reference", "references"),
    (bound_problem.BoundProblem, "noise_on", "noise"),
    (case.Case, "_outcome", "ranks"),
    (case.Case, "result", "putting together"),
    (case.Case, "comparisons", "comparing"),
    (case_result, "killed_mutants", "mutants"),
)
"""Where each part of a cell begins."""


def verified() -> list[Candidate]:
    """Returns the candidates that ``ci/verify`` verifies."""
    return [candidate for target in TARGETS for candidate in load_candidates(target)]


def adopt_orphans() -> None:
    """Has this process inherit the processes that its children leave behind.

    Workers are children of a server that outlives the command, so their time would be lost.
    """
    if sys.platform == "linux":
        set_child_subreaper = 36  # of linux/prctl.h
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def wait_for_children() -> None:
    """Waits until no child is left, so that their time is counted."""
    with suppress(ChildProcessError):
        while True:
            os.wait()


def measure_whole(arguments: Sequence[str]) -> None:
    """Runs what ``ci/verify`` runs; prints its CPU seconds and when its first verdict came."""
    command = [Path(sys.executable).with_name("lossgate"), "verify", *TARGETS]
    adopt_orphans()
    before, start, first = getrusage(RUSAGE_CHILDREN), perf_counter(), 0.0
    with subprocess.Popen([*command, "--profile", "ci", *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not first and line.split(maxsplit=1)[:1] in (["AGREE"], ["DISAGREE"], ["INCONCLUSIVE"]):
                first = perf_counter() - start
    took = perf_counter() - start
    wait_for_children()
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"lossgate verify --profile ci {' '.join(arguments)}: {cpu:.0f} CPU seconds, {took:.0f} s, "
        f"exit code {process.returncode}; first verdict after {first:.1f} s"
    )


def measure_parts(settings: Settings) -> None:
    """Verifies every cell in this process; prints what each candidate and each part takes."""
    watch = Stopwatch()
    for owner, name, part in PARTS:
        watch.time(owner, name, part)
    watch.time_on_ranks(Candidate, "__call__", "candidate, forward")
    watch.time_on_ranks(task, "_backward", "candidate, backward")
    parts = [*dict.fromkeys(part for _, _, part in PARTS), "candidate, forward", "candidate, backward"]
    table = Table("candidate", "dtype", "cells", "whole", *parts, "problems", "different", title="CPU seconds")
    whole = 0.0
    total: defaultdict[str, float] = defaultdict(float)
    for candidate in verified():
        for dtype in candidate.dtypes if candidate.known_failure is None else ():
            places = layouts_and_dtypes(candidate, settings)
            cells = [Cell(candidate, layout, of) for layout, of in places if of == dtype]
            watch.seconds.clear()
            start = process_time()
            cases = [case for cell in cells for case in run_cell(cell, settings).cases]
            took = process_time() - start
            different = {case.problem.unsharded.to_json() for case in cases}
            shown = [f"{watch.seconds[part]:.1f}" for part in parts]
            counts = f"{len(cases)}", f"{len(different)}"
            table.add_row(candidate.name, dtype, str(len(cells)), f"{took:.1f}", *shown, *counts)
            whole += took
            for part, seconds in watch.seconds.items():
                total[part] += seconds
    table.add_section()
    table.add_row("all", "", "", f"{whole:.1f}", *(f"{total[part]:.1f}" for part in parts))
    Console(width=220).print(table)
    own = total["candidate, forward"] + total["candidate, backward"]
    print(f"the candidates' own code: {own:.0f} of {whole:.0f} CPU seconds, {own / whole:.0%}")


def measure_cells(settings: Settings) -> None:
    """Prints the CPU seconds of a cold and of a warm cell of each family."""
    ours = {candidate.spec.name: candidate for candidate in reversed(verified()) if candidate.known_failure is None}
    for name, spec in SPECS.items():
        candidate = ours.get(name) or dense_candidate(spec, next(iter(spec.inputs)))
        took: list[str] = []
        for layout in ("dp=2", "cp=2"):
            start = process_time()
            run_cell(Cell(candidate, Layout.parse(layout), "float32"), replace(settings, seed=1))
            took.append(f"{process_time() - start:.1f}")
        print(f"{name} ({candidate.name}): a cold cell {took[0]} CPU seconds, a warm one {took[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="append", default=[], help="only these layouts, in parts 1 and 2")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measure_whole([word for layout in arguments.layout for word in ("--layout", layout)])
    measure_cells(PROFILES["ci"])
    measure_parts(replace(PROFILES["ci"], layouts=tuple(arguments.layout)))
    fused_losses = verified()[0]
    for dtype, styles in STYLES.items():
        for candidate in (fused_losses, make(styles[1])):
            measure_judge(candidate, dtype)


if __name__ == "__main__":
    main()
