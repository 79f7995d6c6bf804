# SPDX-License-Identifier: Apache-2.0
"""What specs are made of: fields and their split, decisions that rounding must not turn, options that go together, branches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_candidates import dense_candidate
from torch import Tensor

from lossgate import ANY, Contract, Layout, Problem, UsageError
from lossgate.adequacy.option_mutants import contrasts
from lossgate.cases.assemble import assemble
from lossgate.cases.examine import examine
from lossgate.cases.kinks import unsettled
from lossgate.cases.materialize import materialize
from lossgate.cases.reference import token_values
from lossgate.cases.strategies import sample_problems
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run import run_cell
from lossgate.engine.settings import Settings
from lossgate.judge.comparison import compare
from lossgate.judge.ensemble import run_ensemble
from lossgate.losses import SPECS, find_spec
from lossgate.problems.partition import Partition
from lossgate.worlds import SimulatedWorld


def problem(spec: str, **changes: Any) -> Problem:
    plain = {
        "head": "logprobs",
        "dtype": "float32",
        "lengths": (9, 7),
        "masks": ("all", "all"),
        "hidden": 1,
        "vocab": 5,
        "seed": 7,
    }
    return Problem(**{"spec": spec, **plain, **changes})


# Splits


def test_pairs_stay_together() -> None:
    partition = Partition(Layout(dp=3), (1, 1, 2, 2, 3, 3, 4, 4), vocab=2, together=2)
    assert [list(partition.sequences(rank)) for rank in range(3)] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    with pytest.raises(UsageError, match="3 sequences do not make groups of 2"):
        problem("dpo", lengths=(1, 1, 1), masks=("all",) * 3, together=2)


def test_a_tensor_of_sequences_is_split_over_dp_and_put_together_again() -> None:
    partition = Partition(Layout(dp=2, cp=2), (2, 3, 4), vocab=2)
    whole = torch.arange(3.0, dtype=torch.float64) + 1
    parts = [partition.shard(whole, ("sequence",), rank) for rank in range(4)]
    assert [part.tolist() for part in parts] == [[1, 2], [1, 2], [3], [3]]
    assembled = assemble(parts, ("sequence",), {"dp": "sum", "cp": "replicate", "tp": "replicate"}, partition, 1)
    assert assembled.tensor.tolist() == [1, 2, 3]
    assert not assembled.faults


@pytest.mark.parametrize(("reduction", "expected"), [("min", -2.0), ("max", 5.0)])
def test_extrema_are_reduced_over_ranks(reduction: Any, expected: float) -> None:
    placements = Contract().of_metric("x", reduction)
    parts = [
        torch.tensor(x) for x in (3.0, 3.0, -2.0, -2.0, 5.0, 5.0, 0.0, 0.0)
    ]  # the last axis is tp, which replicates
    assembled = assemble(parts, (), placements, Partition(Layout(dp=2, cp=2, tp=2), (8, 8), vocab=2), 1)
    assert (float(assembled.tensor), assembled.faults) == (expected, ())
    parts[1] = torch.tensor(4.0)
    assert assemble(parts, (), placements, Partition(Layout(dp=2, cp=2, tp=2), (8, 8), vocab=2), 1).faults


# Decisions


def log_ratios(batch: Any) -> Tensor:
    return (batch.policy - batch.fields["prev_logprobs"])[batch.fields["mask"]]


def test_tokens_whose_clip_hangs_on_rounding_are_masked() -> None:
    """At bfloat16, log-probabilities move by percents, and ratios placed 5% beyond the clip can't be told from those inside."""
    batch = materialize(
        problem("clipped_pg", dtype="bfloat16", lengths=(64,), masks=("all",), scenario={"ratios": "everywhere"})
    )
    coarse, edge = 2.0**-8 / 3**0.5, float(torch.tensor(1.2).log())
    assert len(log_ratios(batch))
    assert bool(((log_ratios(batch) - edge).abs() > 3 * coarse).all())


def test_a_decision_is_found_where_a_probe_turns_it() -> None:
    spec = SPECS["clipped_pg"]
    batch = materialize(problem("clipped_pg", scenario={"ratios": "everywhere"}))
    options = spec.make_options({})
    values = token_values(batch, spec, options)
    none, _ = unsettled(spec, options, values, [values.logprobs + 1e-9], batch)
    assert not none.any()
    moved = values.logprobs.clone()
    moved[3] += 10.0  # far beyond the clip, from wherever it was
    tokens, _ = unsettled(spec, options, values, [moved], batch)
    assert tokens.nonzero().flatten().tolist() == [3]


def test_an_exact_tie_is_no_decision() -> None:
    batch = materialize(problem("clipped_pg", scenario={"ratios": "on-policy"}))
    assert int(batch.fields["valid_tokens"]) == 14


# Options and branches


def test_options_go_together() -> None:
    for name, spec in SPECS.items():
        for drawn in sample_problems(dense_candidate(name, next(iter(spec.inputs))), Layout(), "float32", 60, seed=1):
            assert spec.allows(drawn.options)


