# SPDX-License-Identifier: Apache-2.0
"""Tests of got beside want: it names the entries that are wrong, by the dims of the whole."""

import re
from typing import Any

import torch
from torch import Tensor

import lossgate
from lossgate import Layout, Problem
from lossgate.cases.case import Case
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.evidence.reader import Where
from lossgate.evidence.summary import summarize
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.worlds import SimulatedWorld

DENSE = dense_candidate(SPECS["nll"], "logits")


@lossgate.candidate("nll", head="logits", axes=("cp",), contract=DENSE.contract)
def wrong_at_one_token(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """Its gradient is wrong at the tokens with label 1."""
    inputs.logits.register_hook(lambda grad: torch.where((inputs.labels == 1)[:, None], 3 * grad, grad))
    outputs = DENSE(inputs, options, mesh)
    assert isinstance(outputs, lossgate.Outputs)
    assert outputs.loss is not None
    return outputs.loss


def shown(**changed: Any) -> tuple[str, ...]:
    layout = Layout(cp=2)
    values: dict[str, Any] = {"lengths": (6,), "masks": ("all",), "hidden": 1, "vocab": 3, "forced_labels": ()}
    problem = Problem(spec="nll", head="logits", dtype="float32", layout=layout, **{**values, **changed})
    world = SimulatedWorld(layout)
    try:
        return run_case(Case(wrong_at_one_token, problem, world), PROPERTIES["agreement"]).side_by_side
    finally:
        world.close()


def test_the_entries_that_are_farthest_off_are_shown_with_both_numbers() -> None:
    lines = shown()
    assert 0 < len(lines) <= 2
    for line in lines:
        found = re.fullmatch(r"grad of logits, token \d, vocab \d: got (\S+), want (\S+)", line)
        assert found is not None
        assert abs(float(found[1]) / float(found[2]) - 3) < 1e-4


def test_of_a_right_problem_nothing_is_shown() -> None:
    assert shown(masks=("none",)) == ()


def test_evidence_and_what_gates_write_have_them() -> None:
    result = run_cell(Cell(wrong_at_one_token, Layout(), "float32"), Settings(examples=5))
    assert result.failure is not None
    assert result.failure.side_by_side
    record = result.record
    assert record.failure is not None
    assert record.failure.side_by_side == result.failure.side_by_side
    assert summarize(record, Where("file", 1), "0" * 64).why.endswith("; ".join(result.failure.side_by_side))
