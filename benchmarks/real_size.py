# SPDX-License-Identifier: Apache-2.0
"""Measures what it takes to judge a kernel at a real size, and that few runs are enough for it.

    python benchmarks/real_size.py [--size 4096x1024x32768] [--kernel ci/candidates/ours.py:NAME]

A size is tokens, width of the hidden states and vocabulary; ``--size small`` takes seconds. First
``lossgate verify --size`` runs in a process of its own. Its memory is that of all its processes at
their peak, sampled five times a second; pages that several processes share count once. Time and
memory are set beside our aims, and time beside one run of the kernel itself, forward and backward.

Then the noise of right kernels is made of twelve runs forward and back, and the judge is asked for
its limits from all of them, and from three sets of four that have no run in common. The judge
itself makes twelve runs forward, and at such sizes four of them back; so gradients are what counts
here. Each limit is shown as a multiple of that from all twelve. So are the least error that would
surely have been found in the scale of an output, and the share of its limits that the kernel uses.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter, sleep
from zlib import crc32

from rich.console import Console
from rich.table import Table
from torch import Tensor

from lossgate.adequacy.deck import Deck
from lossgate.base.layout import Layout
from lossgate.base.shape import Shape
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case, all_cores
from lossgate.cases.oracle import Oracle
from lossgate.cases.placement import PlacedProblem
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.judge.comparison import Comparison
from lossgate.judge.ensemble import stages_of
from lossgate.judge.streamed import run_streamed
from lossgate.numerics.noise import Noise
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import Output
from lossgate.worlds import SimulatedWorld

ROOT = Path(__file__).parents[1]
KERNEL = f"{ROOT / 'ci/candidates/ours.py'}:fused_linear_cross_entropy"
SIZE, SMALL = "4096x1024x32768", "264x16x4100"
DTYPE = "bfloat16"

GIB_AIM, SECONDS_AIM = 6, 300
"""What the judgement of a problem of the default size may take."""

_SAMPLED = 0.2
"""Seconds between two looks at the memory."""

RUNS, FEW = 12, 4
"""How many runs are made, and how many of them are few."""


@dataclass(frozen=True)
class Judged:
    """What it took to judge a kernel."""

    seconds: float
    gib: float
    margins: str
    """How near to its limits each output came."""


def memory_of(process: int) -> float:
    """Returns the GiB of a process and of all that it started, by ``/proc``; 0 if it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        children = [
            int(child) for of_thread in folder.glob("task/*/children") for child in of_thread.read_text().split()
        ]
    except OSError:
        return 0.0
    own = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return own / 2**20 + sum(map(memory_of, children))


def judge(kernel: str, size: str) -> Judged:
    """Judges a kernel in a process of its own.

    Raises:
        RuntimeError: The verdict is not AGREE.
    """
    flags = ["--layout", "single", "--dtype", DTYPE, "--size", size, "--examples", "8"]
    command = [sys.executable, "-m", "lossgate", "verify", kernel, *flags]
    start, gib = perf_counter(), 0.0
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "COLUMNS": "1000"}
        )
        while process.poll() is None:
            gib = max(gib, memory_of(process.pid))
            sleep(_SAMPLED)
        seconds = perf_counter() - start
        output.seek(0)
        printed = output.read()
    at_size = [line.strip() for line in printed.splitlines() if "as shares of the limits: " in line]
    if process.returncode or not at_size:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{printed}")
    return Judged(seconds, gib, at_size[-1])


