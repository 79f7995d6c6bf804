# SPDX-License-Identifier: Apache-2.0
"""Holds right kernels to every property beside agreement; prints false alarms and what each costs.

    python benchmarks/properties.py                            every right kernel of the bank
    python benchmarks/properties.py ci/candidates/ours.py      those of files
    python benchmarks/properties.py --every 40 --problems 1    a few of them

Each property is checked on every problem that says something about it. Its cost is given in
milliseconds, and as a share of judging agreement on the same problems. The exit code is 1 if there
was a false alarm.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from kernel_bank.known_right import known_right
from lossgate import Candidate
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.loading import load_candidates
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell
from lossgate.engine.plan import plan
from lossgate.engine.settings import Settings
from lossgate.worlds import make_world


@dataclass
class Tally:
    """What came of all runs of a property."""

    runs: int = 0
    seconds: float = 0.0
    alarms: int = 0


@dataclass
class Counted:
    """What came of all properties."""

    agreement: Tally = field(default_factory=Tally)
    others: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))


def run(cells: Sequence[Cell], problems: int, seed: int) -> Counted:
    """Checks cells one after the other, and prints each alarm."""
    counted = Counted()
    for cell in cells:
        world = make_world(cell.world, cell.layout, 60.0)
        for problem in sample_problems(cell.candidate, cell.layout, cell.dtype, problems, seed):
            case, start = Case(cell.candidate, problem, world), perf_counter()
            agrees = run_case(case, cell.property).agrees
            counted.agreement.runs += 1
            counted.agreement.seconds += perf_counter() - start
            counted.agreement.alarms += not agrees
            for held_to in cell.also if agrees else ():
                if held_to.name in cell.candidate.exempt:
                    continue
                tally, start = counted.others[held_to.name], perf_counter()
                result = run_case(case, held_to)
                tally.seconds += perf_counter() - start
                tally.runs += result.fits
                tally.alarms += not result.agrees
                for finding in result.findings:
                    print(f"{cell} {held_to}: {finding}\n  on {problem.to_json()}")
        world.close()
    return counted


def show(counted: Counted) -> None:
    """Prints a table, the dearest property first."""
    agreement, others = counted.agreement, counted.others
    print(f"{'property':20} {'runs':>7} {'alarms':>7} {'ms':>7} {'of agreement':>13}")
    own = 1000 * agreement.seconds / max(agreement.runs, 1)
    print(f"{'agreement':20} {agreement.runs:7} {agreement.alarms:7} {own:7.1f}")
    for name, tally in sorted(others.items(), key=lambda item: -item[1].seconds):
        each = 1000 * tally.seconds / max(tally.runs, 1)
        print(f"{name:20} {tally.runs:7} {tally.alarms:7} {each:7.1f} {each / own:13.2f}")
    runs, seconds = sum(t.runs for t in others.values()), sum(t.seconds for t in others.values())
    alarms = sum(tally.alarms for tally in others.values())
    print(f"{'all beside agreement':20} {runs:7} {alarms:7}; {seconds / max(agreement.seconds, 1e-9):.2f} of agreement")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of candidates; by default the bank of right kernels")
    parser.add_argument("--layouts", default="single,dp=2,cp=2,tp=2,dp=2/cp=2/tp=2", help="separated by commas")
    parser.add_argument("--problems", type=int, default=2, help="drawn for each kernel, layout and dtype")
    parser.add_argument("--every", type=int, default=1, help="takes one kernel of so many")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other problems")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loaded = [kernel for file in given.files for kernel in load_candidates(file)] or known_right()
    kernels: list[Candidate] = [kernel for kernel in loaded if kernel.known_failure is None][:: given.every]
    layouts = tuple(layout.replace("/", ",") for layout in given.layouts.split(","))
    counted = run(plan(kernels, Settings(layouts=layouts)), given.problems, given.seed)
    show(counted)
    return int(any(tally.alarms for tally in counted.others.values()))


if __name__ == "__main__":
    sys.exit(main())
