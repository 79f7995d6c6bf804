# SPDX-License-Identifier: Apache-2.0
"""Tests of verdicts: what makes a cell AGREE, DISAGREE or INCONCLUSIVE."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_bank.bugs import cross_entropy_with
from kernel_bank.cross_entropy import STYLES, make
from lossgate import Candidate, KnownFailure, Layout, UsageError
from lossgate.adequacy.entry import Placed
from lossgate.declaration.loading import load_candidates
from lossgate.dense_candidates import dense_candidate
from lossgate.engine import search
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun, Verdict
from lossgate.engine.events import CellFinished, CellStarted, RunFinished, RunStarted
from lossgate.engine.plan import plan
from lossgate.engine.run import run
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import FEWEST, conclude
from lossgate.judge.comparison import Comparison, Entry
from lossgate.judge.statistics import SCALE
from lossgate.losses import SPECS
from lossgate.problems.problem import Problem
from lossgate.specs.coverage_goals import CoverageGoal
from lossgate.specs.outputs import LOSS
from lossgate.specs.sharding_goals import SHARDING_GOALS

pytestmark = pytest.mark.xdist_group("cell")  # one worker makes what its tests share

RIGHT = make(STYLES["bfloat16"][0])
WRONG = cross_entropy_with(STYLES["bfloat16"][0], "dX x1.01")


def verified(candidate: Candidate, layout: str = "single", **settings: int) -> CellResult:
    return run_cell(Cell(candidate, Layout.parse(layout), "bfloat16"), Settings(**{"examples": 30, **settings}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def agreed() -> CellResult:
    return verified(RIGHT)


def concluded(result: CellResult, cases: tuple[CaseResult, ...]) -> CellResult:
    return conclude(CellRun(cell=result.cell, cases=cases))


def test_a_right_kernel_agrees(agreed: CellResult) -> None:
    assert agreed.verdict is Verdict.AGREE
    assert not agreed.reasons
    assert agreed.record.margin < 1
    assert agreed.record.mde < 0.01
    assert agreed.record.comparisons > 90
    assert not agreed.record.missing_goals


def test_zero_is_rejected_wherever_rounding_does_not_hide_it(agreed: CellResult) -> None:
    """The loss of a single confident label can be smaller than its noise: its MDE is above 1."""
    planted = [c for case in agreed.cases for c in case.comparisons if "zero" in c.rejected]
    sharp = [c for c in planted if c.mde < 1]
    assert all(c.rejected["zero"] for c in sharp)
    assert len(sharp) > 0.97 * len(planted)


def test_a_wrong_kernel_disagrees_on_a_small_problem() -> None:
    result = verified(WRONG)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    assert result.failure.problem.tokens < 10
    assert result.reasons == result.failure.findings


LARGE = 3
"""Every cell tries so many large problems beside those that are chosen."""


def only_one(placed: Sequence[Placed], *_: object) -> list[Placed]:
    """Chooses one problem, with as few goals as any, in place of all problems that are needed."""
    return [min(placed, key=lambda one: len(one.goals))]


def test_one_problem_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "choose", only_one)
    result = verified(RIGHT, examples=1, rounds=1)
    assert len(result.cases) == 1 + LARGE
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "4 problems are too few for AGREE; raise --examples to 8 at least" in result.reasons


def test_few_problems_never_agree(agreed: CellResult) -> None:
    """Whatever they cover and kill."""
    for count in (1, FEWEST - 1, FEWEST):
        result = concluded(agreed, agreed.cases[:count])
        few = [reason for reason in result.reasons if "too few for AGREE" in reason]
        assert bool(few) == (count < FEWEST)
        assert result.verdict is Verdict.INCONCLUSIVE or not few


@pytest.mark.slow
def test_no_more_rounds_are_tried_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A goal that no problem reaches asks for more in every round."""
    monkeypatch.setattr(search, "choose", only_one)
    never = {**RIGHT.spec.goals, "never": CoverageGoal(meaning="what no problem has")}
    needy = replace(RIGHT, spec=replace(RIGHT.spec, goals=never))
    first, second, third = (verified(needy, examples=1, rounds=rounds) for rounds in (1, 2, 3))
    assert first.verdict is second.verdict is third.verdict is Verdict.INCONCLUSIVE
    drawn = re.search(
        r"'never': what no problem has; none of (\d+) problems that were drawn for it reaches it, and more hardly",
        str(third.reasons),
    )
    assert drawn
    assert int(drawn[1]) > len(third.cases)
    assert len(first.cases) == 1 + LARGE < len(second.cases) < len(third.cases)
    assert second.cases[: len(first.cases)] == first.cases
    assert third.cases[: len(second.cases)] == second.cases


