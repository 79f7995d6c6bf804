# SPDX-License-Identifier: Apache-2.0
"""Judges the false alarms of a calibration again, and freezes those that are left."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from calibration_tables import Merged

from lossgate import Candidate, Problem
from lossgate.cases.case import Case
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, CellRun
from lossgate.engine.failure_files import write_failure
from lossgate.engine.verdict import conclude
from lossgate.properties import PROPERTIES
from lossgate.worlds import SimulatedWorld


def judged_again(merged: Merged, kernels: Sequence[Candidate], folder: Path) -> Iterator[str]:
    """Yields what came of each alarm: that it agrees now, or the command that replays it.

    Args:
        merged: what was counted.
        kernels: those that were judged.
        folder: where a failure file of each alarm is written.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    for (name, dtype), counts in sorted(merged.kernels.items()):
        for alarm in counts.alarms:
            kernel, problem = by_name[name], Problem.from_json(alarm["problem"])
            world = SimulatedWorld(problem.layout)
            result = run_case(Case(kernel, problem, world), PROPERTIES["agreement"])
            world.close()
            if result.agrees:
                yield f"agrees now: {name}  {dtype}  {alarm['problem']}"
                continue
            failed = conclude(CellRun(cell=Cell(kernel, problem.layout, dtype), cases=(result,), failure=result))
            yield f"lossgate replay {quote(str(write_failure(failed, folder)))}"
