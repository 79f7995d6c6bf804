# SPDX-License-Identifier: Apache-2.0
"""How often does the judge reject a correct kernel, and which bugs does it see? Prints both, with seeds.

    python benchmarks/calibration.py                        20,000 comparisons of correct kernels, and every bug
    python benchmarks/calibration.py --problems 50          a quick look

Random problems over several layouts. A bug is visible in a problem if it shifts the SCALE of an output by more than
the minimum detectable effect that the correct kernel's comparison states.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from controls import ALL_BFLOAT16, BUGS, STYLES, Style, make
from rich.console import Console
from rich.table import Table

from lossgate import Layout
from lossgate.cases.examine import Examination, examine
from lossgate.cases.strategies import sample_problems
from lossgate.judge.pooling import pool
from lossgate.judge.statistics import SCALE
from lossgate.worlds import SimulatedWorld

LAYOUTS = ("single", "tp=2", "cp=2", "dp=2", "tp=3", "dp=2,cp=2,tp=2")
POOL = 100
"""Problems in a pool."""


@dataclass
class Tally:
    """Of one style and dtype."""

    problems: int = 0
    comparisons: int = 0
    false_alarms: list[Examination] = field(default_factory=list)
    margin: float = 0.0
    mdes: list[float] = field(default_factory=list)
    pools: list[float] = field(default_factory=list)
    pool_alarms: int = 0
    pool_margin: float = 0.0


@dataclass
class Caught:
    """Of one bug in one style."""

    visible: int = 0
    visible_caught: int = 0
    problems: int = 0
    caught: int = 0


def measure(style: Style, dtype: str, counts: tuple[int, int], seed: int, bugs: dict[str, Caught]) -> Tally:
    """Judge the correct kernel on so many problems, and every bug on so many of them."""
    tally, correct = Tally(), make(style)
    mutants = {bug: make(style, bug) for bug in bugs}
    waiting: dict[str, list] = defaultdict(list)
    for layout in map(Layout.parse, LAYOUTS):
        world = SimulatedWorld(layout)
        each, each_with_bugs = (-(-count // len(LAYOUTS)) for count in counts)
        for i, problem in enumerate(sample_problems(correct, layout, dtype, each, seed)):
            right = examine(correct, problem, world)
            _add(tally, right)
            for comparison in right.comparisons:
                waiting[comparison.output].append(comparison)
            for bug, caught in bugs.items() if i < each_with_bugs else ():
                _compare(caught, right, examine(mutants[bug], problem, world))
        world.close()
    for output, comparisons in waiting.items():
        for start in range(0, len(comparisons) - POOL + 1, POOL):
            pooled = pool(output, comparisons[start : start + POOL])
            tally.pools.append(pooled.mde)
            tally.pool_alarms += not pooled.agrees
            tally.pool_margin = max(tally.pool_margin, abs(pooled.scale) / pooled.limit)
    return tally


def _add(tally: Tally, right: Examination) -> None:
    tally.problems += 1
    tally.comparisons += len(right.comparisons)
    tally.margin = max([tally.margin, *(c.margin for c in right.comparisons)])
    tally.mdes += [c.mde for c in right.comparisons if c.values and not c.vacuous]
    if not right.agrees:
        tally.false_alarms.append(right)


def _compare(caught: Caught, right: Examination, wrong: Examination) -> None:
    effects = [
        abs(w.values[SCALE] - r.values[SCALE]) > r.mde
        for r, w in zip(right.comparisons, wrong.comparisons, strict=False)
        if r.output == w.output and r.values and w.values and not r.vacuous
    ]
    caught.problems += 1
    caught.caught += not wrong.agrees
    caught.visible += any(effects)
    caught.visible_caught += any(effects) and not wrong.agrees


def rows(counts: tuple[int, int], seed: int) -> Iterator[tuple[str, Style, Tally, dict[str, Caught]]]:
    for dtype, styles in STYLES.items():
        for style in styles + ((ALL_BFLOAT16,) if dtype == "bfloat16" else ()):
            bugs = {bug: Caught() for bug in BUGS} if counts[1] and style is not ALL_BFLOAT16 else {}
            yield dtype, style, measure(style, dtype, counts, seed, bugs), bugs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=640, help="for each kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bug-problems", type=int, default=120, help="of these, so many with each bug")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console, start = Console(width=150, highlight=False), perf_counter()
    quiet = Table(
        "dtype",
        "correct kernel",
        "problems",
        "comparisons",
        "false alarms",
        "of limit",
        "median MDE",
        f"MDE of {POOL} pooled",
        "pool alarms",
        title=f"Correct kernels, seed {arguments.seed}",
    )
    seen = Table(
        "bug",
        *(f"{dtype}: {style.name}" for dtype, styles in STYLES.items() for style in styles),
        title="Bugs caught, of those visible (of all)",
    )
    columns: list[dict[str, Caught]] = []
    total = alarms = 0
    for dtype, style, tally, bugs in rows((arguments.problems, arguments.bug_problems), arguments.seed):
        total, alarms = total + tally.comparisons, alarms + len(tally.false_alarms)
        pools = f"{median(tally.pools):.2g} (largest {max(tally.pools):.2g})" if tally.pools else "-"
        quiet.add_row(
            dtype,
            style.name,
            str(tally.problems),
            str(tally.comparisons),
            str(len(tally.false_alarms)),
            f"{tally.margin:.2f}",
            f"{median(tally.mdes):.2g}",
            pools,
            f"{tally.pool_alarms} of {len(tally.pools)}, at most {tally.pool_margin:.2f}",
        )
        for alarm in tally.false_alarms:
            console.print(
                f"FALSE ALARM  {style.name}  {'; '.join(alarm.findings)}\n  {alarm.problem.to_json()}", markup=False
            )
        if style is not ALL_BFLOAT16:
            columns.append(bugs)
    console.print(quiet)
    console.print(f"{alarms} false alarms in {total} comparisons of correct kernels")
    if arguments.bug_problems:
        for bug in BUGS:
            cells = [column[bug] for column in columns]
            seen.add_row(
                bug,
                *(
                    f"{_share(c.visible_caught, c.visible)} of {c.visible} ({_share(c.caught, c.problems)})"
                    for c in cells
                ),
            )
        console.print(seen)
    console.print(f"{perf_counter() - start:.0f} s")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


if __name__ == "__main__":
    main()