def test_more_problems_are_tried_while_a_cell_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "choose", only_one)
    result = verified(RIGHT, examples=1, rounds=20)
    assert result.verdict is Verdict.AGREE
    assert len(result.cases) > 1


def test_as_many_problems_are_tried_as_goals_and_mutants_need() -> None:
    """The number of examples is a floor."""
    result = verified(RIGHT, examples=1, rounds=1)
    assert len(result.cases) > 1
    assert not result.record.missing_goals
    assert not result.record.surviving


def test_an_error_that_would_not_have_been_detected_is_inconclusive(agreed: CellResult) -> None:
    cases = tuple(
        replace(case, comparisons=tuple(replace(c, sd=1.0) for c in case.comparisons)) for case in agreed.cases
    )
    result = concluded(agreed, cases)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "an error of 1% in its scale would not have been detected" in result.reasons[0]


def test_a_missing_coverage_goal_is_inconclusive(agreed: CellResult) -> None:
    cases = tuple(replace(case, covered=frozenset({"trained token"})) for case in agreed.cases)
    result = concluded(agreed, cases)
    assert result.verdict is Verdict.INCONCLUSIVE
    goals = {
        "masked token": "a token whose label is not trained",
        "label on the first row": "a trained label on the first row of the vocabulary",
        "label on the last row": "a trained label on the last row of the vocabulary",
        "with a bias": "trained tokens, and an lm-head with a bias",
        "without a bias": "trained tokens, and an lm-head without a bias",
        "padding between sequences": SHARDING_GOALS["padding between sequences"].meaning,
    }
    assert result.reasons == tuple(
        f"no problem reached goal {name!r}: {meaning}; no problem was drawn for it; set rounds to 4 or more"
        for name, meaning in goals.items()
    )


def test_a_blind_judge_is_inconclusive(agreed: CellResult) -> None:
    last = agreed.cases[-1]
    blind = replace(last, comparisons=tuple(replace(c, blind=("x1.01",)) for c in last.comparisons))
    result = concluded(agreed, (*agreed.cases, blind))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reasons[0] == "the judge accepted planted errors: x1.01 in loss; please report this fault of lossgate"


def test_a_bias_of_the_pooled_scale_disagrees(agreed: CellResult) -> None:
    biased = tuple(
        replace(
            case,
            comparisons=tuple(replace(c, values=c.values and {**c.values, "scale": 0.003}) for c in case.comparisons),
        )
        for case in agreed.cases
    )
    result = concluded(agreed, biased)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is None
    assert "problems, it is 1.003 times the reference" in result.reasons[0]


# The plan and the run


@pytest.mark.slow
def test_a_run_reports_its_start_each_cell_and_its_end() -> None:
    events = list(run([RIGHT], Settings(layouts=("single", "tp=2"), dtypes=("bfloat16",), examples=2, rounds=1)))
    kinds = [RunStarted, CellStarted, CellFinished, CellStarted, CellFinished, RunFinished]
    assert [type(event) for event in events] == kinds
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


def test_a_candidate_without_a_cell_raises_an_error() -> None:
    message = "nothing to verify; it has no axes and dtypes bfloat16, but the run asks for layouts cp=2"
    with pytest.raises(UsageError, match=message):
        plan([replace(RIGHT, axes=(), dtypes=("bfloat16",))], Settings(layouts=("cp=2",)))


# Known failures

