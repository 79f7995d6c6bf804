# SPDX-License-Identifier: Apache-2.0
"""What people see of a run."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from lossgate import Candidate, Layout, candidate
from lossgate.consumers.terminal import Terminal
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run import CellFinished
from lossgate.reports.failure_files import FailureFiles


def test_only_the_first_cells_of_a_candidate_are_told_in_full(tmp_path: Path) -> None:
    """The others fail alike as a rule; each has its line all the same."""
    text = StringIO()
    terminal = Terminal(FailureFiles(tmp_path), Console(file=text, width=200))

    def finish(kernel: Candidate, tp: int) -> None:
        cell = Cell(kernel, Layout(tp=tp), "float32")
        reason = f"{kernel.name} is wrong on tp={tp}"
        terminal(CellFinished(CellResult(cell=cell, verdict=Verdict.DISAGREE, reasons=(reason,), examined=())))

    one, other = (
        candidate("nll", head="logits", name=name)(lambda inputs, options, mesh: inputs.logits.sum())
        for name in ("one", "other")
    )
    for tp in range(2, 8):
        finish(one, tp)
    finish(other, 2)
    told = text.getvalue()
    assert [f"one is wrong on tp={tp}" in told for tp in range(2, 8)] == [True] * 3 + [False] * 3
    assert all(f"DISAGREE  one  float32  tp={tp}:" in told for tp in range(2, 8))
    assert "other is wrong on tp=2" in told
