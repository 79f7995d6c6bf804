# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate.compare``: two kernels against each other, and each against the reference."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

import lossgate
from kernel_bank.bugs import BUGS, Bug, on_inputs, on_loss, scale_gradient
from kernel_bank.cross_entropy import ALL_BFLOAT16, STYLES, make
from kernel_bank.right import KERNELS
from kernel_bank.spec_bugs import bugs_of
from lossgate import ANY, Candidate, Layout, Outputs, Precision, Problem, UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.difference import differences
from lossgate.cases.drawn_problem import DrawnProblem
from lossgate.cases.placement import sample_problems
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Verdict
from lossgate.judge.explain import explain_difference
from lossgate.losses import SPECS
from lossgate.specs.outputs import LOGPROBS
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

EAGER, FUSED, ONLINE = (make(style) for style in STYLES["float32"])
HERE: dict[str, Any] = {"layouts": ["tp=2"], "dtypes": ["float32"]}


def buggy(kernel: Candidate, *bugs: str) -> Candidate:
    for bug in bugs:
        kernel = BUGS[bug].put_into(kernel)
    return replace(kernel, name="wrong")


CONCLUSIONS = {
    "right": (FUSED, ONLINE, "they agree with each other and with the reference"),
    "the first": (buggy(FUSED, "dX x1.01"), ONLINE, "they differ: wrong is wrong"),
    "the second": (FUSED, buggy(ONLINE, "loss x1.01"), "they differ: wrong is wrong"),
    "both alike": (
        replace(buggy(FUSED, "denominator n+1"), name="one"),
        replace(buggy(ONLINE, "denominator n+1"), name="other"),
        "both are wrong in the same way",
    ),
    "both otherwise": (
        replace(buggy(FUSED, "dW x0.99"), name="one"),
        replace(buggy(ONLINE, "loss x1.01"), name="other"),
        "both are wrong, and they differ",
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("which", CONCLUSIONS)
def test_conclusions(which: str) -> None:
    one, other, conclusion = CONCLUSIONS[which]
    found = lossgate.compare(one, other, **HERE)
    (cell,) = found.cells
    assert cell.conclusion == conclusion
    assert found.agree is (which == "right")
    assert cell.verdict is (Verdict.AGREE if which == "right" else Verdict.DISAGREE)


@pytest.mark.slow
def test_a_bug_is_reported_with_a_small_problem_and_both_comparisons() -> None:
    found = lossgate.compare(buggy(FUSED, "loss x1.01"), ONLINE, **HERE)
    with pytest.raises(AssertionError) as raised:
        found.check()
    title, verdict, *lines = str(raised.value).splitlines()
    assert title == "wrong against online: spec nll from hidden, 1 cell"
    assert verdict == "DISAGREE  float32  tp=2: they differ: wrong is wrong"
    assert lines[0].startswith("  wrong: loss: got ")
    assert lines[0].endswith(", relative difference 0.01")
    assert lines[1].startswith("    on: 2 tokens in 1 sequence [2], ")
    assert lines[2].startswith("  the two: loss: wrong less online is 0.01 times the reference; the rounding of ")
    assert len(lines) == 4
    assert str(found) == repr(found) == str(raised.value)


@pytest.mark.slow
def test_a_kernel_may_be_wrong_by_less_than_shows_between_the_two() -> None:
    """One rounds as coarsely as the other, and declares that it does not."""
    coarse = make(STYLES["bfloat16"][3])
    lying = replace(coarse, precision=make(STYLES["bfloat16"][0]).precision, name="lying")
    found = lossgate.compare(lying, coarse, layouts=["single"], dtypes=["bfloat16"])
    assert not found.agree
    assert found.cells[0].conclusion == "lying is wrong, but by too little to show between the two"


def test_two_kernels_may_differ_and_neither_is_known_to_be_wrong(make_world: MakeWorld) -> None:
    """One is nearly too large, and the other nearly too small."""
    loss = next(c for c in Case(EAGER, PROBLEM, make_world("single")).comparisons if str(c.output) == "loss")
    off = 0.85 * loss.limits["scale"]

    def scaled(name: str, factor: float) -> Candidate:
        bug = Bug(name, "", on_loss(lambda loss, mesh: loss + factor * loss.detach()))
        return replace(bug.put_into(EAGER), name=name)

    found = lossgate.compare(scaled("large", off), scaled("small", -off), problem=PROBLEM)
    (cell,) = found.cells
    assert cell.wrong == ()
    assert cell.conclusion.startswith("they differ by more than the rounding of both explains, but neither is known")
    assert not found.agree


def test_right_kernels_pass_the_check() -> None:
    lossgate.compare(FUSED, ONLINE, examples=4, **HERE).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=pytest.mark.xdist_group(spec)) for spec in ("dpo", "grpo", "token_logprobs")]
)
def test_every_kind_of_spec(spec: str) -> None:
    """A kernel agrees with itself; with the plainest mistake of its spec it does not.

    The worker of ``property_tests/test_specs.py`` has drawn the decks.
    """
    dense = dense_candidate(SPECS[spec], [*SPECS[spec].inputs][-1])
    wrong = replace(bugs_of(SPECS[spec])[0].put_into(dense), name="wrong")
    settings: dict[str, Any] = {"layouts": ["dp=2"], "examples": 3}
    assert [c.differ for c in lossgate.compare(dense, dense, **settings).cells] == [False]
    assert lossgate.compare(dense, wrong, **settings).cells[0].conclusion == "they differ: wrong is wrong"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        ("float32", [make(style) for style in STYLES["float32"]]),
        ("bfloat16", [make(style) for style in (*STYLES["bfloat16"], ALL_BFLOAT16)]),
    ],
    ids=["float32", "bfloat16"],
)
def test_right_kernels_never_differ(dtype: str, kernels: list[Candidate]) -> None:
    """However differently they round."""
    for layout in (Layout(), Layout(cp=2, tp=2)):
        world = SimulatedWorld(layout)
        for problem in sample_problems(kernels[0], layout, dtype, 10, seed=5):
            bound = BoundProblem(kernels[0].spec, problem)
            cases = [Case(kernel, problem, world, bound) for kernel in kernels]
            for one, other in combinations(cases, 2):
                found = [*differences(one, other)]
                assert [line for c in found for line in explain_difference(c, "one", "other")] == []
                assert not any(comparison.blind for comparison in found)
        world.close()


