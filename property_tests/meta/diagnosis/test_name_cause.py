# SPDX-License-Identifier: Apache-2.0
"""Known bugs are named, on layouts that tell factors apart. What is not sure is not said."""

import re
from dataclasses import replace
from itertools import islice

import pytest
import torch

from kernel_bank.bugs import BUGS, cross_entropy_with, scale_gradient
from kernel_bank.cross_entropy import STYLES
from kernel_bank.spec_bugs import bugs_of
from lossgate import Layout, Problem
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import mistake
from lossgate.counterfactuals.sites import Attached, Changed, Site, Traced
from lossgate.declaration.candidate import Candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.diagnosis.cause import Cause, Diagnosis
from lossgate.diagnosis.fitted_numbers import mixed_in
from lossgate.diagnosis.name_cause import name_cause
from lossgate.diagnosis.observed import Observed
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.diagnose import cases_like, diagnose, telling_layouts
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.worlds import make_world
from property_tests.kernels import test_filter_mutants as filters

SETTINGS = Settings(shrink_calls=20)
STYLE = STYLES["float32"][0]


def verified(candidate: Candidate, layout: str) -> CellResult:
    result = run_cell(Cell(candidate, Layout.parse(layout), "float32"), SETTINGS)
    assert result.verdict is Verdict.DISAGREE
    return result


def diagnosed(candidate: Candidate, layout: str) -> Diagnosis:
    found = verified(candidate, layout).run.diagnosis
    assert found is not None
    return found


def names(found: Diagnosis) -> list[str]:
    return [cause.name for cause in found.causes]


@pytest.mark.slow(but=1)
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


@pytest.mark.slow(but=1)
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("spec", "head", "option", "value"),
    [("nll", "logits", "reduction", "sum"), ("dpo", "logprobs", "loss_type", "ipo")],
)
def test_a_factor_of_loss_and_gradients_is_not_told_of_the_loss_alone(
    spec: str, head: str, option: str, value: str, seed: int
) -> None:
    """The first failing problems may have no upstream gradient of the loss."""
    right = replace(dense_candidate(SPECS[spec], head), differentiable=("loss", "logprobs"))

    def half(inputs, options, mesh):
        found = right.kernel(inputs, options, mesh)
        return replace(found, loss=found.loss / 2) if getattr(options, option) == value else found

    cell = Cell(replace(right, kernel=half, name="half"), Layout(), "float32")
    found = run_cell(cell, replace(SETTINGS, seed=seed)).run.diagnosis
    assert found is not None
    assert "the loss is divided by 2, in value and gradient" in found.named
    assert " alone" not in found.named


@pytest.mark.slow
def test_the_count_of_a_rank_is_named_with_what_to_do() -> None:
    counted = BUGS["local denominator"].put_into(dense_candidate(SPECS["nll"], "logits"))
    found = diagnosed(counted, "dp=2")
    assert "valid_tokens local over dp" in names(found)
    assert found.sentences[-1] == "to do: sum valid_tokens over dp before you divide by it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (3.0, "multiplied by 3"),
        (-0.5, "multiplied by -0.5"),
        (1 / 3, "divided by 3"),
        (1 / 1024, "divided by 1024"),
        (0.00123, "multiplied by 0.00123"),  # which is nearly 1 / 813
    ],
)
def test_a_gradient_alone_says_so(factor: float, words: str) -> None:
    right = dense_candidate(SPECS["nll"], "hidden")

    def scaled(inputs, options, mesh):
        return right.kernel(replace(inputs, weight=scale_gradient(inputs.weight, factor)), options, mesh)

    found = diagnosed(replace(right, kernel=scaled, name="scaled"), "single")
    assert found.sentences[0] == f"cause: the gradient of weight: {words}"
    assert found.explains.startswith("this explains all 9 failing problems")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("size", "divided"), [(8, False), (8, True), (1000, False)])
