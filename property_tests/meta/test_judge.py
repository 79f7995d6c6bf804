# SPDX-License-Identifier: Apache-2.0
"""The judge: correct kernels of every declared precision agree, each bug disagrees, and no check is one that can't fail."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from controls import ALL_BFLOAT16, BUGS, STYLES, Style, make
from torch import Tensor

from lossgate import Candidate, Contract, Layout, Outputs, Precision, Problem, candidate
from lossgate.cases.examine import Examination, examine
from lossgate.cases.execute import execute
from lossgate.cases.materialize import materialize
from lossgate.cases.reference import run_reference
from lossgate.cases.strategies import sample_problems
from lossgate.judge import comparison as comparison_module
from lossgate.judge import power
from lossgate.judge.blocks import groupings_of
from lossgate.judge.comparison import Comparison, compare
from lossgate.judge.ensemble import run_ensemble
from lossgate.judge.explain import explain
from lossgate.judge.statistics import NOISE, SCALE, WORST, Grouping, NoiseModel
from lossgate.numerics.float_formats import FLOAT32
from lossgate.specs.inputs import HiddenInputs
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

ALL_STYLES = [(dtype, style) for dtype, styles in STYLES.items() for style in styles] + [("bfloat16", ALL_BFLOAT16)]
IDS = [f"{dtype} {style.name}" for dtype, style in ALL_STYLES]


def problem(dtype: str, layout: str = "dp=1", **changes: object) -> Problem:
    plain = {
        "spec": "nll",
        "head": "hidden",
        "dtype": dtype,
        "layout": Layout.parse(layout),
        "lengths": (40, 24),
        "masks": ("all", "holes"),
        "hidden": 24,
        "vocab": 97,
        "options": {"temperature": 0.75},
        "cotangent": "both",
        "seed": 3,
    }
    return Problem(**{**plain, **changes})  # type: ignore[arg-type]


def by_output(examination: Examination) -> dict[str, Comparison]:
    return {comparison.output: comparison for comparison in examination.comparisons}


# Correct kernels


@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES, ids=IDS)
@pytest.mark.parametrize("layout", ["single", "tp=2", "dp=2,cp=2"])
def test_correct_kernels_agree(make_world: MakeWorld, dtype: str, style: Style, layout: str) -> None:
    """A sample of what ``benchmarks/calibration.py`` counts."""
    kernel, world = make(style), make_world(layout)
    for drawn in sample_problems(kernel, world.layout, dtype, 25, seed=11):
        found = examine(kernel, drawn, world)
        assert found.agrees, (found.findings, drawn.to_json())
        assert not any(comparison.blind for comparison in found.comparisons)


@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES[:-1], ids=IDS[:-1])
def test_minimum_detectable_effects(make_world: MakeWorld, dtype: str, style: Style) -> None:
    found = examine(make(style), problem(dtype), make_world("single"))
    assert max(comparison.mde for comparison in found.comparisons) < {"float32": 1e-5, "bfloat16": 0.01}[dtype]


# Bugs


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES[:-1], ids=IDS[:-1])
def test_bugs_disagree(make_world: MakeWorld, dtype: str, style: Style, bug: str) -> None:
    """On one middle-sized problem; how often on random ones, ``benchmarks/calibration.py`` counts."""
    layout = {"tp all-reduce missing": "tp=2", "cp gradient x cp": "cp=2"}.get(bug, "single")
    changes: dict[str, object] = {}
    if bug == "bf16 accumulation of dW":  # as long as its errors need to add up
        changes = {"lengths": (160,), "masks": ("all",), "vocab": 32, "hidden": 16}
    found = examine(make(style, bug), problem(dtype, layout, **changes), make_world(layout))
    assert not found.agrees
    assert examine(make(style), problem(dtype, layout, **changes), make_world(layout)).agrees


def test_a_finer_precision_than_the_kernel_has_disagrees(make_world: MakeWorld) -> None:
    """float32 logits claimed, bfloat16 computed."""
    honest = make(STYLES["bfloat16"][3])
    boastful = replace(honest, precision={"bfloat16": Precision(dlogits="bfloat16", reduce="bfloat16")})
    world = make_world("single")
    assert examine(honest, problem("bfloat16"), world).agrees
    assert not examine(boastful, problem("bfloat16"), world).agrees


def test_a_coarser_declaration_costs_power_alone(make_world: MakeWorld) -> None:
    kernel = make(STYLES["bfloat16"][0])
    modest = replace(kernel, precision={"bfloat16": ALL_BFLOAT16.precision})
    modest = replace(modest, precision={"bfloat16": replace(ALL_BFLOAT16.precision, loss="float32")})
    world = make_world("single")
    fine, coarse = (by_output(examine(c, problem("bfloat16"), world)) for c in (kernel, modest))
    assert all(comparison.agrees for comparison in coarse.values())
    assert all(coarse[output].mde >= fine[output].mde for output in ("grad of hidden", "grad of weight", "logprobs"))


@pytest.mark.parametrize(
    ("precision", "output", "agrees"),
    [
        (Precision(dlogits="bfloat16"), "grad of hidden", True),
        (Precision(loss="bfloat16"), "grad of weight", True),
        (Precision(), "grad of hidden", False),
        (Precision(dlogits="bfloat16"), "logprobs", False),
    ],
    ids=["dlogits in bfloat16", "loss in bfloat16", "all in float32", "not on the way"],
)
def test_rounding_on_the_way_to_a_gradient_may_hit_all_of_it_alike(
    make_world: MakeWorld, precision: Precision, output: str, agrees: bool
) -> None:
    """Though the gradient itself comes in float32. It may not hit what is not on that way."""
    kernel, batch = make(STYLES["float32"][1]), materialize(problem("float32"))
    result = execute(kernel, batch, make_world("single"))
    shifted = replace(result, outputs={name: tensor * (1 + 0.9 * 2**-8) for name, tensor in result.outputs.items()})
    declared = replace(kernel, precision={"float32": precision})
    (comparison,) = (
        c for c in comparison_module.Yardstick(declared, batch, shifted.outputs).judge(shifted) if c.output == output
    )
    assert comparison.agrees == agrees


def result_of(
    problem_: Problem, change: Callable[[dict[str, Tensor]], None], world: SimulatedWorld
) -> dict[str, Comparison]:
    """Judge a correct result after a change to its outputs."""
    kernel = make(STYLES[problem_.dtype][1])
    batch = materialize(problem_)
    result = execute(kernel, batch, world)
    outputs = dict(result.outputs)
    change(outputs)
    return {
        c.output: c for c in comparison_module.Yardstick(kernel, batch, outputs).judge(replace(result, outputs=outputs))
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("output", ["loss", "logprobs", "grad of hidden", "grad of weight"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_what_is_not_finite_never_passes(make_world: MakeWorld, dtype: str, output: str, garbage: float) -> None:
    def spoil(outputs: dict[str, Tensor]) -> None:
        spoilt = outputs[output].clone()
        spoilt.view(-1)[0] = garbage
        outputs[output] = spoilt

    comparison = result_of(problem(dtype), spoil, make_world("single"))[output]
    assert "not finite, where the reference is" in next(explain(comparison))


def test_nan_of_log_probabilities_at_masked_tokens_is_nobodys_business(make_world: MakeWorld) -> None:
    drawn = problem("float32")
    mask = materialize(drawn).fields["mask"]

    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs["logprobs"] = outputs["logprobs"].masked_fill(~mask, float("nan"))

    assert result_of(drawn, spoil, make_world("single"))["logprobs"].agrees


def test_a_gradient_where_there_should_be_none_is_told(make_world: MakeWorld) -> None:
    drawn = problem("float32")
    masked = int((~materialize(drawn).fields["mask"]).nonzero()[0])

    def leak(outputs: dict[str, Tensor]) -> None:
        outputs["grad of hidden"] = outputs["grad of hidden"].index_fill(0, torch.tensor([masked]), 1e-30)

    comparison = result_of(drawn, leak, make_world("single"))["grad of hidden"]
    assert "entries should be exactly zero and are up to 1e-30" in next(explain(comparison))


def test_a_missing_gradient_is_told(make_world: MakeWorld) -> None:
    @candidate("nll", head="hidden")
    def frozen(inputs: HiddenInputs, options: object, mesh: object) -> Outputs:
        outputs = make(STYLES["float32"][1])(replace(inputs, weight=inputs.weight.detach()), options, mesh)  # type: ignore[arg-type]
        assert isinstance(outputs, Outputs)
        return Outputs(loss=outputs.loss)

    found = examine(frozen, problem("float32", options={}, cotangent="loss"), make_world("single"))
    assert found.findings == ("grad of weight: nothing reached it on rank 0",)


@pytest.mark.parametrize(
    ("statistic", "wrong"),
    [
        (SCALE, lambda k: k * 1.01),
        (
            NOISE,
            lambda k: (
                k
                + 3e-2
                * k.abs().mean()
                * torch.randn(k.shape, generator=torch.Generator().manual_seed(0), dtype=k.dtype)
            ),
        ),
        (WORST, lambda k: k.index_put((torch.tensor(3), torch.tensor(5)), k.abs().max())),
        ("token", lambda k: k.index_copy(0, torch.tensor([5]), 1.05 * k[5:6])),
        ("sequence", lambda k: torch.cat([k[:40], 1.02 * k[40:]])),
    ],
)
def test_each_statistic_can_fail(make_world: MakeWorld, statistic: str, wrong: Callable[[Tensor], Tensor]) -> None:
    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs["grad of hidden"] = wrong(outputs["grad of hidden"])

    drawn = problem("bfloat16")
    world = make_world("single")
    assert result_of(drawn, lambda _: None, world)["grad of hidden"].agrees
    comparison = result_of(drawn, spoil, world)["grad of hidden"]
    assert comparison.excess[statistic] > 1


@pytest.mark.parametrize("part", ["vocab row", "vocab tile", "vocab shard"])
def test_parts_of_the_vocabulary_can_fail(make_world: MakeWorld, part: str) -> None:
    rows = {"vocab row": slice(7, 8), "vocab tile": slice(32, 64), "vocab shard": slice(49, 97)}[part]
    drawn = problem("bfloat16", "tp=2")

    def spoil(outputs: dict[str, Tensor]) -> None:
        wrong = outputs["grad of weight"].clone()
        wrong[rows] *= 1.03
        outputs["grad of weight"] = wrong

    world = make_world("tp=2")
    comparison = result_of(drawn, spoil, world)["grad of weight"]
    assert comparison.excess[part] > 1
    assert comparison.places[part] == {"vocab row": "7", "vocab tile": "1", "vocab shard": "1"}[part]


def test_a_rank_s_tokens_can_fail(make_world: MakeWorld) -> None:
    drawn = problem("bfloat16", "cp=2")
    held = materialize(drawn).partition.token_shards[0, 1]

    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs["grad of hidden"] = outputs["grad of hidden"].index_put((held,), 1.02 * outputs["grad of hidden"][held])

    comparison = result_of(drawn, spoil, make_world("cp=2"))["grad of hidden"]
    assert comparison.excess["token shard"] > 1
    assert comparison.places["token shard"] == "1"


def test_vocabulary_tiles_are_those_that_the_kernel_declares() -> None:
    batch, kernel = materialize(problem("bfloat16", vocab=7)), make(STYLES["bfloat16"][0])

    def tiles(declared: Candidate) -> list[list[int]]:
        return [g.index.tolist() for g in groupings_of("grad of weight", batch, declared) if g.name == "vocab tile"]

    assert tiles(replace(kernel, tiles={"vocab": (3,)})) == [[0, 0, 0, 1, 1, 1, 2]]
    assert tiles(kernel) == []  # one tile of the usual size holds all rows


def test_one_entry_may_be_three_times_as_far_off_as_the_worst_of_the_members() -> None:
    reference = torch.ones(30, 20, dtype=torch.float64)
    noise = 1e-3 * torch.randn(12, 30, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def judged(times: float) -> Comparison:
        wrong = reference.clone()
        wrong[7, 4] += times * noise.abs().max()
        return compare("x", wrong, reference, reference + noise, 2**-24, 2**-24)

    assert judged(2.5).agrees
    assert [name for name, share in judged(3.5).excess.items() if share > 1] == [WORST]
    assert judged(3.5).places[WORST] == "7, 4"


def test_no_member_is_judged_by_noise_that_it_helped_to_make() -> None:
    reference = torch.ones(6, 5, dtype=torch.float64)
    deviations = 1e-3 * torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = NoiseModel(reference, deviations, 2**-24).precision_without_each()
    for i in range(4):
        others = torch.cat([deviations[:i], deviations[i + 1 :]])
        assert torch.allclose(found[i], NoiseModel(reference, others, 2**-24).precision()[0], rtol=1e-12)


# Statements about itself


def test_the_mde_is_what_it_says() -> None:
    """A result scaled by a little more than the stated effect is rejected, by a little less in neither direction both."""
    reference = torch.randn(30, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = 1e-3 * torch.randn(9, 30, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * reference
    members, result = reference + noise[:8], reference + noise[8]

    def judged(k: Tensor) -> Comparison:
        return compare("x", k, reference, members, 2**-24, 2**-24)

    mde = judged(result).mde
    for sign in (1, -1):
        assert not judged(result * (1 + sign * 1.01 * mde)).agrees
    assert any(judged(result * (1 + sign * 0.9 * mde)).excess[SCALE] < 1 for sign in (1, -1))


def test_planted_errors_are_seen(make_world: MakeWorld) -> None:
    for comparison in examine(make(STYLES["bfloat16"][0]), problem("bfloat16"), make_world("single")).comparisons:
        assert comparison.rejected["x1.01"]
        assert comparison.rejected["x0.99"]
        assert comparison.rejected["zero"]
        assert all(comparison.rejected.values())
        assert not comparison.blind


def test_planted_errors_are_what_they_are_called() -> None:
    k = torch.arange(12.0, dtype=torch.float64).view(4, 3) + 1
    rows = Grouping("token", 0, torch.arange(4), 4)
    tiles = Grouping("vocab tile", 1, torch.tensor([0, 0, 1]), 2)
    planted = power.plant(k, k, [rows, tiles])
    assert set(planted) == set(power.PLANTED)
    assert torch.equal(planted["x1.01"], 1.01 * k)
    assert not planted["zero"].any()
    assert planted["token dropped"].sum(1).tolist() == [6, 15, 0, 33]
    assert planted["vocab tile dropped"].tolist()[0] == [0, 0, 3]


def test_a_judge_that_is_blind_says_so(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a limit were too wide for what it claims, the planted errors would show it."""
    assert power.blind_spots({"x1.01": 0.01}, {"x1.01": False}, 0.0, 0.004) == ("x1.01",)
    assert power.blind_spots({"x1.01": 0.01}, {"x1.01": True}, 0.0, 0.004) == ()
    assert power.blind_spots({"x1.01": 0.01}, {"x1.01": False}, 0.0, 0.02) == ()
    monkeypatch.setattr(
        comparison,
        "blind_spots",
        lambda scales, rejected, scale, limit: power.blind_spots(scales, dict.fromkeys(rejected, False), scale, limit),
    )
    found = examine(make(STYLES["bfloat16"][0]), problem("bfloat16"), make_world("single"))
    assert any(comparison.blind for comparison in found.comparisons)


