# SPDX-License-Identifier: Apache-2.0
"""Verdicts: what makes a cell agree, disagree, or say nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from controls import STYLES, make

from lossgate import Candidate, Finding, Layout, UsageError
from lossgate.cases.examine import Examination
from lossgate.engine.cell import Cell, CellResult, Verdict, conclude
from lossgate.engine.run import CellFinished, RunFinished, RunStarted, plan, run, run_cell
from lossgate.engine.settings import Settings

RIGHT = make(STYLES["bfloat16"][0])
WRONG = make(STYLES["bfloat16"][0], "dX x1.01")


def verified(candidate: Candidate, layout: str = "single", **settings: int) -> CellResult:
    return run_cell(Cell(candidate, Layout.parse(layout), "bfloat16"), Settings(**{"examples": 30, **settings}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def agreed() -> CellResult:
    return verified(RIGHT)


def concluded(result: CellResult, examined: tuple[Examination, ...], failure: Examination | None = None) -> CellResult:
    return conclude(result.cell, examined, failure, 0, 0.0)


def test_a_right_kernel_agrees(agreed: CellResult) -> None:
    assert agreed.verdict is Verdict.AGREE
    assert not agreed.reasons
    assert agreed.margin < 1
    assert agreed.mde < 0.01
    assert agreed.comparisons > 90
    assert not agreed.missing_branches
    assert agreed.power["zero"] == 1


def test_a_wrong_kernel_disagrees_on_a_small_problem() -> None:
    result = verified(WRONG)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    assert result.failure.problem.tokens < 10
    assert result.reasons == result.failure.findings


def test_few_problems_are_inconclusive(agreed: CellResult) -> None:
    result = verified(RIGHT, examples=1, rounds=1)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert any("never visited" in reason for reason in result.reasons)


def test_no_more_rounds_are_tried_than_allowed() -> None:
    first, second = (verified(RIGHT, examples=1, rounds=rounds) for rounds in (1, 2))
    assert first.verdict is second.verdict is Verdict.INCONCLUSIVE
    assert len(first.examined) == 1
    assert 2 <= len(second.examined) < 10


def test_more_are_tried_while_a_cell_is_inconclusive() -> None:
    result = verified(RIGHT, examples=3, rounds=20)
    assert result.verdict is Verdict.AGREE
    assert len(result.examined) > 3


def test_what_could_not_be_seen_is_inconclusive(agreed: CellResult) -> None:
    examined = tuple(replace(e, comparisons=tuple(replace(c, sd=1.0) for c in e.comparisons)) for e in agreed.examined)
    result = concluded(agreed, examined)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "an error of 1% in scale could have hidden" in result.reasons[0]


def test_a_branch_that_was_never_visited_is_inconclusive(agreed: CellResult) -> None:
    examined = tuple(replace(e, branches=frozenset({"trained token"})) for e in agreed.examined)
    result = concluded(agreed, examined)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reasons == (
        "never visited: a token whose label is not; try more problems",
        "never visited: a trained label on the first row of a tp rank's vocabulary; try more problems",
        "never visited: a trained label on the last row of a tp rank's vocabulary; try more problems",
    )


def test_a_blind_judge_is_inconclusive(agreed: CellResult) -> None:
    first = agreed.examined[-1]
    blind = replace(first, comparisons=tuple(replace(c, blind=("x1.01",)) for c in first.comparisons))
    result = concluded(agreed, (*agreed.examined, blind))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reasons[0] == "the judge missed planted errors: x1.01 in loss"


def test_a_bias_over_all_problems_disagrees(agreed: CellResult) -> None:
    biased = tuple(
        replace(
            e, comparisons=tuple(replace(c, values=c.values and {**c.values, "scale": 0.003}) for c in e.comparisons)
        )
        for e in agreed.examined
    )
    result = concluded(agreed, biased)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is None
    assert "problems together 1.003 times the reference" in result.reasons[0]


# The engine


def test_events() -> None:
    events = list(run([RIGHT], Settings(layouts=("single", "tp=2"), dtypes=("bfloat16",), examples=2, rounds=1)))
    assert [type(event) for event in events] == [RunStarted, CellFinished, CellFinished, RunFinished]
    assert isinstance(events[0], RunStarted)
    assert [str(cell) for cell in events[0].cells] == [
        f"{RIGHT.name}[agreement-{layout}-bfloat16]" for layout in ("single", "tp=2")
    ]


def test_plan_keeps_to_what_a_candidate_can_do() -> None:
    narrow = replace(RIGHT, axes=("tp",), dtypes=("bfloat16",))
    cells = plan([narrow], Settings(ranks=3))
    assert [str(cell.layout) for cell in cells] == ["single", "tp=2", "tp=3"]
    assert {cell.dtype for cell in cells} == {"bfloat16"}
    assert [str(cell.layout) for cell in plan([narrow], Settings(layouts=("cp=2", "tp=2")))] == ["tp=2"]


def test_a_candidate_without_a_cell_is_told() -> None:
    with pytest.raises(UsageError, match="nothing to verify, with axes none and dtypes bfloat16, on layouts cp=2"):
        plan([replace(RIGHT, axes=(), dtypes=("bfloat16",))], Settings(layouts=("cp=2",)))


# Known findings

FINDINGS = Path(__file__).parents[2] / "ci/candidates/findings"


def test_a_known_finding_is_expected() -> None:
    from lossgate.declaration.loading import load_candidates

    (known,) = load_candidates(f"{FINDINGS.parent}/pytorch.py:torch_loss_parallel_uneven")
    (cell,) = plan([known], Settings())
    result = run_cell(cell, Settings())
    assert result.verdict is Verdict.DISAGREE
    assert result.expected
    assert len(result.examined) == 1


def test_a_finding_that_shows_no_more_is_no_pass() -> None:
    mended = replace(RIGHT, finding=Finding(name="torch-2", example=FINDINGS / "torch-2-chunked-loss.json"))
    (cell,) = plan([mended], Settings())
    result = run_cell(cell, Settings())
    assert result.verdict is Verdict.DISAGREE
    assert not result.expected
    assert result.reasons == (
        "known finding torch-2 shows no more: its frozen example agrees; verify the candidate without it",
    )


def test_a_finding_needs_an_example_that_disagrees_alone(tmp_path: Path) -> None:
    frozen = json.loads((FINDINGS / "torch-2-chunked-loss.json").read_text())
    (tmp_path / "pooled.json").write_text(json.dumps({**frozen, "pooled": True}))
    with pytest.raises(UsageError, match=r"finding x: the problems of .*pooled.json disagree only together"):
        plan([replace(RIGHT, finding=Finding(name="x", example=tmp_path / "pooled.json"))], Settings())


def test_a_finding_that_shows_otherwise_is_no_pass() -> None:
    """Such as a kernel that no longer runs at all."""

    def broken(inputs: object, options: object, mesh: object) -> object:
        raise AttributeError("no such function")

    gone = replace(
        RIGHT, kernel=broken, finding=Finding(name="torch-2", example=FINDINGS / "torch-2-chunked-loss.json")
    )
    (cell,) = plan([gone], Settings())
    result = run_cell(cell, Settings())
    assert not result.expected
    assert (
        result.reasons[0]
        == "known finding torch-2 has changed: it was known by grad of weight and loss, not RankRaised"
    )