def test_a_kernel_may_support_other_numbers_than_problems_usually_have() -> None:
    candidate = replace(dense_candidate("clipped_pg", "logprobs"), supports={"ratio_clip_max": 0.3})
    find_spec("clipped_pg").check(candidate)
    assert {p.options["ratio_clip_max"] for p in sample_problems(candidate, Layout(), "float32", 5, seed=0)} == {0.3}


def test_support_of_nothing_that_goes_together_is_told() -> None:
    candidate = replace(dense_candidate("clipped_pg", "logprobs"), supports={"use_cispo": True, "ratio_clip_c": 3.0})
    with pytest.raises(UsageError, match="no options go together with supports="):
        run_cell(Cell(candidate, Layout(), "float32"), Settings())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nope": 1}, "'nope' is no option of spec 'clipped_pg'"),
        ({"temperature": 0.0}, "option temperature is 0.0; spec 'clipped_pg' allows 0.3 to 3"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c=3.0: expected None with use_cispo=True"),
    ],
)
def test_problems_with_bad_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match="problem: ") as error:
        materialize(problem("clipped_pg", options=options))
    assert told in str(error.value)


def test_branches_out_of_reach_are_not_required() -> None:
    spec, honest = SPECS["clipped_pg"], dense_candidate("clipped_pg", "logprobs")
    every = spec.required(dense_candidate("clipped_pg", "hidden"), Layout(dp=2))
    assert every == spec.every_branch
    plain = spec.required(replace(honest, supports={}), Layout())
    assert set(every) - set(plain) == {
        "rank with nothing trained",
        "weight above its bound",
        "weight below its bound",
        "label on a shard's first row",
        "label on a shard's last row",
        *(name for name in every if name.startswith("sequence ") and "the clip" in name),
    }
    assert "token below the clip, A < 0" in spec.required(
        replace(honest, supports={"ratio_clip_min": (0.2, 1.5)}), Layout()
    )
    assert "token below the clip, A < 0" not in spec.required(
        replace(honest, supports={"ratio_clip_min": 1.5}), Layout()
    )


def test_every_scenario_is_a_branch() -> None:
    spec = SPECS["clipped_pg"]
    assert {"ratios: on-policy", "reference: equal", "advantages: zero", "samples: some"} <= set(spec.every_branch)
    assert "ratios: on-policy" in spec.visited_by(materialize(problem("clipped_pg", scenario={"ratios": "on-policy"})))
    nothing = problem("clipped_pg", scenario={"ratios": "on-policy"}, masks=("none", "none"))
    assert "ratios: on-policy" not in spec.visited_by(materialize(nothing))


def test_a_rank_with_nothing_trained_is_a_branch() -> None:
    uneven = problem("clipped_pg", layout=Layout(dp=2), masks=("all", "none"))
    assert "rank with nothing trained" in SPECS["clipped_pg"].visited_by(materialize(uneven))
    assert "rank with nothing trained" not in SPECS["clipped_pg"].visited_by(
        materialize(replace(uneven, masks=("all", "all")))
    )


# Contrasts: choices of options that must be seen to differ


def names(spec: str, **supports: Any) -> set[str]:
    asked = contrasts(SPECS[spec], replace(dense_candidate(spec, "logits"), supports=supports))
    return {name.removesuffix(" by its value") for name in asked if name.endswith(" by its value")}


def test_each_choice_is_held_against_every_other() -> None:
    assert {name for name in names("clipped_pg", reference_policy_kl_type=ANY) if "kl_type" in name} == {
        f"reference_policy_kl_type={a} told from {b}" for a in ("k1", "k2", "k3") for b in ("k1", "k2", "k3") if a != b
    }


def test_numbers_are_told_from_the_default_from_zero_and_from_none() -> None:
    asked = names("clipped_pg", kl_input_clamp_value=ANY, reference_policy_kl_penalty=ANY)
    assert {name for name in asked if "input_clamp" in name} == {
        f"kl_input_clamp_value={a} told from {b}"
        for a in ("20.0", "None", "5.0")
        for b in ("20.0", "None", "5.0")
        if a != b
    }
    assert "reference_policy_kl_penalty=0.5 told from 0.0" in asked


def test_a_choice_that_is_not_supported_is_still_one_to_be_told_from() -> None:
    assert {name for name in names("grpo") if "loss_fn" in name} == {"loss_fn=dapo told from cispo"}


def test_numbers_too_near_to_tell_are_not_asked_for() -> None:
    assert not {name for name in names("nll", epsilon=(0.0, 1e-8)) if name.startswith("epsilon=1e-08")}
    assert "epsilon=0.5 told from 0.0" in names("nll", epsilon=ANY)
    assert "epsilon=1e-08" not in " ".join(names("nll", epsilon=ANY))


def test_another_choice_takes_its_group_along() -> None:
    spec = SPECS["clipped_pg"]
    clamped = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    }
    assert spec.with_choice(clamped, "use_cispo", False) == {**clamped, "use_cispo": False}
    changed = spec.with_choice(clamped, "truncated_importance_sampling_type", None)
    assert changed is not None
    assert spec.allows(changed)
    assert changed["truncated_importance_sampling_ratio"] is None
    assert changed["use_importance_sampling_correction"] is True
    assert spec.with_choice({}, "ratio_clip_c", 0.5) is None


