# SPDX-License-Identifier: Apache-2.0
"""Known bugs are named, on layouts that tell factors apart. What is not sure is not said."""

import re
from dataclasses import replace

import pytest

from lossgate import Layout
from lossgate.bank.bugs import BUGS, bugs_of, cross_entropy_with, scale_gradient
from lossgate.bank.cross_entropy import STYLES
from lossgate.bank.dense_candidates import dense_candidate
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.declaration.candidate import Candidate
from lossgate.diagnosis.cause import Diagnosis
from lossgate.diagnosis.name_cause import name_cause
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.diagnose import diagnose, telling_layouts
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.evidence.of_result import record_of
from lossgate.losses import SPECS
from lossgate.reports.shown_cell import of_result
from lossgate.worlds import make_world
from property_tests.kernels import test_filter_mutants as filters

SETTINGS = Settings(shrink_calls=20)
STYLE = STYLES["float32"][0]


def verified(candidate: Candidate, layout: str) -> CellResult:
    result = run_cell(Cell(candidate, Layout.parse(layout), "float32"), SETTINGS)
    assert result.verdict is Verdict.DISAGREE
    return result


def diagnosed(candidate: Candidate, layout: str) -> Diagnosis:
    found = verified(candidate, layout).diagnosis
    assert found is not None
    return found


def names(found: Diagnosis) -> list[str]:
    return [cause.name for cause in found.causes]


@pytest.mark.parametrize(
    ("bug", "layout", "name", "layouts"),
    [
        ("dX x1.01", "single", "outputs times 1.01", {"single"}),
        ("denominator n+1", "cp=2", "valid_tokens is one too many", {"cp=2", "cp=3"}),
        ("cp gradient x cp", "cp=2", "gradient of the loss times cp", {"cp=2", "cp=3"}),
        ("temperature missing in backward", "tp=2", "temperature ignored in backward", {"tp=2", "tp=3"}),
        ("tp all-reduce missing", "tp=2", "gradient of hidden of the first rank alone of tp", {"tp=2", "tp=3"}),
    ],
)
def test_a_bug_of_cross_entropy_is_named(bug: str, layout: str, name: str, layouts: set[str]) -> None:
    found = diagnosed(cross_entropy_with(STYLE, bug), layout)
    assert names(found) == [name]
    assert {*found.layouts} == layouts
    assert found.problems >= 9


@pytest.mark.parametrize(
    ("spec", "head", "bug", "name", "condition"),
    [
        ("z_loss", "logits", "z_loss_weight always 0.0", "z_loss_weight as 0.0", ""),
        ("preference", "rewards", "every sequence counts", "sample_mask ignored", ""),
        ("grpo", "logprobs", "kl_estimator: 3 as 2", "kl_estimator as 2", ", with kl_estimator=3"),
        ("distill", "logits", "kl_type: mixed as forward", "kl_type as forward", ", with kl_type='mixed'"),
    ],
)
def test_a_mistake_of_a_spec_is_named(spec: str, head: str, bug: str, name: str, condition: str) -> None:
    (known,) = (known for known in bugs_of(SPECS[spec]) if known.name == bug)
    found = diagnosed(known.put_into(dense_candidate(SPECS[spec], head)), "single")
    assert (names(found)[0], found.condition) == (name, condition)


def test_the_count_of_a_rank_is_named_with_what_to_do() -> None:
    counted = BUGS["local denominator"].put_into(dense_candidate(SPECS["nll"], "logits"))
    found = diagnosed(counted, "dp=2")
    assert "valid_tokens local over dp" in names(found)
    assert found.sentences[-1] == "to do: sum valid_tokens over dp before you divide by it"


def test_a_gradient_alone_says_so() -> None:
    right = dense_candidate(SPECS["nll"], "hidden")

    def tripled(inputs, options, mesh):
        return right.kernel(replace(inputs, weight=scale_gradient(inputs.weight, 3.0)), options, mesh)

    found = diagnosed(replace(right, kernel=tripled, name="tripled"), "single")
    assert found.sentences[0].startswith(
        "cause: the gradient of weight: multiplied by 3 in every problem; this explains all 9 "
    )


