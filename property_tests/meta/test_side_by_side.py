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
from lossgate.judge.comparison import Comparison, Entry
from lossgate.judge.explain import explain
from lossgate.judge.statistics import SCALE
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.specs.outputs import LOSS, gradient_output
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
        return run_case(Case(wrong_at_one_token, problem, world), PROPERTIES["agreement"]).findings
    finally:
        world.close()


def test_the_greatest_differences_are_shown_with_both_numbers() -> None:
    (line,) = shown()
    place = r"token \d, vocab \d"
    found = re.fullmatch(
        rf"grad of logits: got (\S+), want (\S+) at {place}; greatest absolute difference (\S+), greatest relative "
        rf"difference (\S+)( \(got (\S+), want (\S+) at {place}\))?",
        line,
    )
    assert found is not None
    got, want, absolute = map(float, found.groups()[:3])
    assert abs(got / want - 3) < 1e-4
    assert abs(absolute - 2 * abs(want)) < 0.01 * absolute
    assert found[4] == "2"


def test_of_a_right_problem_nothing_is_shown() -> None:
    assert shown(masks=("none",)) == ()


def test_of_many_outputs_the_first_two_show_numbers() -> None:
    outputs = (LOSS, *(gradient_output(name, ("vocab",)) for name in ("hidden", "weight", "bias")))
    farthest = (Entry("vocab 1", 2.0, 0.0),)
    made = [Comparison(output=one, values={SCALE: 1.0}, limits={SCALE: 0.1}, farthest=farthest) for one in outputs]
    assert [*explain(made)] == [
        "loss: got 2, want 0 at vocab 1; greatest absolute difference 2",
        "grad of hidden: got 2, want 0 at vocab 1; greatest absolute difference 2",
        "also off: grad of weight; grad of bias",
    ]


def test_evidence_has_numbers_as_reasons_and_statistics_apart() -> None:
    result = run_cell(Cell(wrong_at_one_token, Layout(), "float32"), Settings(examples=5))
    assert result.failure is not None
    record = result.record
    assert record.failure is not None
    assert record.reasons[0] == record.failure.findings[0]
    assert record.reasons[0].startswith("grad of logits: got ")
    assert record.failure.statistics == result.failure.statistics
    assert re.match(r"grad of logits: \S+ times the reference; rounding explains", record.failure.statistics[0])
    why = summarize(record, Where("file", 1), "0" * 64).why
    assert why == "; ".join(record.told)
    assert not any(line in why for line in record.failure.statistics)