PROBLEM = Problem(
    spec="nll", head="hidden", dtype="float32", lengths=(9, 7), masks=("all", "holes"), hidden=8, vocab=40, seed=2
)


@pytest.mark.parametrize(("dtype", "first", "second"), [("float32", 0, 1), ("bfloat16", 0, 3), ("bfloat16", 0, 0)])
def test_the_noise_is_that_of_both_kernels(make_world: MakeWorld, dtype: str, first: int, second: int) -> None:
    """It is larger than that of either, and not larger than that of both together."""
    styles, problem, world = STYLES[dtype], replace(PROBLEM, dtype=dtype), make_world("single")
    one, other = (Case(make(styles[i]), problem, world) for i in (first, second))
    own = [{c.output: c.sd for c in case.comparisons} for case in (one, other)]
    for found in differences(one, other):
        sds = [sd[found.output] for sd in own]
        assert max(sds) * 0.7 < found.sd < sum(sds) * 1.2  # each is estimated from 32 runs
        assert found.kernels == 2
        assert found.limits["scale"] > max(sds) * 5


def declared(kernel: Any, name: str, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {"head": "logits", "axes": ("dp",), "dtypes": ("float32",), **changes}
    return lossgate.candidate("nll", name=name, **fields)(kernel)


def plain(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)


def raises_on_rank_1(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
    if mesh.get_rank() == 1:
        raise RuntimeError("out of shared memory")
    return plain(inputs, options, mesh)


def with_logprobs(inputs: Any, options: Any, mesh: Any) -> Outputs:
    logprobs = inputs.logits.float().log_softmax(-1).gather(1, inputs.labels[:, None]).squeeze(1)
    return Outputs(loss=plain(inputs, options, mesh), logprobs=logprobs)


def nan_where_masked(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
    return plain(inputs, options, mesh) + (float("nan") if not bool(inputs.mask.any()) else 0.0)


def test_ranks_that_fail_are_named_and_nothing_is_compared() -> None:
    found = lossgate.compare(declared(plain, "right"), declared(raises_on_rank_1, "failing"), layouts=["dp=2"])
    assert found.cells[0].difference is None
    assert "DISAGREE  float32  dp=2: ranks of failing failed" in str(found)
    assert "  failing: rank 1 raised RuntimeError: out of shared memory" in str(found)


@pytest.mark.slow
def test_an_output_that_only_one_returns_is_reported() -> None:
    found = lossgate.compare(declared(plain, "plain"), declared(with_logprobs, "more"), layouts=["single"])
    assert found.agree
    assert str(found).splitlines()[-1] == "only more returns logprobs"
    both = lossgate.compare(declared(with_logprobs, "one"), declared(with_logprobs, "other"), layouts=["single"])
    assert "only" not in str(both)


NOT_FINITE = {
    "only one": (nan_where_masked, plain, ["loss: a less b: 1 of 1 entries are not both finite, nor the same"]),
    "both": (nan_where_masked, nan_where_masked, []),
}


@pytest.mark.parametrize("which", NOT_FINITE)
def test_what_is_not_finite(make_world: MakeWorld, which: str) -> None:
    kernels, world = NOT_FINITE[which], make_world("single")
    problem = replace(PROBLEM, head="logits", masks=("none", "none"), hidden=1)
    one, other = (Case(declared(kernel, "x"), problem, world) for kernel in kernels[:2])
    found = [line for c in differences(one, other) for line in explain_difference(c, "a", "b")]
    assert found == kernels[2]


def test_labels_that_a_filter_leaves_out_do_not_differ(make_world: MakeWorld) -> None:
    """Their log-probabilities are -inf in both, and in runs that round equal numbers alike."""
    dense, left_out = dense_candidate(SPECS["token_logprobs"], "logits"), 0
    coarse = {"float32": Precision(logits="bfloat16")}
    one, other = (replace(dense, name=name, supports={"top_k": (3,)}, precision=coarse) for name in ("one", "other"))
    for problem in sample_problems(one, Layout(), "float32", 10, seed=3):
        cases = [Case(kernel, problem, make_world("single")) for kernel in (one, other)]
        left_out += int(cases[0].oracle.reference[LOGPROBS][cases[0].bound.batch.fields["mask"]].isinf().sum())
        for comparison in differences(*cases):
            assert comparison.agrees, explain_difference(comparison, "one", "other")
            assert not any(math.isnan(number) for number in (*comparison.values.values(), *comparison.limits.values()))
    assert left_out


@pytest.mark.slow
def test_a_difference_too_small_for_one_problem_shows_over_many() -> None:
    """0.3% of a bfloat16 gradient is less than one rounding; pooled, it is a difference."""
    style = STYLES["bfloat16"][0]
    bug = Bug(
        "dX x1.003",
        "the gradient of the hidden states is 0.3% too large",
        on_inputs(lambda inputs, mesh: replace(inputs, hidden=scale_gradient(inputs.hidden, 1.003))),
    )
    found = lossgate.compare(
        bug.put_into(make(style)), make(style), layouts=["single"], dtypes=["bfloat16"], examples=60
    )
    (cell,) = found.cells
    assert cell.differ
    assert cell.difference is not None
    assert cell.difference.failure is None
    assert "the two: grad of hidden: pooled over " in str(found)
    assert " times the reference; the rounding of both explains +- " in str(found)


def test_on_one_problem() -> None:
    found = lossgate.compare(FUSED, ONLINE, problem=replace(PROBLEM, layout=Layout(tp=2)))
    assert found.agree
    assert "1 cell\nAGREE  float32  tp=2: they agree" in str(found)
    wrong = lossgate.compare(FUSED, buggy(ONLINE, "loss x1.01"), problem=PROBLEM)
    assert not wrong.agree
    assert "    on: 16 tokens in 2 sequences [9, 7]" in str(wrong)


def test_problems_suit_both() -> None:
    """What only one supports is not drawn, and tiles of either are."""
    one = replace(EAGER, supports={"reduction": ANY, "temperature": (0.5, 1.0)}, tiles={"vocab": (4,)})
    other = replace(EAGER, supports={"reduction": ("mean", "sum"), "temperature": (1.0, 2.0)}, name="other")
    found = lossgate.compare(one, other, layouts=["single"], dtypes=["float32"])
    problems = [case.problem for result in found.cells[0].results for case in result.cases]
    assert {p.options.get("temperature", 1.0) for p in problems} == {1.0}
    assert {p.options.get("reduction", "mean") for p in problems} == {"mean", "sum"}
    assert not any(p.bias for p in problems)


@pytest.mark.slow
def test_problems_keep_clear_of_kinks_as_the_coarser_needs() -> None:
    """The problems suit both, whichever of the two rounds more coarsely."""
    fine, coarse = (KERNELS[f"grpo_hidden_{end}"] for end in ("minimum_float32", "minimum_coarse_logits"))
    for pair in ((fine, coarse), (coarse, fine)):
        found = lossgate.compare(*pair, layouts=["single"], dtypes=["float32"])
        assert found.agree, str(found)
        cell = found.cells[0]
        for result in (*cell.results, cell.difference):
            assert result is not None
            assert {case.problem.rounded_to for case in result.cases} == {"bfloat16"}


def test_kernels_of_one_name_are_reported_apart() -> None:
    found = lossgate.compare(FUSED, buggy(FUSED, "loss x1.01"), problem=PROBLEM)
    assert found.names == ("fused", "wrong")
    found = lossgate.compare(FUSED, FUSED, problem=PROBLEM)
    assert found.names == ("fused (a)", "fused (b)")


@pytest.mark.slow
def test_another_seed_draws_other_problems() -> None:
    def problems(**settings: Any) -> set[Problem]:
        found = lossgate.compare(FUSED, ONLINE, examples=2, **HERE, **settings)
        return {case.problem.to_json() for case in found.cells[0].results[0].cases}  # type: ignore[misc]

    assert problems() == problems(seed=0)
    assert problems() != problems(seed=1)


MISUSE: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no candidate": (plain, FUSED, {}, r"compare\(kernel_a=plain\): expected a candidate; decorate"),
    "no candidate b": (FUSED, plain, {}, r"compare\(kernel_b=plain\): expected a candidate; decorate"),
    "specs": (
        FUSED,
        dense_candidate(SPECS["dpo"], "hidden"),
        {},
        "compare: 'fused' has spec 'nll', and 'dense_dpo_hidden' has 'dpo'; compare kernels of one spec",
    ),
    "heads": (
        FUSED,
        declared(plain, "plain"),
        {},
        "compare: 'fused' has head 'hidden', and 'plain' has 'logits'; let both start at the same head",
    ),
    "dtypes": (
        declared(plain, "coarse", dtypes=("bfloat16",)),
        declared(plain, "fine"),
        {},
        "compare: 'coarse' takes bfloat16, but 'fine' takes float32; declare a dtype that both take",
    ),
    "options": (
        declared(plain, "mean", supports={"reduction": "mean"}),
        declared(plain, "sum", supports={"reduction": "sum"}),
        {},
        r"compare: 'mean' supports reduction=\('mean',\), but 'sum' supports \('sum',\); declare a value that",
    ),
    "axes": (
        declared(plain, "one"),
        declared(plain, "other", axes=("dp", "cp")),
        {"layouts": ["cp=2"]},
        r"compare\(layouts=...\): layout cp=2 splits cp, but one and other do not both support that; both support dp",
    ),
    "dtype": (
        declared(plain, "one"),
        declared(plain, "other", precision=Precision()),
        {"dtypes": ["bfloat16"]},
        r"compare\(dtypes=...\): one and other do not both take bfloat16; both take float32",
    ),
    "profile": (FUSED, ONLINE, {"profile": "huge"}, "unknown profile 'huge'"),
    "problem and examples": (
        FUSED,
        ONLINE,
        {"problem": PROBLEM, "examples": 3},
        r"compare\(examples=3\): problem= leaves nothing to set; leave one of the two out",
    ),
    "problem": (
        FUSED,
        ONLINE,
        {"problem": replace(PROBLEM, head="logits", hidden=1)},
        "candidate 'fused' has head 'hidden', but the problem has 'logits'",
    ),
}


@pytest.mark.parametrize("which", MISUSE)
def test_misuse_is_refused(which: str) -> None:
    one, other, settings, message = MISUSE[which]
    with pytest.raises(UsageError, match=message):
        lossgate.compare(one, other, **settings)


def test_problems_that_strategies_draw_are_taken_and_others_refused() -> None:
    drawn = DrawnProblem.from_json(PROBLEM.to_json())
    assert lossgate.compare(FUSED, ONLINE, problem=drawn).agree
    with pytest.raises(lossgate.UsageError, match=r"compare\(problem='.*: expected a Problem, or a DrawnProblem of"):
        lossgate.compare(FUSED, ONLINE, problem=PROBLEM.to_json())


def test_a_problem_with_options_that_a_kernel_does_not_support_is_refused() -> None:
    """It would be called wrong for what it never claimed."""
    narrow = replace(FUSED, supports={})
    for changes, named in (({"options": {"epsilon": 0.5}}, "epsilon=0.5"), ({"bias": True}, "bias=True")):
        with pytest.raises(
            UsageError, match=f"does not support {named}, but the problem has it; declare it in supports"
        ):
            lossgate.compare(narrow, FUSED, problem=replace(PROBLEM, **changes))
