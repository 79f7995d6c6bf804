# SPDX-License-Identifier: Apache-2.0
"""Specs say how fields are split, which options are valid together, what problems must reach."""

from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch

from lossgate import ANY, Candidate, Contract, Layout, Problem, UsageError, candidate
from lossgate.adequacy.set_cover import required_goals
from lossgate.cases.assemble import assemble_tensor
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.placement import PlacedProblem, sample_problems
from lossgate.cases.reference import DenseRun
from lossgate.dense_candidates import dense_candidate, dense_kernel
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.problems.partition import Partition
from lossgate.specs.outputs import metric_output
from lossgate.specs.sharding_goals import SHARDING_GOALS
from lossgate.specs.spec import Spec

CLIPPED_PG = SPECS["clipped_pg"]


def problem(spec: str, **changes: Any) -> Problem:
    plain = {"dtype": "float32", "lengths": (9, 7), "masks": ("all", "all"), "hidden": 1, "vocab": 5, "seed": 7}
    return Problem(**{"spec": spec, "head": "logprobs", **plain, **changes})


def coverage(example: Problem) -> frozenset[str]:
    return BoundProblem(SPECS[example.spec], example).coverage


def placed_coverage(example: Problem) -> frozenset[str]:
    return PlacedProblem(BoundProblem(SPECS[example.spec], example), example).coverage


def declare(supports: dict[str, Any]) -> Candidate:
    return candidate("clipped_pg", head="logprobs", dtypes=("float32",), supports=supports, name="declared")(
        dense_kernel(CLIPPED_PG, "logprobs")
    )


# References


@pytest.mark.usefixtures("shape_checks")
@pytest.mark.parametrize(
    ("spec", "head"),
    [pytest.param(spec, head, id=f"{name}-{head}") for name, spec in SPECS.items() for head in spec.inputs],
)
def test_references_get_and_return_the_shapes_that_they_declare(spec: Spec, head: str) -> None:
    for drawn in Draws(dense_candidate(spec, head), "float32", "shapes", 6).all():
        bound = BoundProblem(spec, drawn)
        assert bound.dense.outputs(bound.bound_spec)


@pytest.mark.usefixtures("shape_checks")
def test_references_refuse_other_shapes() -> None:
    bound = BoundProblem(CLIPPED_PG, problem("clipped_pg"))
    short = replace(bound.batch, fields={**bound.batch.fields, "advantages": bound.batch.fields["advantages"][1:]})
    with pytest.raises(UsageError, match="its reference raised TypeCheckError") as raised:
        DenseRun(short, "logprobs").outputs(bound.bound_spec)
    assert isinstance(raised.value.__cause__, jaxtyping.TypeCheckError)
    assert "parameter 'advantages'" in str(raised.value)


# Splits


def test_pairs_stay_together() -> None:
    partition = Partition(Layout(dp=3), (1, 1, 2, 2, 3, 3, 4, 4), vocab=2, group_size=2)
    assert [list(partition.sequences(rank)) for rank in range(3)] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    with pytest.raises(UsageError, match="group_size=2 does not divide 3 sequences; add empty sequences"):
        problem("dpo", lengths=(1, 1, 1), masks=("all",) * 3, group_size=2)


def test_a_tensor_of_sequences_is_split_over_dp_and_assembled_again() -> None:
    partition = Partition(Layout(dp=2, cp=2), (2, 3, 4), vocab=2)
    whole = torch.arange(3.0, dtype=torch.float64) + 1
    parts = [partition.shard(whole, ("sequence",), rank) for rank in range(4)]
    assert [part.tolist() for part in parts] == [[1, 2], [1, 2], [3], [3]]
    placements: Any = {"dp": "sum", "cp": "replicate", "tp": "replicate"}
    assembled, faults = assemble_tensor(parts, ("sequence",), placements, partition, 1)
    assert assembled.tolist() == [1, 2, 3]
    assert not faults


@pytest.mark.parametrize(("reduction", "expected"), [("min", -2.0), ("max", 5.0)])
def test_extrema_are_reduced_over_ranks(reduction: Any, expected: float) -> None:
    placements = Contract().placements(metric_output("x"), reduction)
    partition = Partition(Layout(dp=2, cp=2, tp=2), (8, 8), vocab=2)
    parts = [torch.tensor(x) for x in (3.0, 3.0, -2.0, -2.0, 5.0, 5.0, 0.0, 0.0)]  # tp, the last axis, replicates
    whole, faults = assemble_tensor(parts, (), placements, partition, 1)
    assert (float(whole), faults) == (expected, ())
    parts[1] = torch.tensor(4.0)
    _, faults = assemble_tensor(parts, (), placements, partition, 1)
    assert faults


# Options


def test_drawn_options_are_valid_together() -> None:
    for spec in SPECS.values():
        dense = dense_candidate(spec, next(iter(spec.inputs)))
        for drawn in sample_problems(dense, Layout(), "float32", 60, seed=1):
            assert spec.conflict(drawn.options) == ""


def test_a_kernel_may_support_other_numbers_than_problems_usually_have() -> None:
    drawn = sample_problems(declare({"ratio_clip_max": 0.3}), Layout(), "float32", 5, seed=0)
    assert {one.options["ratio_clip_max"] for one in drawn} == {0.3}


def test_a_choice_that_no_supported_options_allow_is_refused() -> None:
    """Ratios of sequences need the loss of sequences, which this candidate does not support."""
    with pytest.raises(UsageError) as error:
        run_cell(Cell(declare({"sequence_level_importance_ratios": ANY}), Layout(), "float32"), Settings())
    assert str(error.value).startswith(
        "candidate 'declared': supports names sequence_level_importance_ratios=True, which is not valid with any "
        "other supported choice: token_level_loss=True: expected False"
    )