def test_a_value_that_is_out_of_range_is_refused_by_name() -> None:
    told = r"supports\['ratio_clip_max'\] allows -2.0, which goes with no other options: ratio_clip_max=-2.0: expected"
    with pytest.raises(UsageError, match=told):
        SPECS["clipped_pg"].check(
            replace(dense_candidate("clipped_pg", "logprobs"), supports={"ratio_clip_max": (0.2, -2.0)})
        )


def test_options_for_which_nothing_spoke_are_inconclusive() -> None:
    result = run_cell(
        Cell(dense_candidate("clipped_pg", "logprobs"), Layout(), "float32"), Settings(examples=2, rounds=1)
    )
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.untold
    assert any(
        "option use_cispo=True: no problem would have told it from False (value)" in reason for reason in result.reasons
    )


def test_an_option_that_can_make_no_difference_is_not_owed() -> None:
    """Without a KL penalty its kind is of no account."""
    supports = {"reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": ANY}
    result = run_cell(
        Cell(replace(dense_candidate("clipped_pg", "logprobs"), supports=supports), Layout(), "float32"), Settings()
    )
    assert result.verdict is Verdict.AGREE, result.reasons
    assert "reference_policy_kl_type=k1 told from k2 by its value" in result.idle


# The judge, of outputs that other specs have


def test_an_infinite_reference_wants_the_same() -> None:
    reference = torch.tensor([-1.0, float("-inf"), -2.0], dtype=torch.float64)
    members = torch.stack([reference, reference]) + torch.tensor([[1e-7, 0.0, -1e-7], [-1e-7, 0.0, 1e-7]])
    assert compare("logprobs", reference.clone(), reference, members, 2.0**-24, 2.0**-24).agrees
    for wrong in (-3.0, float("inf"), float("nan")):
        result = reference.clone()
        result[1] = wrong
        assert (
            compare("logprobs", result, reference, members, 2.0**-24, 2.0**-24).faults[0]
            == "1 of 3 entries should be infinite, and are not"
        )


def test_what_is_too_large_for_the_dtype_may_be_infinite() -> None:
    """Perplexity of a sequence with log-probabilities of -200 is 7e86."""
    drawn = problem("nll", spread=400.0)
    found = examine(dense_candidate("nll", "logprobs"), drawn, SimulatedWorld(Layout()))
    assert found.agrees, found.findings


def test_cancelling_sums_are_as_noisy_as_adding_one_by_one_makes_them() -> None:
    """Terms of either sign: partial sums, each of which is rounded, are larger than what is left of them."""
    drawn = problem("clipped_pg", lengths=(200,), masks=("all",))
    batch = materialize(drawn)
    members = run_ensemble(dense_candidate("clipped_pg", "logprobs"), batch, 400, seed=1)["loss"]
    terms = batch.fields["advantages"][batch.fields["mask"]].abs().mean()
    assert (
        0.2 < float(members.std() / (terms * 2.0**-24)) < 1
    )  # of a mean over 199; rounding the terms alone makes 0.03


def test_what_is_computed_twice_comes_out_the_same_twice() -> None:
    """A count of clipped tokens compares a loss with its clipped twin, which is the same number inside the clip."""
    drawn = problem("value", head="values", options={"cliprange": 0.2}, scenario={})
    members = run_ensemble(dense_candidate("value", "values"), materialize(drawn), 16, seed=1)
    assert not members["vf_clipfrac"].any()


def test_outputs_that_some_ranks_lack_disagree() -> None:
    honest = dense_candidate("nll", "logprobs")

    def lacking(inputs: Any, options: Any, mesh: Any) -> Any:
        outputs = honest.kernel(inputs, options, mesh)
        assert not isinstance(outputs, Tensor)
        return replace(outputs, logprobs=None, metrics={}) if mesh.get_rank() == 0 else outputs

    found = examine(replace(honest, kernel=lacking), problem("nll", layout=Layout(dp=2)), SimulatedWorld(Layout(dp=2)))
    assert "logprobs: other ranks return it, and it is missing on rank 0" in found.findings
    assert "ppl_avg: other ranks return it, and it is missing on rank 0" in found.findings


def test_a_kernel_may_compute_exp_less_1_in_two_steps() -> None:
    """As NeMo-RL has k3: exp(d) - 1 - d, which cancels where the policies are near one another."""
    honest, exact = dense_candidate("clipped_pg", "logprobs"), torch.expm1

    def two_steps(inputs: Any, options: Any, mesh: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "expm1", lambda x: x.exp() - 1)
            return honest.kernel(inputs, options, mesh)

    world = SimulatedWorld(Layout())
    for seed in range(8):
        found = examine(
            replace(honest, kernel=two_steps), problem("clipped_pg", lengths=(2,), masks=("all",), seed=seed), world
        )
        assert found.agrees, found.findings
    assert torch.expm1 is exact
