# SPDX-License-Identifier: Apache-2.0
"""Problems in which rounding explains anything say nothing of a scale, and the verdict says so.

The loss of a confident label is exponential in its logit. In bfloat16 a logit near 400 is off by up
to 1, so that a loss of e^-20 may as well be e^-22 or 0.
"""

from dataclasses import replace

import pytest

from kernel_bank.cross_entropy import STYLES, make
from lossgate import Layout
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun, Verdict
from lossgate.engine.verdict import conclude
from lossgate.evidence.redo import Redone, redo
from lossgate.judge.comparison import Comparison
from lossgate.judge.pooled_output import pool
from lossgate.judge.pooling import FEWEST
from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import LOSS, Output, metric_output

from .judge.checks import MakeWorld, make_problem, run

KERNEL = make(STYLES["bfloat16"][3])
LARGE = {
    "lengths": (2,),
    "masks": ("all",),
    "hidden": 8,
    "vocab": 16,
    "options": {},
    "logit_std": 400.0,
    "cotangent": "loss",
}
FEW = "loss: in 5 of 12 problems rounding explains even a result of zero, and only 7 problems say something about"


@pytest.fixture
def silent(make_world: MakeWorld) -> CaseResult:
    """A problem with logits near 400, of which rounding in bfloat16 explains any result."""
    return run(KERNEL, make_problem("bfloat16", **LARGE), make_world("single"))


@pytest.fixture
def telling(make_world: MakeWorld) -> CaseResult:
    return run(KERNEL, make_problem("bfloat16"), make_world("single"))


def of(case: CaseResult, output: Output) -> Comparison:
    return next(c for c in case.comparisons if c.output == output)


def concluded(cases: list[CaseResult]) -> tuple[CellResult, Redone]:
    """Returns the verdict on cases, and what evidence makes of it."""
    result = conclude(CellRun(cell=Cell(KERNEL, Layout(), "bfloat16"), cases=tuple(cases)))
    (redone,) = redo([result.record])
    assert redone.contradiction == ""
    assert redone.verdict == result.verdict.value
    return result, redone


def test_large_logits_say_nothing(silent: CaseResult) -> None:
    """A result of zero agrees, and the judge knows that."""
    for comparison in silent.comparisons:
        assert comparison.agrees
        assert comparison.silent
        assert not comparison.tells_scale
        assert comparison.limits[SCALE] > 1
        assert not comparison.rejected["zero"]
        assert comparison.blind == ()


def test_the_pool_leaves_them_out(silent: CaseResult, telling: CaseResult) -> None:
    one, other = of(telling, LOSS), of(silent, LOSS)
    mixed, alone = pool(LOSS, [one] * 9 + [other] * 4), pool(LOSS, [one] * 9)
    assert mixed == replace(alone, silent=4)
    assert pool(LOSS, [other] * 4).problems == 0


def test_a_verdict_never_rests_on_them(silent: CaseResult, telling: CaseResult) -> None:
    for count, few in ((FEWEST - 1, True), (FEWEST, False)):
        result, _ = concluded([telling] * count + [silent] * (12 - count))
        assert result.verdict is Verdict.INCONCLUSIVE  # the problems reach few goals
        assert any(reason.startswith(FEW) for reason in result.reasons) == few


def test_what_was_never_compared_is_told(silent: CaseResult) -> None:
    result, _ = concluded([silent] * 30)
    assert (
        "loss: in 30 of 30 problems rounding explains even a result of zero, and only 0 problems say something about "
        "its scale, but 8 are needed; more problems than these 30 hardly help: compute in a finer dtype, and declare "
        "so"
    ) in result.reasons


@pytest.mark.parametrize(("count", "reported"), [(0, True), (1, False)])
def test_a_metric_must_be_compared_once_if_it_is_not_zero(
    silent: CaseResult, telling: CaseResult, count: int, reported: bool
) -> None:
    """It may be zero in most problems, so that few say something about it."""
    metric = metric_output("x")
    cases = [
        replace(case, comparisons=(*case.comparisons, replace(of(case, LOSS), output=metric, sd=1e-9, mean=0.0)))
        for case in ([telling] * count + [silent] * (12 - count))
    ]
    result, _ = concluded(cases)
    assert any("metric" in reason or reason.startswith("x:") for reason in result.reasons) == reported
