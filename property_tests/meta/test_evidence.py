# SPDX-License-Identifier: Apache-2.0
"""Tests of evidence: what a gate reads of a cell."""

import json
from typing import Any

from lossgate import Layout, candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.evidence.writer import evidence_line
from lossgate.judge.comparison import Comparison
from lossgate.judge.pooling import pool
from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import LOSS, metric_output


def line_of(seed: int = 0) -> dict[str, Any]:
    """Returns the evidence of a cell.

    Its loss was compared, and its metric was zero on every problem.
    """
    kernel = candidate("nll", head="logits", name="a")(lambda inputs, options, mesh: inputs.logits.sum())
    entropy = metric_output("entropy")
    seen = Comparison(output=LOSS, values={SCALE: 0.0}, limits={SCALE: 1e-6}, sd=1e-7, unit=2**-24)
    unseen = Comparison(output=entropy, vacuous=True)
    result = CellResult(
        cell=Cell(kernel, Layout(tp=2), "float32"),
        verdict=Verdict.INCONCLUSIVE,
        reasons=("too little",),
        cases=(),
        pooled=(pool(LOSS, [seen]), pool(entropy, [unseen])),
    )
    line = evidence_line(result, seed)
    assert b"\n" not in line
    return json.loads(line, parse_constant=lambda word: f"{word} is no JSON")


def test_an_output_that_was_zero_on_every_problem_has_no_detectable_effect() -> None:
    effects = line_of()["mde"]
    assert 0 < effects["loss"] < 1e-5
    assert effects["entropy"] is None


def test_the_seed_is_that_of_the_run() -> None:
    assert line_of(seed=7)["seed"] == 7


def test_the_line_names_the_cell_and_its_verdict() -> None:
    line = line_of()
    named = {
        name: line[name]
        for name in (
            "candidate",
            "spec",
            "head",
            "property",
            "layout",
            "dtype",
            "verdict",
            "reasons",
            "known_failure",
            "problem",
        )
    }
    assert named == {
        "candidate": "a",
        "spec": "nll",
        "head": "logits",
        "property": "agreement",
        "layout": "tp=2",
        "dtype": "float32",
        "verdict": "INCONCLUSIVE",
        "reasons": ["too little"],
        "known_failure": None,
        "problem": None,
    }