def test_nothing_to_compare_is_vacuous() -> None:
    zero = torch.zeros(3, 2, dtype=torch.float64)
    members = zero.expand(8, 3, 2)
    assert compare("x", zero, zero, members, 2**-8, 2**-8).vacuous
    assert compare("x", zero, zero, members, 2**-8, 2**-8).mde == float("inf")
    assert not compare("x", zero + 1e-9, zero, members, 2**-8, 2**-8).agrees


def test_a_zero_result_is_rejected_wherever_there_is_a_reference(make_world: MakeWorld) -> None:
    drawn = problem("bfloat16")

    def vanish(outputs: dict[str, Tensor]) -> None:
        outputs.update({name: torch.zeros_like(tensor) for name, tensor in outputs.items()})

    assert not any(comparison.agrees for comparison in result_of(drawn, vanish, make_world("single")).values())


# The ensemble


@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES, ids=IDS)
def test_members_scatter_about_the_reference(dtype: str, style: Style) -> None:
    """Unbiased, and by as much as their precision says: the mean over many members is far closer than any of them."""
    batch = materialize(problem(dtype))
    reference, members = run_reference(batch), run_ensemble(make(style), batch, 64, seed=5)
    for output, member in members.items():
        deviations = member - reference[output]
        if output.startswith("vocab") or output.endswith(("min", "max")):
            continue  # an extremum of noisy numbers is biased, in kernels as here
        if output == "logprobs":
            deviations = deviations[:, batch.fields["mask"]]
        typical = deviations.square().mean().sqrt()
        assert deviations.mean(0).square().mean().sqrt() < 0.25 * typical, output
        assert typical > 0