def test_a_number_of_parts_is_told_from_a_fixed_factor(size: int, divided: bool) -> None:
    right = dense_candidate(SPECS["nll"], "logits")

    def in_parts(inputs, options, mesh):
        parts = -(-len(inputs.labels) // size) + (size == 1000)
        factor = 1 / parts if divided else float(parts)
        return right.kernel(replace(inputs, logits=scale_gradient(inputs.logits, factor)), options, mesh)

    found = diagnosed(replace(right, kernel=in_parts, name="in_parts"), "single")
    whole = f"{'divided' if divided else 'multiplied'} by a whole number"
    assert (names(found)[0] == whole) == (size == 8)
    if size == 8:
        assert ", such as the number of chunks or micro-batches" in found.sentences[0]
        assert found.explains.startswith("this explains all ")


@pytest.mark.slow
def test_a_number_of_ranks_is_not_taken_for_one_of_parts() -> None:
    candidate = cross_entropy_with(STYLE, "cp gradient x cp")
    cell, layout = Cell(candidate, Layout(cp=2), "float32"), Layout(cp=2)
    first = verified(candidate, "cp=2").cases[0].problem
    world = make_world("simulated", layout)
    taken_out = ("gradient of the loss times cp", "outputs times cp")
    found = diagnose(cell, first, world, SETTINGS, taken_out)
    world.close()
    assert found is not None
    assert not any("whole number" in name for name in names(found))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("own", "more", "expected"),
    [
        (1.0, 0.3, "1 of the loss and 0.3 of the mean negative log-likelihood of the labels"),
        (0.5, 0.5, "0.5 of the loss and 0.5 of the mean negative log-likelihood of the labels"),
    ],
)
def test_another_loss_that_is_mixed_in_is_named_with_its_weight(own: float, more: float, expected: str) -> None:
    right = dense_candidate(SPECS["divergence"], "logits")

    def mixed(inputs, options, mesh):
        found = right.kernel(inputs, options, mesh)
        logits = inputs.logits[inputs.mask] / options.temperature
        nll = torch.nn.functional.cross_entropy(logits, inputs.labels[inputs.mask], reduction="sum")
        return replace(found, loss=own * found.loss + more * nll / inputs.valid_tokens.clamp(min=1))

    assert names(diagnosed(replace(right, kernel=mixed, name="mixed"), "single")) == [expected]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "head"), [(name, head) for name, spec in SPECS.items() for head in spec.inputs])
def test_mixtures_are_looked_for_in_any_loss(name: str, head: str) -> None:
    right, layout, world = dense_candidate(SPECS[name], head), Layout(), make_world("simulated", Layout())

    def wrong(inputs, options, mesh):
        found = right.kernel(inputs, options, mesh)
        outputs = {name: getattr(found, name) for name in SPECS[right.spec.name].outputs}
        return replace(found, **{name: x.exp() for name, x in outputs.items() if x is not None})

    cell = Cell(replace(right, kernel=wrong, name="wrong"), layout, "float32")
    (failing,) = sample_problems(right, layout, "float32", 1, 5)
    cases = cases_like(cell, failing, [layout], {layout: world}, SETTINGS)
    observed = [Observed(case) for case in islice(cases, 4)]
    world.close()
    words = {word for one in observed if one.wrong for found in mixed_in(one) for word in found.name.split()}
    assert ("log-likelihood" in words) <= (head in ("hidden", "logits", "logprobs"))


@pytest.mark.slow
def test_what_is_rounded_entry_by_entry_is_named() -> None:
    right = dense_candidate(SPECS["grpo"], "logprobs")

    def rounded(inputs, options, mesh):
        return right.kernel(replace(inputs, advantages=inputs.advantages.bfloat16().float()), options, mesh)

    found = diagnosed(replace(right, kernel=rounded, name="rounded"), "single")
    assert names(found) == ["advantages rounded to bfloat16"]


@pytest.mark.slow
def test_what_fails_where_nothing_is_trained_is_asked_there() -> None:
    right = dense_candidate(SPECS["nll"], "logits")

    def unguarded(inputs, options, mesh):
        found = right.kernel(inputs, options, mesh)
        count = inputs.valid_tokens
        return replace(found, loss=found.loss * count.clamp(min=1) / count)

    found = diagnosed(replace(right, kernel=unguarded, name="unguarded"), "single")
    assert names(found) == ["0 / 0 where the batch has no trained token"]


