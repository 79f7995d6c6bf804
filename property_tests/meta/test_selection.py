# SPDX-License-Identifier: Apache-2.0
"""``lossgate verify -k``, ``--only`` and ``--fail-fast``, and candidates that fail alike."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lossgate import Layout
from lossgate.base.errors import UsageError
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.plan import Selection
from lossgate.engine.run import SameFailures
from lossgate.losses import SPECS
from lossgate.problems.problem import Problem
from property_tests.meta.made_results import made_result

NAME = "my_kernel[agreement-dp=2,cp=2-bfloat16]"
PROBLEM = Problem(spec="nll", head="logprobs", dtype="float32", lengths=(3,), masks=("all",), hidden=1, vocab=2, seed=0)
KERNEL = dense_candidate(SPECS["nll"], "logprobs")


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("my_kernel", True),
        ("MY_KERNEL", True),
        ("cp=2", True),
        ("dp=2,cp=2", True),
        ("cp=3", False),
        ("bfloat16 and cp", True),
        ("bfloat16 and tp", False),
        ("float16 and not bfloat16", False),
        ("not tp", True),
        ("not not cp", True),
        ("tp or cp", True),
        ("tp or cp and float64", False),
        ("(tp or cp) and bfloat16", True),
        ("not (tp or cp)", False),
    ],
)
def test_an_expression_chooses_cells_by_their_names(expression: str, *, chosen: bool) -> None:
    assert Selection(expression).matches(NAME) is chosen


@pytest.mark.parametrize(
    ("expression", "at"),
    [
        ("", "the end"),
        ("cp and", "the end"),
        ("(cp", "the end"),
        ("cp)", "')'"),
        ("cp tp", "'tp'"),
        ("or cp", "'or'"),
        ("not", "the end"),
        ("(cp tp)", "'tp'"),
    ],
)
def test_an_expression_that_is_none_is_refused(expression: str, at: str) -> None:
    with pytest.raises(UsageError) as error:
        Selection(expression)
    assert str(error.value) == (
        f"-k {expression!r}: can't be read at {at}; expected parts of names with 'and', 'or', 'not' and parentheses, "
        "such as 'bfloat16 and not dp'"
    )


def test_an_expression_that_chooses_nothing_is_refused() -> None:
    cells = [Cell(KERNEL, Layout(tp=tp), "float32") for tp in (1, 2)]
    assert Selection("tp").take(cells) == cells[1:]
    with pytest.raises(UsageError, match=r"no cell has such a name; the 2 cells have names such as .*-single-float32"):
        Selection("dp").take(cells)


def failed(findings: Sequence[str], layout: Layout, failure: str | None = "RankRaised", **of_case: Any) -> CellResult:
    raised = RAISED if failure else None
    case = CaseResult(problem=PROBLEM, findings=tuple(findings), failure=failure, **{"raised": raised} | of_case)
    cell = Cell(KERNEL, layout, "float32")
    return made_result(cell, Verdict.DISAGREE, cases=(case,), of_run={"failure": case})


RAISED = ("ValueError", "k.py:14 in kernel")
FIRST = "rank 0 raised ValueError: 3 tokens  [k.py:14 in kernel]"
ALIKE = "rank 1 raised ValueError: 17 tokens  [k.py:14 in kernel]"
OTHER = "rank 1 raised TypeError: 17 tokens  [k.py:14 in kernel]"


def given_up(*results: CellResult) -> str | None:
    failures = SameFailures()
    for result in results:
        failures.add(result)
    return failures.of(results[-1].cell)


def test_a_candidate_that_fails_alike_on_two_layouts_is_given_up() -> None:
    single, two = Layout(), Layout(tp=2)
    assert given_up(failed([FIRST], single)) is None
    assert given_up(failed([FIRST], single), failed([ALIKE], two)) == FIRST
    assert given_up(failed([FIRST], single), failed([ALIKE], single)) is None
    for other in (("TypeError", RAISED[1]), (RAISED[0], "k.py:15 in kernel"), None):
        assert given_up(failed([FIRST], single), failed([OTHER], two, raised=other)) is None


def test_a_candidate_whose_outputs_are_wrong_is_not_given_up() -> None:
    single, two = Layout(), Layout(tp=2)
    wrong = [failed(["loss: 2 times the reference"], layout, None) for layout in (single, two)]
    assert given_up(*wrong) is None
    assert given_up(wrong[0], failed([FIRST], single), failed([ALIKE], two)) is None
    of_property = [failed([FIRST], layout, held_to="no-grad") for layout in (single, two)]
    assert given_up(*of_property) is None


def test_candidates_are_given_up_one_by_one() -> None:
    failures = SameFailures()
    for layout in (Layout(), Layout(tp=2)):
        failures.add(failed([FIRST], layout))
    other = Cell(replace(KERNEL, name="other"), Layout(), "float32")
    assert failures.of(other) is None
