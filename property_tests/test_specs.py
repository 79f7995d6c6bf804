# SPDX-License-Identifier: Apache-2.0
"""Tests of every spec, end to end.

A correct dense candidate agrees at every head. A wrong one disagrees, and so does one that ignores
an option.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch

import lossgate
from kernel_bank.bugs import Bug, ignores
from kernel_bank.spec_bugs import bugs_of
from lossgate import ANY, Layout, Problem
from lossgate.adequacy import deck
from lossgate.cases.case import Case
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.specs.option import COMMON_OPTIONS, Option
from lossgate.specs.spec import Spec
from lossgate.worlds import SimulatedWorld


@pytest.fixture(autouse=True, scope="module")
def _keep_all_decks() -> Iterator[None]:
    """Most tests here use a deck that another has used before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deck, "_KEPT", 32)
        yield


SETTINGS = Settings(examples=12, rounds=12)
EQUIVALENT = {
    f"reference_layout={a} computed as {b}, seen in {side}"
    for a, b in (("next", "rolled"), ("rolled", "next"))
    for side in ("its value", "a gradient")
}
"""The two layouts differ at the last tokens of sequences alone, which are never trained."""


def param(spec: Spec, *values: Any, name: str = "") -> Any:
    """Returns parameters of a test. Tests of a spec run in one worker, because they share decks."""
    return pytest.param(spec, *values, id=f"{spec.name}{name and '-'}{name}", marks=pytest.mark.xdist_group(spec.name))


EACH_SPEC = pytest.mark.parametrize("spec", [param(spec) for spec in SPECS.values()])


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("spec", "head"),
    [param(spec, head, name=head) for spec in SPECS.values() for head in spec.inputs],
)
def test_a_correct_candidate_agrees_on_all_axes(spec: Spec, head: str) -> None:
    """It agrees conclusively.

    Every coverage goal is covered, every option mutant killed, and every planted error rejected.
    ``meta/spec_check/test_built_in_specs.py`` asks the same on one rank and on fewer axes.
    """
    result = run_cell(Cell(dense_candidate(spec, head), Layout(dp=2, cp=2, tp=2), "float32"), SETTINGS)
    assert result.verdict is Verdict.AGREE, result.reasons
    assert not result.record.missing_goals
    assert not result.record.surviving
    assert set(result.record.equivalent) <= EQUIVALENT


def test_a_divergence_that_is_all_but_0_may_be_rounded() -> None:
    """The normaliser of a softmax is rounded however small a log-probability is.

    It changes a divergence of 1e-5 by half a percent.
    """
    problem = Problem(
        spec="distill",
        head="hidden",
        dtype="float32",
        layout=Layout(dp=2),
        lengths=(2,),
        masks=("all",),
        hidden=1,
        vocab=2,
        scenario={"teacher": "near"},
        reduction_order="permuted",
    )
    world = SimulatedWorld(problem.layout)
    case = Case(dense_candidate(SPECS["distill"], "hidden"), problem, world)
    found = run_case(case, PROPERTIES["agreement"])
    world.close()
    assert found.agrees, found.findings


# Wrong candidates


@pytest.mark.slow(but=3)
@EACH_SPEC
def test_a_wrong_candidate_disagrees(spec: Spec) -> None:
    """The plainest bug of each spec is found, and shrunk."""
    wrong = bugs_of(spec)[0].put_into(dense_candidate(spec, next(iter(spec.inputs))))
    result = run_cell(Cell(wrong, Layout(), "float32"), replace(SETTINGS, shrink_calls=20))
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None


DISAGREEING = Settings(shrink_calls=1)
"""What a user gets who sets nothing; but how small the problem is does not matter here."""


def _of_logits(spec: Spec) -> set[str]:
    """Returns the options that have no meaning for a kernel that starts from log-probabilities."""
    return set(spec.logit_options)


def _with_logits(spec: Spec) -> str:
    return "logits" if "logits" in spec.inputs else next(iter(spec.inputs))


@pytest.mark.slow(but=10)
@pytest.mark.parametrize(
    ("spec", "option"),
    [
        param(spec, option, name=option.name)
        for spec in SPECS.values()
        for option in spec.options
        if len(set(option.choices)) != 1
    ],
)
def test_a_candidate_that_ignores_an_option_disagrees(spec: Spec, option: Option) -> None:
    head = _with_logits(spec) if option.name in _of_logits(spec) else list(spec.inputs)[-1]
    wrong = ignores(option, spec).put_into(dense_candidate(spec, head))
    assert run_cell(Cell(wrong, Layout(), "float32"), DISAGREEING).verdict is Verdict.DISAGREE


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    ("spec", "bug"),
    [param(spec, bug, name=bug.name) for spec in SPECS.values() for bug in bugs_of(spec)[1:]],
)
def test_a_candidate_that_takes_one_choice_for_another_disagrees(spec: Spec, bug: Bug) -> None:
    head = _with_logits(spec) if bug.name.split(" ")[0] in _of_logits(spec) else list(spec.inputs)[-1]
    wrong = bug.put_into(dense_candidate(spec, head))
    assert run_cell(Cell(wrong, Layout(), "float32"), DISAGREEING).verdict is Verdict.DISAGREE