class Subject:
    """A kernel, and a problem of a size for it."""

    def __init__(self, candidate: Candidate, size: str) -> None:
        (entry,) = Deck(candidate, DTYPE, 0).of_shape(Shape.of_size(size))
        self.bound: BoundProblem = entry.bound
        problem = replace(entry.bound.problem, layout=Layout())
        self.candidate, self.placed = candidate, PlacedProblem(entry.bound, problem)
        self._world = SimulatedWorld(Layout())
        self.case = Case(candidate, problem, self._world, entry.bound)

    def seconds(self) -> float:
        """Returns the time of the kernel itself, forward and backward; the faster of two runs."""
        problem, taken = self.placed.problem, list[float]()
        assert self.placed.batch  # made before the clock starts
        with all_cores():
            for _ in range(2):
                case = Case(self.candidate, problem, self._world, self.bound)
                case.placed = self.placed
                start = perf_counter()
                assert case.ranks
                taken.append(perf_counter() - start)
        return min(taken)

    def runs(self) -> Mapping[Output, Tensor]:
        """Makes runs of right kernels, all of them forward and back."""
        result, bound = self.case.result, self.bound

        def noise_of(run: int, what: str) -> Noise:
            return Noise(crc32(f"{run} {what}".encode()))

        with all_cores():
            return run_streamed(
                HEADS[self.placed.problem.head],
                bound.batch,
                bound.bound_spec.returning(frozenset(result.outputs)),
                self.placed.partition,
                stages_of(self.candidate, DTYPE),
                noise_of,
                bound.reference(result.outputs),
                (RUNS, RUNS),
            )

    def compared(self, runs: Mapping[Output, Tensor], some: slice) -> dict[Output, Comparison]:
        """Compares what the kernel gave with the reference, by the noise of some runs."""
        result = self.case.result
        oracle = Oracle(self.candidate, self.placed, result.outputs)
        oracle.deviations = {output: of_runs[some] for output, of_runs in runs.items()}
        self.bound.tolerances.clear()  # which are kept for all oracles
        with all_cores():
            return {
                output: oracle.compare(output, result.outputs[output], result.dtypes[output])
                for output in result.outputs
                if output in runs
            }


@dataclass(frozen=True)
class Row:
    """One number of the judge, from all runs and from some."""

    output: str
    what: str
    from_all: float
    from_few: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """The numbers from few runs as multiples of that from all."""
        return [few / self.from_all for few in self.from_few]


def rows(subject: Subject) -> Iterator[Row]:
    """Yields what the judge says of each output: its limits, the least error that is surely found,
    and how near the kernel came to a limit.
    """
    runs = subject.runs()
    everything = subject.compared(runs, slice(RUNS))
    few = [subject.compared(runs, slice(start, start + FEW)) for start in range(0, RUNS, FEW)]
    for output, compared in everything.items():
        for name, limit in compared.limits.items():
            yield Row(str(output), f"limit of {name}", limit, tuple(one[output].limits[name] for one in few))
        if compared.limits:
            yield Row(str(output), "least error found", compared.mde, tuple(one[output].mde for one in few))
            yield Row(str(output), "worst / limit", compared.margin, tuple(one[output].margin for one in few))


def table(found: Sequence[Row]) -> Table:
    """Returns the table of few runs beside all."""
    sets = [f"{start + 1} to {start + FEW}" for start in range(0, RUNS, FEW)]
    made = Table(title=f"what {RUNS} runs give, and {FEW} of them as multiples of that")
    for heading in ("output", "number"):
        made.add_column(heading, no_wrap=True)
    for heading in (f"all {RUNS}", *sets):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        made.add_row(row.output, row.what, f"{row.from_all:.3g}", *(f"{ratio:.2f}" for ratio in row.ratios))
    return made


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default=SIZE, help="tokens x width x vocabulary, or small")
    parser.add_argument("--kernel", default=KERNEL, help="file.py:name of a candidate")
    arguments = parser.parse_args()
    size, console = SMALL if arguments.size == "small" else arguments.size, Console()
    judged = judge(arguments.kernel, size)
    console.print(judged.margins, soft_wrap=True)
    subject = Subject(load_candidates(arguments.kernel)[0], size)
    own = subject.seconds()
    console.print(
        f"{judged.seconds:.0f} s: {judged.seconds / SECONDS_AIM:.0%} of {SECONDS_AIM} s, and "
        f"{judged.seconds / own:.0f} times one run of the kernel, which took {own:.3g} s",
        soft_wrap=True,
    )
    console.print(f"{judged.gib:.2f} GiB at the peak: {judged.gib / GIB_AIM:.0%} of {GIB_AIM} GiB")
    console.print(table(list(rows(subject))))


if __name__ == "__main__":
    main()
