# SPDX-License-Identifier: Apache-2.0
"""Counts how often the judge rejects a correct kernel, or the difference of two, and which known
bugs it catches.

    python benchmarks/calibration.py                 over 20,000 comparisons, and every bug
    python benchmarks/calibration.py --problems 50   a quick look

The problems are random, over several layouts; the seed is printed. A bug is visible in a problem if
it shifts the SCALE of an output by more than the minimum detectable effect that the judge states
for the correct kernel.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from lossgate import Candidate, Layout, Problem
from lossgate.bank.bugs import CROSS_ENTROPY_BUGS, cross_entropy_with
from lossgate.bank.cross_entropy import ALL_BFLOAT16, STYLES, Style, make
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.difference import differences
from lossgate.cases.placement import sample_problems
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.judge.comparison import Comparison
from lossgate.judge.explain import explain_difference
from lossgate.judge.pooling import pool
from lossgate.judge.statistics import SCALE
from lossgate.properties import PROPERTIES
from lossgate.specs.outputs import Output
from lossgate.worlds import SimulatedWorld

LAYOUTS = ("single", "tp=2", "cp=2", "dp=2", "tp=3", "dp=2,cp=2,tp=2")
POOL = 100
"""Problems in a pool."""


@dataclass
class CorrectCounts:
    """What came of the correct kernel of one style, in one dtype."""

    problems: int = 0
    comparisons: int = 0
    false_alarms: list[CaseResult] = field(default_factory=list)
    margin: float = 0.0
    """The largest statistic, as a share of its limit."""
    mdes: list[float] = field(default_factory=list)
    """The minimum detectable effect of each comparison."""
    pool_mdes: list[float] = field(default_factory=list)
    pool_alarms: int = 0
    pool_margin: float = 0.0
    """The largest pooled scale, as a share of its limit."""

    def add(self, result: CaseResult) -> None:
        self.problems += 1
        self.comparisons += len(result.comparisons)
        self.margin = max([self.margin, *(c.margin for c in result.comparisons)])
        self.mdes += [c.mde for c in result.comparisons if c.values and not c.vacuous]
        if not result.agrees:
            self.false_alarms.append(result)

    def add_pools(self, output: Output, comparisons: list[Comparison]) -> None:
        """Pools the comparisons of one output, so many at a time; a rest is left out."""
        for start in range(0, len(comparisons) - POOL + 1, POOL):
            pooled = pool(output, comparisons[start : start + POOL])
            self.pool_mdes.append(pooled.mde)
            self.pool_alarms += not pooled.agrees
            self.pool_margin = max(self.pool_margin, abs(pooled.scale) / pooled.limit)


@dataclass
class BugCounts:
    """What came of the kernels of one style with one bug."""

    problems: int = 0
    caught: int = 0
    visible: int = 0
    visible_caught: int = 0

    def add(self, right: CaseResult, wrong: CaseResult) -> None:
        """Counts a problem, from the results of the correct kernel and of the one with the bug."""
        visible = any(
            abs(w.values[SCALE] - r.values[SCALE]) > r.mde
            for r, w in zip(right.comparisons, wrong.comparisons, strict=False)
            if r.output == w.output and r.values and w.values and not r.vacuous
        )
        self.problems += 1
        self.caught += not wrong.agrees
        self.visible += visible
        self.visible_caught += visible and not wrong.agrees

    def __str__(self) -> str:
        shares = share(self.visible_caught, self.visible), share(self.caught, self.problems)
        return f"{shares[0]} of {self.visible} ({shares[1]})"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def run(candidate: Candidate, problem: Problem, world: SimulatedWorld) -> CaseResult:
    return run_case(Case(candidate, problem, world), PROPERTIES["agreement"])


def measure(style: Style, dtype: str, counts: tuple[int, int], seed: int, bugs: dict[str, BugCounts]) -> CorrectCounts:
    """Judges the correct kernel of a style, and the same kernel with each bug.

    Args:
        style: how the kernel computes.
        dtype: of its inputs.
        counts: the number of problems, and of those on which each bug is judged too.
        seed: of the problems.
        bugs: the bugs; their counts are added to.
    """
    found, correct = CorrectCounts(), make(style)
    with_bug = {bug: cross_entropy_with(style, bug) for bug in bugs}
    by_output: dict[Output, list[Comparison]] = defaultdict(list)
    for layout in map(Layout.parse, LAYOUTS):
        world = SimulatedWorld(layout)
        each, each_with_bugs = (-(-count // len(LAYOUTS)) for count in counts)
        for i, problem in enumerate(sample_problems(correct, layout, dtype, each, seed)):
            right = run(correct, problem, world)
            found.add(right)
            for comparison in right.comparisons:
                by_output[comparison.output].append(comparison)
            for bug, counted in bugs.items() if i < each_with_bugs else ():
                counted.add(right, run(with_bug[bug], problem, world))
        world.close()
    for output, comparisons in by_output.items():
        found.add_pools(output, comparisons)
    return found


def measure_all(counts: tuple[int, int], seed: int) -> Iterator[tuple[str, Style, CorrectCounts, dict[str, BugCounts]]]:
    """Yields dtype, style and what came of it, for every style."""
    for dtype, styles in STYLES.items():
        for style in styles + ((ALL_BFLOAT16,) if dtype == "bfloat16" else ()):
            with_bugs = counts[1] and style is not ALL_BFLOAT16
            bugs = {bug: BugCounts() for bug in CROSS_ENTROPY_BUGS} if with_bugs else {}
            yield dtype, style, measure(style, dtype, counts, seed, bugs), bugs


def measure_pairs(dtype: str, count: int, seed: int) -> Iterator[tuple[str, CorrectCounts]]:
    """Compares every two correct kernels of a dtype with each other.

    Args:
        dtype: of their inputs.
        count: the number of problems.
        seed: of the problems.

    Yields:
        The names of two kernels, and what came of them.
    """
    kernels = [make(style) for style in STYLES[dtype] + ((ALL_BFLOAT16,) if dtype == "bfloat16" else ())]
    found = {pair: CorrectCounts() for pair in combinations(range(len(kernels)), 2)}
    by_output: dict[tuple[tuple[int, int], Output], list[Comparison]] = defaultdict(list)
    for layout in map(Layout.parse, LAYOUTS):
        world = SimulatedWorld(layout)
        for problem in sample_problems(kernels[0], layout, dtype, -(-count // len(LAYOUTS)), seed):
            bound = BoundProblem(kernels[0].spec, problem)
            cases = [Case(kernel, problem, world, bound) for kernel in kernels]
            for i, j in found:
                compared = tuple(differences(cases[i], cases[j]))
                names = kernels[i].name, kernels[j].name
                lines = tuple(line for one in compared for line in explain_difference(one, *names))
                found[i, j].add(CaseResult(problem=problem, comparisons=compared, findings=lines))
                for one in compared:
                    by_output[(i, j), one.output].append(one)
        world.close()
    for (pair, output), comparisons in by_output.items():
        found[pair].add_pools(output, comparisons)
    yield from ((f"{kernels[i].name} less {kernels[j].name}", counts) for (i, j), counts in found.items())


def row_of(dtype: str, name: str, found: CorrectCounts) -> list[str]:
    """Returns what a table of correct kernels shows of one, or of two."""
    pools = f"{median(found.pool_mdes):.2g} (largest {max(found.pool_mdes):.2g})" if found.pool_mdes else "-"
    return [
        dtype,
        name,
        str(found.problems),
        str(found.comparisons),
        str(len(found.false_alarms)),
        f"{found.margin:.2f}",
        f"{median(found.mdes):.2g}",
        pools,
        f"{found.pool_alarms} of {len(found.pool_mdes)}, at most {found.pool_margin:.2f}",
    ]


def show_alarms(console: Console, name: str, found: CorrectCounts) -> None:
    for alarm in found.false_alarms:
        console.print(f"FALSE ALARM  {name}  {'; '.join(alarm.findings)}\n  {alarm.problem.to_json()}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=640, help="problems for each kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bug-problems", type=int, default=120, help="how many of them each bug is judged on")
    parser.add_argument("--pair-problems", type=int, default=180, help="problems on which every two are compared")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console, start = Console(width=150, highlight=False), perf_counter()
    figures = (
        "problems",
        "comparisons",
        "false alarms",
        "of limit",
        "median MDE",
        f"MDE of {POOL} pooled",
        "pool alarms",
    )
    of_correct = Table("dtype", "correct kernel", *figures, title=f"Correct kernels, seed {arguments.seed}")
    of_pairs = Table("dtype", "difference of", *figures, title=f"Two correct kernels, seed {arguments.seed}")
    of_bugs = Table(
        "bug",
        *(f"{dtype}: {style.name}" for dtype, styles in STYLES.items() for style in styles),
        title="Bugs caught, of those visible (of all)",
    )
    columns: list[dict[str, BugCounts]] = []
    total = alarms = 0
    for dtype, style, found, bugs in measure_all((arguments.problems, arguments.bug_problems), arguments.seed):
        total, alarms = total + found.comparisons, alarms + len(found.false_alarms)
        of_correct.add_row(*row_of(dtype, style.name, found))
        show_alarms(console, style.name, found)
        if style is not ALL_BFLOAT16:
            columns.append(bugs)
    console.print(of_correct)
    console.print(f"{alarms} false alarms in {total} comparisons of correct kernels")
    if arguments.bug_problems:
        for bug in CROSS_ENTROPY_BUGS:
            of_bugs.add_row(bug, *(str(column[bug]) for column in columns))
        console.print(of_bugs)
    total = alarms = 0
    for dtype in STYLES if arguments.pair_problems else ():
        for names, found in measure_pairs(dtype, arguments.pair_problems, arguments.seed):
            total, alarms = total + found.comparisons, alarms + len(found.false_alarms)
            of_pairs.add_row(*row_of(dtype, names, found))
            show_alarms(console, names, found)
    if arguments.pair_problems:
        console.print(of_pairs)
        console.print(f"{alarms} false alarms in {total} comparisons of two correct kernels")
    console.print(f"{perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