@pytest.mark.parametrize(
    ("supports", "left"),
    [
        (
            {"use_cispo": True, "ratio_clip_c": 3.0},
            "supports={'use_cispo': True, 'ratio_clip_c': 3.0} leaves no valid combination of options: ",
        ),
        (
            {"use_cispo": True, "disable_ppo_ratio": True},
            (
                "supports={'use_cispo': True, 'disable_ppo_ratio': True} leaves no valid combination of "
                "token_level_loss, sequence_level_importance_ratios, use_ci"
            ),
        ),
    ],
)
def test_support_that_leaves_no_valid_combination_is_refused(supports: dict[str, Any], left: str) -> None:
    with pytest.raises(UsageError) as error:
        run_cell(Cell(declare(supports), Layout(), "float32"), Settings())
    assert str(error.value).startswith(f"candidate 'declared': {left}")
    assert str(error.value).endswith("use_cispo=True. Change supports so that one combination is valid")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nope": 1}, "problem: spec 'clipped_pg' has no option 'nope'; expected one of disable_ppo_ratio, "),
        ({"temprature": 1}, "problem: spec 'clipped_pg' has no option 'temprature'; did you mean 'temperature'?"),
        ({"temperature": 0.0}, "problem: option temperature is 0.0; spec 'clipped_pg' allows 0.3 to 3"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "problem: ratio_clip_c=3.0: expected None with use_cispo=True"),
    ],
)
def test_problems_with_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        BoundProblem(CLIPPED_PG, problem("clipped_pg", options=options))
    assert str(error.value).startswith(message)


def test_another_choice_takes_its_group_along() -> None:
    clamped = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    }
    assert CLIPPED_PG.with_choice(clamped, "use_cispo", False) == {**clamped, "use_cispo": False}
    changed = CLIPPED_PG.with_choice(clamped, "truncated_importance_sampling_type", None)
    assert changed is not None
    assert CLIPPED_PG.conflict(changed) == ""
    assert changed["truncated_importance_sampling_ratio"] is None
    assert changed["use_importance_sampling_correction"] is True
    assert CLIPPED_PG.with_choice({}, "ratio_clip_c", 0.5) is None


def test_a_value_that_is_out_of_range_is_refused_by_name() -> None:
    message = r"supports\['ratio_clip_max'\]=\(0.2, -2.0\)\): -2.0 is not valid with any other options: "
    with pytest.raises(UsageError, match=message + "ratio_clip_max=-2.0: expected"):
        declare({"ratio_clip_max": (0.2, -2.0)})


# Coverage goals


def test_goals_out_of_reach_are_not_required() -> None:
    every = required_goals(dense_candidate(CLIPPED_PG, "hidden"), Layout(dp=3, cp=2, tp=3), "float32")
    assert every == CLIPPED_PG.all_goals
    plain = required_goals(declare({}), Layout(), "float32")
    assert set(every) - set(plain) == {
        *(name for name, goal in SHARDING_GOALS.items() if goal.axes),
        "with a bias",
        "without a bias",
        "weight above its bound",
        "weight below its bound",
        "label filtered out",
        "label kept by a filter",
        "label on the first row",
        "label on the last row",
        *(name for name in every if name.startswith("sequence ") and "the clip" in name),
    }
    assert "token below the clip, A < 0" in required_goals(declare({"ratio_clip_min": (0.2, 1.5)}), Layout(), "float32")
    assert "token below the clip, A < 0" not in required_goals(declare({"ratio_clip_min": 1.5}), Layout(), "float32")


def test_every_scenario_is_a_goal() -> None:
    assert {"ratios: on-policy", "reference: equal", "advantages: zero", "samples: some"} <= set(CLIPPED_PG.all_goals)
    on_policy = problem("clipped_pg", scenario={"ratios": "on-policy"})
    assert "ratios: on-policy" in coverage(on_policy)
    assert "ratios: on-policy" not in coverage(replace(on_policy, masks=("none", "none")))


def test_a_rank_with_nothing_trained_is_a_goal() -> None:
    uneven = problem("clipped_pg", layout=Layout(dp=2), masks=("all", "none"))
    assert "rank with nothing trained" in placed_coverage(uneven)
    assert "rank with nothing trained" not in placed_coverage(replace(uneven, masks=("all", "all")))
    assert "rank with nothing trained" not in coverage(uneven)  # without its layout


@pytest.mark.parametrize(
    ("spec", "goal"), [("clipped_pg", "sequence that does not count"), ("dpo", "pair that does not count")]
)
def test_what_is_left_out_must_have_trained_tokens_beside_some_that_count(spec: str, goal: str) -> None:
    """A kernel that counts it all the same is right where nothing of it, or all else, is masked."""
    group, seen = SPECS[spec].group_size, set[bool]()
    for seed in range(16):
        masks = tuple("none" if (seed >> (i // group)) & 1 else "all" for i in range(4 * group))
        example = problem(
            spec, lengths=(4,) * 4 * group, masks=masks, seed=seed, group_size=group, scenario={"samples": "some"}
        )
        samples = BoundProblem(SPECS[spec], example).batch.fields["sample_mask"].tolist()
        trained = {counts for counts, mask in zip(samples, masks, strict=True) if mask == "all"}
        assert (goal in coverage(example)) == (len(trained) == 2), example
        seen.add(len(trained) == 2)
    assert seen == {True, False}