def test_what_no_known_mistake_explains_is_not_named() -> None:
    found = diagnosed(cross_entropy_with(STYLE, "one token dropped"), "single")
    assert names(found) == []
    assert re.fullmatch(r"cause: none of \d+ known mistakes explains it", found.sentences[0])


def test_a_mistake_beside_another_says_where_it_is_alone() -> None:
    right = dense_candidate(SPECS["nll"], "logits")

    def twice_wrong(inputs, options, mesh):
        logits = 3 * inputs.logits.tanh() if options.reduction == "sum" else inputs.logits
        given = replace(inputs, valid_tokens=inputs.valid_tokens + 1, logits=logits)
        return right.kernel(given, options, mesh)

    found = diagnosed(replace(right, kernel=twice_wrong, name="twice_wrong"), "single")
    assert names(found) == ["valid_tokens is one too many"]
    assert found.condition == ", except with reduction='sum'"
    held = f"this explains {found.problems} of {found.failing} failing problems (single), and none"
    assert f", except with reduction='sum'; {held}" in found.sentences[0]
    assert found.problems < found.failing


def test_without_its_counterfactual_a_bug_has_no_name() -> None:
    candidate, layout = cross_entropy_with(STYLE, "denominator n+1"), Layout()
    first = next(case.problem for case in verified(candidate, "single").cases if not case.agrees)
    world = make_world("simulated", layout)
    cell = Cell(candidate, layout, "float32")
    found = diagnose(cell, first, world, SETTINGS, without=["valid_tokens is one too many"])
    world.close()
    assert found is not None
    assert names(found) == []


def test_too_few_failing_problems_tell_nothing() -> None:
    assert name_cause([], counterfactuals_of(SPECS["nll"], "hidden").values()) is None


def test_the_cause_is_shown_and_written() -> None:
    result = verified(cross_entropy_with(STYLE, "denominator n+1"), "single")
    cause, todo = result.causes
    assert cause.startswith(
        "cause: in place of valid_tokens the kernel takes valid_tokens + 1; "
        "this explains all 9 failing problems (single), and none of the "
    )
    assert of_result(result).causes == (cause, todo)
    record = record_of(result, "run", "2026-01-01T00:00:00Z")
    assert record.causes == (cause, todo)


def test_a_kernel_that_raises_gets_no_cause() -> None:
    def raises(inputs, options, mesh):
        raise RuntimeError("no such thing")

    right = dense_candidate(SPECS["nll"], "logits")
    assert verified(replace(right, kernel=raises, name="raises"), "single").diagnosis is None


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("single", ["single"]),
        ("cp=2", ["cp=2", "cp=3"]),
        ("tp=3", ["tp=3", "tp=2"]),
        ("cp=2,tp=2", ["cp=2,tp=2", "cp=3,tp=2", "cp=2,tp=3"]),
        ("dp=2,cp=2,tp=2", ["dp=2,cp=2,tp=2", "dp=3,cp=2,tp=2", "dp=2,cp=3,tp=2"]),
    ],
)
def test_other_layouts_split_the_same_axes_into_other_numbers(layout: str, expected: list[str]) -> None:
    found = telling_layouts(Layout.parse(layout))
    assert [*map(str, found)] == expected
    for one, other in ((a, b) for a in Layout.parse(layout).axes for b in Layout.parse(layout).axes if a != b):
        assert any(of.sizes[one] != of.sizes[other] for of in found)


def test_a_loss_that_is_too_large_is_not_taken_for_one_that_should_be_0() -> None:
    """A reference of 0 has no scale: it must not explain any number."""
    right = dense_candidate(SPECS["nll"], "logits")

    def larger(inputs, options, mesh):
        outputs = right.kernel(inputs, options, mesh)
        return replace(outputs, loss=outputs.loss + 0.013 * outputs.loss.detach())

    found = diagnosed(replace(right, kernel=larger, name="larger"), "single")
    assert [cause.words for cause in found.causes] == ["loss: multiplied by 1.013 in every problem"]


def test_other_options_may_have_other_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in an option is tried though the kernel returns a metric that it would not have."""
    filters.MUTANTS["the policy loss has unfiltered ones"](monkeypatch)
    assert filters.verdict(filters.SPECS["clipped_pg"]) is Verdict.DISAGREE