def test_members_are_the_same_for_the_same_seed() -> None:
    batch, kernel = materialize(problem("bfloat16")), make(STYLES["bfloat16"][3])
    one, again, other = (run_ensemble(kernel, batch, 4, seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["grad of hidden"], other["grad of hidden"])


@pytest.mark.parametrize(
    ("stages", "output"),
    [
        ({"logits": "bfloat16"}, "logprobs"),
        ({"logsumexp": "bfloat16"}, "logprobs"),
        ({"logprobs": "bfloat16"}, "grad of hidden"),
        ({"dlogits": "bfloat16"}, "grad of weight"),
        ({"accumulate": "bfloat16", "chunk": 4}, "grad of weight"),
        ({"accumulate": "float16", "chunk": 4}, "grad of weight"),
        ({"reduce": "bfloat16"}, "grad of hidden"),
        ({"loss": "bfloat16"}, "loss"),
        ({"grads_in_forward": True}, "grad of weight in bfloat16"),
    ],
    ids=str,
)
def test_coarser_stages_make_more_noise(stages: dict[str, object], output: str) -> None:
    """Every field of ``Precision`` counts."""
    output, _, dtype = output.partition(" in ")
    batch = materialize(problem(dtype or "float32", "tp=4"))
    reference = run_reference(batch)

    def noise(precision: Precision) -> float:
        kernel: Candidate = replace(make(STYLES["float32"][1]), precision={batch.problem.dtype: precision})
        return float((run_ensemble(kernel, batch, 16, 1)[output] - reference[output]).square().mean().sqrt())

    assert noise(Precision(**stages)) > 1.05 * noise(Precision())  # type: ignore[arg-type]


def noise_of(output: str, problem_: Problem, kernel: Candidate, members: int = 16) -> Tensor:
    """What the members are off by."""
    batch = materialize(problem_)
    return run_ensemble(kernel, batch, members, 1)[output] - run_reference(batch)[output]


def test_a_rounded_temperature_errs_alike_on_all_tokens() -> None:
    """A kernel holds 1 / 0.75 in float32. What errs for each token alone averages out over 400 of them."""

    def relative_error_of_the_sum(temperature: float) -> float:
        drawn = problem(
            "float32", lengths=(400,), masks=("all",), vocab=8, spread=30.0, options={"temperature": temperature}
        )
        reference = run_reference(materialize(drawn))["logprobs"]
        off = noise_of("logprobs", drawn, make(STYLES["float32"][1]), 32).sum(1) / reference.sum()
        return float(off.square().mean().sqrt())

    assert relative_error_of_the_sum(0.75) > 0.4 * FLOAT32.unit
    assert relative_error_of_the_sum(1.0) < 0.2 * FLOAT32.unit


def test_parts_that_the_caller_adds_are_rounded_to_the_dtype_in_which_they_are_returned() -> None:
    kernel = make(STYLES["bfloat16"][0])
    leaves_it = replace(kernel, contract=Contract(grads={"hidden": {"tp": "sum"}}))
    own, callers = (
        float(noise_of("grad of hidden", problem("bfloat16", "tp=4"), k).square().mean()) for k in (kernel, leaves_it)
    )
    assert callers > 2 * own


@pytest.mark.parametrize(
    ("logit", "roundings"),
    [
        (-1.0, 1.0),  # errors of lse and of p cancel, and those of the two numbers that are subtracted are left
        (128.0, 1000.0),  # errors of lse make p err, which the logit multiplies
    ],
)
def test_entropy_is_as_noisy_as_a_kernel_that_subtracts_the_mean_logit_from_lse(logit: float, roundings: float) -> None:
    """With a vocabulary of one row both are the logit, and all of it cancels."""
    drawn = problem(
        "float32", head="logits", lengths=(2,), masks=("all",), vocab=1, spikes=((0, 0, logit),), options={}
    )
    variance_of_one = (logit * FLOAT32.unit) ** 2 * 2 / 3
    assert (
        float(noise_of("entropy", drawn, make(STYLES["float32"][1]), 1000).square().mean())
        > roundings * variance_of_one
    )


# Words


def test_a_disagreement_in_words(make_world: MakeWorld) -> None:
    found = examine(make(STYLES["bfloat16"][0], "dX x1.01"), problem("bfloat16"), make_world("single"))
    assert found.findings[0].startswith("grad of hidden: 1.01")
    assert "times the reference, where rounding explains 1 +- 0.004" in found.findings[0]