@pytest.mark.slow
def test_a_gradient_that_is_stopped_in_one_use_alone_is_named() -> None:
    right = dense_candidate(SPECS["clipped_pg"], "logprobs")
    own = Site("clipped_pg.py", "clipped_pg", "logprobs.detach()", "detach")
    use = Site("clipped_pg.py", "_policy_weights", "p - g", "sub")
    later = Site("importance.py", "importance_weights", "select(mask, x).detach()", "detach")
    attached: list[bool] = []

    def with_weight(inputs, options, mesh):
        with Traced() as found:
            right.kernel(inputs, options, mesh)
        if (own, use) not in found.uses or later not in found.of_kind("detach"):
            return right.kernel(inputs, options, mesh)
        attached.append(True)
        with Attached(own, use, later):
            return right.kernel(inputs, options, mesh)

    found = diagnosed(replace(right, kernel=with_weight, name="with_weight"), "single")
    assert attached
    begin = "clipped_pg.clipped_pg `logprobs.detach()` detach: not in clipped_pg._policy_weights `p - g` sub"
    assert names(found)[0].startswith(begin)


@pytest.mark.slow
def test_what_no_known_mistake_explains_is_not_named() -> None:
    found = diagnosed(cross_entropy_with(STYLE, "one token dropped"), "single")
    assert names(found) == []
    assert re.fullmatch(r"cause: none of \d+ known mistakes explains it", found.sentences[0])


@pytest.mark.slow
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
    part = f", in {found.problems} of {found.failing} failing problems"
    assert found.sentences[0].endswith(f", except with reduction='sum'{part}")
    assert found.explains.startswith(held)
    assert found.problems < found.failing


@pytest.mark.slow
def test_without_its_counterfactual_a_bug_has_no_name() -> None:
    candidate, layout = cross_entropy_with(STYLE, "denominator n+1"), Layout()
    first = next(case.problem for case in verified(candidate, "single").cases if not case.agrees)
    world = make_world("simulated", layout)
    cell = Cell(candidate, layout, "float32")
    found = diagnose(cell, first, world, SETTINGS, without=["valid_tokens is one too many"])
    world.close()
    assert found is not None
    assert names(found) == []


@pytest.mark.slow
def test_a_mistake_in_two_places_is_said_only_if_both_show() -> None:
    right = dense_candidate(SPECS["grpo"], "logprobs")
    site = Site("grpo.py", "policy_loss", "ratio.detach()", "detach")

    def with_gradient(inputs, options, mesh):
        with Changed(site, lambda found, args: args[0]):
            return right.kernel(inputs, options, mesh)

    candidate = replace(right, kernel=with_gradient, name="with_gradient")
    name = "grpo.policy_loss `ratio.detach()` detach: the gradient is not stopped"
    first = next(case.problem for case in verified(candidate, "single").cases if not case.agrees)
    world = make_world("simulated", Layout())
    cell = Cell(candidate, Layout(), "float32")
    both = [diagnose(cell, first, world, SETTINGS, without=without) for without in ([], [name])]
    world.close()
    assert both[0] is not None
    assert both[1] is not None
    assert names(both[0]) == [name]
    assert names(both[1]) == []


@pytest.mark.slow
def test_forward_alone_rules_out_a_mistake_that_gives_another_loss() -> None:
    candidate = cross_entropy_with(STYLE, "denominator n+1")
    cell, layout, world = Cell(candidate, Layout(), "float32"), Layout(), make_world("simulated", Layout())
    first = verified(candidate, "single").cases[0].problem
    cases = cases_like(cell, first, [layout], {layout: world}, SETTINGS)
    observed = next(one for one in map(Observed, cases) if one.wrong)
    world.close()
    bank = counterfactuals_of(SPECS["nll"], candidate.head)
    assert observed.may_fit(bank["valid_tokens is one too many"])
    assert not observed.may_fit(bank["valid_tokens is left out"])


def test_a_mistake_that_changes_nothing_explains_nothing() -> None:
    """A loss just over its limit is within that of a mistake, whose noise is larger."""
    right, world = dense_candidate(SPECS["nll"], "logits"), make_world("simulated", Layout())
    nothing = mistake("nothing", "it is", outputs=lambda s, outputs: outputs)
    twice = mistake("twice", "it is", outputs=lambda s, outputs: {o: 2 * x for o, x in outputs.items()})

    def observed(problem: Problem, factor: float) -> Observed:
        def kernel(inputs, options, mesh):
            given = right(inputs, options, mesh)
            return replace(given, loss=given.loss * factor)

        return Observed(Case(replace(right, kernel=kernel), problem, world))

    problems = sample_problems(right, Layout(), "float32", 8, 5)
    seen = [one for one in (observed(problem, 1 + 1e-6) for problem in problems) if one.wrong]
    assert any(one.fits(nothing, one.wrong) for one in seen)
    assert not any(one.explained_by(nothing) for one in seen)
    assert any(one.explained_by(twice) for one in (observed(problem, 2.0) for problem in problems) if one.wrong)