# Two correct orders of summation


def rewards_of_differences(inputs: Any, options: Any, _mesh: Any) -> torch.Tensor:
    """Sums the log-ratios, as NeMo-RL does."""
    ratios = torch.where(inputs.mask, inputs.logprobs - inputs.reference_logprobs, 0.0)
    return dpo_of_rewards(sums(ratios, inputs), inputs, options)


def rewards_of_sums(inputs: Any, options: Any, _mesh: Any) -> torch.Tensor:
    """Subtracts the log-probabilities of whole sequences, as TRL does."""
    policy, reference = (
        sums(torch.where(inputs.mask, x, 0.0), inputs) for x in (inputs.logprobs, inputs.reference_logprobs)
    )
    return dpo_of_rewards(policy - reference, inputs, options)


def sums(x: torch.Tensor, inputs: Any) -> torch.Tensor:
    return torch.zeros(len(inputs.cu_seqlens) - 1).index_add(0, inputs.sequence, x)


def dpo_of_rewards(rewards: torch.Tensor, inputs: Any, options: Any) -> torch.Tensor:
    losses = -torch.nn.functional.logsigmoid(options.reference_policy_kl_penalty * (rewards[0::2] - rewards[1::2]))
    return (losses * inputs.sample_mask[0::2]).sum() / (inputs.valid_sequences / 2).clamp(min=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [rewards_of_differences, rewards_of_sums])
def test_either_order_of_summation_agrees(kernel: Any) -> None:
    """The two orders round differently.

    Log-probabilities of hundreds of nats that are summed before they are subtracted lose digits
    that a sum of differences keeps.
    """
    declared = lossgate.candidate(
        "dpo", head="logprobs", dtypes=("float32",), supports={"reference_policy_kl_penalty": ANY}
    )(kernel)
    result = run_cell(Cell(declared, Layout(), "float32"), Settings(examples=75))
    assert result.verdict is Verdict.AGREE, result.reasons


# Options


@EACH_SPEC
def test_options_say_what_they_mean(spec: Spec) -> None:
    for option in spec.options:
        assert option.meaning
        assert option.name not in COMMON_OPTIONS
        assert option.allows(option.default)
    assert not spec.conflict({})


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("clipped_pg", {"epsilon": -1.0}, "epsilon=-1.0: expected a finite number, 0 or larger"),
        ("clipped_pg", {"ratio_clip_c": 1.0}, "ratio_clip_c=1.0: expected None or a finite number above 1"),
        (
            "clipped_pg",
            {"kl_output_clamp_value": 0.0},
            "kl_output_clamp_value=0.0: expected None or a finite positive number",
        ),
        ("clipped_pg", {"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c=3.0: expected None with use_cispo=True"),
        ("distill", {"epsilon": inf}, "epsilon is inf; expected a finite number, 0 or larger"),
        ("distill", {"temperature": 0.0}, "temperature is 0.0; expected a finite positive number"),
        ("distill", {"mixed_kl_weight": 1.5}, "mixed_kl_weight is 1.5; expected a weight in [0, 1]"),
        ("dpo", {"sft_loss_weight": nan}, "sft_loss_weight is nan; expected a finite number, 0 or larger"),
        ("dpo", {"loss_type": "hinge"}, "loss_type is 'hinge'; expected one of sigmoid, ipo"),
        ("grpo", {"clip_higher": -0.1}, "clip_higher is -0.1; expected a finite number, 0 or larger"),
        ("grpo", {"loss_denominator": 0.0}, "loss_denominator is 0.0; expected 'token' or a finite positive number"),
        (
            "grpo",
            {"loss_denominator": "all"},
            "loss_denominator is 'all'; expected 'token' or a finite positive number",
        ),
        (
            "grpo",
            {"rho_clamp_lower_bound": 1.0},
            "rho_clamp_lower_bound is 1.0; expected 0, or a number between 0 and 1",
        ),
        ("grpo", {"rho_mask_upper_bound": 1.0}, "rho_mask_upper_bound is 1.0; expected 0, or a finite number above 1"),
        (
            "grpo",
            {"rho_mask_upper_bound": inf, "rho_mask_tv_divergence": True},
            "rho_mask_upper_bound is inf; expected 0, or a finite positive number",
        ),
        ("token_logprobs", {"top_k": 0}, "top_k is 0; expected a positive number of tokens, or None for all"),
        ("token_logprobs", {"top_p": 0.0}, "top_p is 0.0; expected a probability in (0, 1]"),
        ("value", {"scale": -1.0}, "scale is -1.0; expected a finite number, 0 or larger"),
        ("value", {"cliprange": 0.0}, "cliprange is 0.0; expected a finite positive number, or None for no clip"),
    ],
)
def test_options_out_of_range_say_what_is_expected(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SPECS[spec].options_type(**options)
