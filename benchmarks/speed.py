# SPDX-License-Identifier: Apache-2.0
"""Measures what verification and tests cost, in CPU seconds of all processes.

    python benchmarks/speed.py          # commands that users run, and the parts of a warm cell
    python benchmarks/speed.py --full   # the full matrix and ci/test, too: half an hour

Each command begins with an empty store, but for one that says otherwise. A warm cell finds its deck
drawn, and knows which problems show known mistakes.
"""

import argparse
import ctypes
import os
import re
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
from tempfile import TemporaryDirectory
from threading import Lock
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lossgate import Candidate
from lossgate.adequacy import deck
from lossgate.cases import bound_problem, case, kernel_noise, placement, rank_call
from lossgate.declaration.loading import load_candidates
from lossgate.engine import case_result, search
from lossgate.engine.plan import plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES, Settings

ROOT = Path(__file__).parents[1]
OURS = "ci/candidates/ours.py"
WITHOUT_TP = """
from dataclasses import replace
from lossgate.declaration.loading import load_candidates

ours = {{one.name: one for one in load_candidates({file!r})}}
nll = replace(ours["fused_linear_cross_entropy"], name="nll", axes=("dp", "cp"), dtypes=("float32", "bfloat16"))
clipped_pg = replace(ours["fused_linear_clipped_pg"], name="clipped_pg", axes=nll.axes, dtypes=nll.dtypes)
"""
"""A file with kernels from hidden states, on dp and cp."""


# Commands


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


def measure(name: str, command: Sequence[str], aim: float, folder: Path, *, store: Path | None = None) -> None:
    """Runs a command; prints its CPU seconds, and when its first verdict came.

    Args:
        name: of the command, for people.
        command: its words.
        aim: the CPU seconds that it should take at most.
        folder: in which it runs.
        store: what is kept; by default nothing is, at first.
    """
    with TemporaryDirectory() as empty:
        environment = {**os.environ, "LOSSGATE_CACHE": str(store or empty), "TRITON_INTERPRET": "1"}
        before, start, first = getrusage(RUSAGE_CHILDREN), perf_counter(), 0.0
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not first and line.split(maxsplit=1)[:1] in (["AGREE"], ["DISAGREE"], ["PROMISE"], ["INCONCLUSIVE"]):
                    first = perf_counter() - start
        took = perf_counter() - start
        wait_for_children()
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shown = f"first verdict after {first:.1f} s" if first else ""
    print(
        f"{name:52} {cpu:6.1f} CPU s (aim {aim:4.0f}) {took:6.1f} s  exit code {process.returncode}  {shown}",
        flush=True,
    )


def measure_commands(*, full: bool) -> None:
    """Runs what users and CI run."""
    readme = re.search(r"```python\n(import lossgate.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    verify = [str(Path(sys.executable).with_name("lossgate")), "verify"]
    with TemporaryDirectory() as name:
        folder = Path(name)
        assert readme is not None
        (folder / "my_kernels.py").write_text(readme[1])
        (folder / "ours.py").write_text(WITHOUT_TP.format(file=str(ROOT / OURS)))
        measure("README's kernel, --ranks 2", [*verify, "my_kernels.py", "--ranks", "2"], 6, folder)
        for own, aim in (("nll", 10), ("clipped_pg", 30)):
            measure(f"{own} from hidden states, dp and cp, two dtypes", [*verify, f"ours.py:{own}"], aim, folder)
    with TemporaryDirectory() as store:
        for what in ("an empty store", "a full store"):
            measure(f"ci/verify, {what}", ["ci/verify"], 300, ROOT, store=Path(store))
    if full:
        measure("ci/verify --matrix full", ["ci/verify", "--matrix", "full"], 1500, ROOT)
        measure("ci/test", ["ci/test"], 1000, ROOT)


# The parts of a warm cell


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
        def timed(*args: Any, **given: Any) -> Any:
            start = thread_time()
            try:
                return found(*args, **given)
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
    (deck.Deck, "_first", "deck"),
    (deck.Deck, "_seek", "deck"),
    (deck.Deck, "on", "deck"),
    (search, "choose", "deck"),
    (search, "choice_of", "known mistakes"),
    (search, "choice_on", "known mistakes"),
    (bound_problem.BoundProblem, "batch", "reference"),
    (placement.PlacedProblem, "batch", "reference"),
    (bound_problem.BoundProblem, "reference", "reference"),
    (kernel_noise.KernelNoise, "deviations", "noise"),
    (case.Case, "_outcome", "ranks"),
    (case.Case, "result", "ranks"),
    (case.Case, "comparisons", "compare"),
    (case_result, "killed_mutants", "mutants"),
)
"""Where each part of a cell begins."""
ON_RANKS: Sequence[tuple[Any, str]] = ((Candidate, "__call__"), (rank_call.RankCall, "backward"))
"""Where the candidate's own code is called."""
CELLS = (
    ("fused_linear_cross_entropy", "tp=2"),
    ("fused_linear_clipped_pg", "tp=2"),
    ("fused_linear_dpo", "cp=2"),
    ("fused_tiled_grpo", "dp=2"),
)


def measure_cells(settings: Settings) -> None:
    """Prints the parts of warm cells with all properties."""
    watch = Stopwatch()
    for owner, name, part in PARTS:
        watch.time(owner, name, part)
    for owner, name in ON_RANKS:
        watch.time_on_ranks(owner, name, "candidate")
    parts = [*dict.fromkeys(part for _, _, part in PARTS)]
    table = Table("warm cell", "CPU s", *parts, "candidate", "problems", title="of it, also for properties")
    ours = {candidate.name: candidate for candidate in load_candidates(str(ROOT / OURS))}
    for name, layout in CELLS:
        cells = plan([ours[name]], replace(settings, layouts=("single", layout), dtypes=("float32",)))
        run_cell(cells[0], settings)
        watch.seconds.clear()
        start = process_time()
        problems = len(run_cell(cells[1], settings).cases)
        took = process_time() - start
        shown = [f"{watch.seconds[part] / took:.0%}" for part in (*parts, "candidate")]
        table.add_row(f"{name} {layout}", f"{took:.1f}", *shown, str(problems))
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also the full matrix and ci/test")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    adopt_orphans()
    measure_commands(full=arguments.full)
    measure_cells(PROFILES["ci"])


if __name__ == "__main__":
    main()