KNOWN_FAILURES = Path(__file__).parents[2] / "ci/candidates/known_failures"
TORCH_2 = KnownFailure(name="torch-2", example=KNOWN_FAILURES / "torch-2-chunked-loss.json")


@pytest.mark.slow
def test_a_known_failure_that_still_disagrees_is_expected() -> None:
    (known,) = load_candidates(f"{KNOWN_FAILURES.parent}/pytorch.py:torch_loss_parallel_uneven")
    (cell,) = plan([known], Settings())
    result = run_cell(cell, Settings())
    assert result.verdict is Verdict.DISAGREE
    assert result.record.expected
    assert len(result.cases) == 1


def test_a_known_failure_that_is_gone_is_no_pass() -> None:
    (cell,) = plan([replace(RIGHT, known_failure=TORCH_2)], Settings())
    result = run_cell(cell, Settings())
    assert result.verdict is Verdict.DISAGREE
    assert not result.record.expected
    assert result.reasons == (
        "known failure torch-2 is gone: its frozen example agrees now; remove known_failure and verify again",
    )


def test_a_known_failure_needs_an_example_that_disagrees_on_its_own(tmp_path: Path) -> None:
    frozen = json.loads(TORCH_2.example.read_text())
    (tmp_path / "pooled.json").write_text(json.dumps({**frozen, "pooled": True}))
    with pytest.raises(
        UsageError,
        match=r"known failure x: the problems in .*pooled.json disagree only when pooled; freeze a problem",
    ):
        plan([replace(RIGHT, known_failure=KnownFailure(name="x", example=tmp_path / "pooled.json"))], Settings())


def test_a_known_failure_that_has_changed_is_no_pass() -> None:
    """Such as a kernel that no longer runs at all."""

    def broken(inputs: object, options: object, mesh: object) -> object:
        raise AttributeError("no such function")

    (cell,) = plan([replace(RIGHT, kernel=broken, known_failure=TORCH_2)], Settings())
    result = run_cell(cell, Settings())
    assert not result.record.expected
    assert result.reasons[0] == (
        "known failure torch-2 has changed: it was in grad of weight and loss, and now is in RankRaised; "
        "freeze it again"
    )


def test_a_goal_near_a_kink_says_what_to_do_in_coarse_dtypes() -> None:
    spec = SPECS["clipped_pg"]
    never = replace(spec, goals={"never": CoverageGoal(meaning="what no problem has")}, scenarios=())
    cell = Cell(replace(dense_candidate(spec, "logprobs"), spec=never, dtypes=("bfloat16",)), Layout(), "bfloat16")
    (reason,) = (one for one in conclude(CellRun(cell=cell, cases=())).reasons if "never" in one)
    assert reason == (
        "no problem reached goal 'never': what no problem has; no problem was drawn for it; set rounds to 4 or more. "
        "Tokens at which rounding to bfloat16 decides a clip or comparison are masked. If no problem can reach the "
        "goal because of that, list in dtypes= of the goal the dtypes that can, or use a bound without a kink"
    )


def test_the_scale_over_all_problems_is_told_if_the_smallest_one_shows_much_less() -> None:
    """Shrinking seeks a small problem, and not one that is far off."""

    problem = Problem(
        spec="nll", head="logits", dtype="float32", lengths=(3,), masks=("all",), vocab=2, hidden=1, seed=0
    )

    def case(scale: float, **more: Any) -> CaseResult:
        compared = Comparison(
            output=LOSS,
            values={SCALE: scale},
            limits={SCALE: 1e-7},
            sd=1e-8,
            farthest=(Entry("", 1 + scale, 1.0),),
        )
        return CaseResult(problem=problem, comparisons=(compared,), **more)

    cell = Cell(dense_candidate(SPECS["nll"], "logits"), Layout(), "float32")
    for smallest, line in (
        (-2e-6, ("loss: 0.48 times the reference over 8 problems; the smallest problem shows less",)),
        (-0.4, ()),
    ):
        failure = case(smallest, findings=("loss: off",))
        run = CellRun(cell=cell, cases=(case(-0.52),) * 8, failure=failure)
        assert conclude(run).reasons == ("loss: off", *line)