@pytest.mark.slow
def test_what_is_too_large_for_a_dtype_is_infinite() -> None:
    right = dense_candidate(SPECS["nll"], "logits")

    def too_large(inputs, options, mesh):
        given = right.kernel(inputs, options, mesh)
        return replace(given, loss=given.loss * 1e38 * 1e10)

    candidate = replace(right, kernel=too_large, name="too_large")
    cell, layout = Cell(candidate, Layout(), "float32"), Layout()
    first = next(case.problem for case in verified(candidate, "single").cases if not case.agrees)
    world = make_world("simulated", layout)
    observed = Observed(next(cases_like(cell, first, [layout], {layout: world}, SETTINGS)))
    world.close()
    loss = SPECS["nll"].output("loss")
    larger, smaller = (
        mistake(f"times {x}", "it is", outputs=lambda s, outputs, x=x: {o: x * y for o, y in outputs.items()})
        for x in (1e48, 1e20)
    )
    assert observed.got[loss].isinf()
    assert observed.fits(larger, [loss])
    assert not observed.fits(smaller, [loss])


@pytest.mark.slow
def test_layouts_take_turns_so_that_few_cases_have_many_batches() -> None:
    candidate = dense_candidate(SPECS["nll"], "logits")
    layouts = telling_layouts(Layout(cp=2))
    worlds = {layout: make_world("simulated", layout) for layout in layouts}
    failing = verified(cross_entropy_with(STYLE, "denominator n+1"), "cp=2").cases[0].problem
    cell = Cell(candidate, Layout(cp=2), "float32")
    asked = [case.problem for case in cases_like(cell, failing, layouts, worlds, SETTINGS)]
    for world in worlds.values():
        world.close()
    assert len({problem.seed for problem in asked[:8]}) == 4
    assert {problem.layout for problem in asked[:8:2]} == {problem.layout for problem in asked[1:8:2]} == {*layouts}
    half = len(asked) // 2
    assert [problem.seed for problem in asked[:half]] == [problem.seed for problem in asked[half:]]
    assert all(one.layout != other.layout for one, other in zip(asked[:half], asked[half:], strict=True))


def test_mistakes_that_the_problems_do_not_tell_apart_are_one_of_these() -> None:
    one, other = Cause(name="a", words="a is lost", todo="add a"), Cause(name="b", words="b is lost", todo="add b")
    unsure = Diagnosis(causes=(one, other), problems=9, layouts=("single",), asked=20)
    sure = replace(unsure, causes=(one, replace(other, same_as_before=True)))
    (said,) = unsure.sentences
    assert said == "cause: one of these, which the problems do not tell apart: a is lost; or: b is lost"
    assert sure.sentences == (
        "cause: a is lost; or, with the same effect on these problems: b is lost",
        "to do: add a",
    )
    assert (
        sure.explains == "this explains all 9 failing problems (single), and none of the 18 other known mistakes does"
    )


def test_too_few_failing_problems_tell_nothing() -> None:
    assert name_cause([], counterfactuals_of(SPECS["nll"], "hidden").values()).sentences == ()


def test_the_cause_is_shown_and_written() -> None:
    result = verified(cross_entropy_with(STYLE, "denominator n+1"), "single")
    cause, todo = result.record.causes
    assert cause == "cause: in place of valid_tokens the kernel takes valid_tokens + 1"
    record = result.record
    assert record.explains.startswith("this explains all 9 failing problems (single), and none of the ")
    assert record.told == (cause, todo, *record.reasons)
    assert record.causes == (cause, todo)


def test_a_kernel_that_raises_gets_no_cause() -> None:
    def raises(inputs, options, mesh):
        raise RuntimeError("no such thing")

    right = dense_candidate(SPECS["nll"], "logits")
    assert verified(replace(right, kernel=raises, name="raises"), "single").run.diagnosis is None


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
    assert [cause.words for cause in found.causes] == ["loss: multiplied by 1.013"]


@pytest.mark.slow
def test_other_options_may_have_other_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in an option is tried though the kernel returns a metric that it would not have."""
    filters.MUTANTS["the policy loss has unfiltered ones"](monkeypatch)
    assert filters.verdict(filters.SPECS["clipped_pg"]) is Verdict.DISAGREE
