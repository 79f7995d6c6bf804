# SPDX-License-Identifier: Apache-2.0
"""Tests of DPO, GRPO and the clipped policy gradient on fused log-probabilities.

lossgate verifies them as candidates, and ``ci/gate`` holds them to all properties. The tests here
cover other defects that the originals have had; O1 to O18 refer to the list of open-instruct's
defects in docs/reference/losses.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lossgate
from fused_losses import (
    ClippedPGConfig,
    Metrics,
    RhoCorrection,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
)
from property_tests.kernels.loss_inputs import GSPO, TRUNCATED, experience, pack, rollout
from property_tests.kernels.losses_with_metrics import LOSSES, Batch
from property_tests.kernels.our_candidates import OURS

test_dpo_agrees = pytest.mark.slow(lossgate.suite(OURS["fused_linear_dpo"], layouts=["dp=2,cp=2,tp=2"], examples=12))
test_clipped_pg_agrees = pytest.mark.slow(
    lossgate.suite(OURS["fused_linear_clipped_pg"], layouts=["dp=2,cp=2,tp=2"], examples=12)
)
test_grpo_agrees = pytest.mark.slow(lossgate.suite(OURS["fused_linear_grpo"], layouts=["dp=2,cp=2,tp=2"], examples=12))


def assert_garbage_has_no_effect(
    loss: Callable[..., tuple[Tensor, Metrics]], given: Mapping[str, Any], garbage: float, **spoilt: Tensor
) -> None:
    """Compares loss, gradients and metrics, bit by bit, with and without garbage at masked tokens.

    Args:
        loss: takes log-probabilities, and other arguments in place of those that it has.
        given: its arguments, with the log-probabilities and the mask.
        garbage: stands in the log-probabilities at masked tokens.
        spoilt: other arguments, with garbage at masked tokens.
    """
    clean = given["logprobs"].detach().clone().requires_grad_()
    dirty = clean.detach().masked_fill(~given["mask"], garbage).requires_grad_()
    (one, metrics), (other, others) = loss(logprobs=clean), loss(logprobs=dirty, **spoilt)
    assert torch.equal(one, other)
    assert torch.equal(*(torch.autograd.grad(x, leaf)[0] for x, leaf in ((one, clean), (other, dirty))))
    assert all(torch.equal(value, others[metric]) for metric, value in metrics.items())


# DPO


@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "ipo"}, {"sft_loss_weight": 0.5}, {"preference_average_log_probs": True}]
)
def test_garbage_at_masked_tokens_has_no_effect_on_dpo(options: dict[str, Any]) -> None:
    batch = pack() | {"valid_sequences": 4, **options}
    spoilt = batch["reference_logprobs"].masked_fill(~batch["mask"], float("-inf"))
    assert_garbage_has_no_effect(partial(dpo_loss, **batch), batch, float("nan"), reference_logprobs=spoilt)


def test_a_rank_without_pairs_has_zero_gradients() -> None:
    """Its loss has a graph; ranks that wait for the gradient of a constant would hang.

    AReaL's DPO returns such a constant.
    """
    batch = pack() | {"sample_mask": torch.zeros(4, dtype=torch.bool)}
    logprobs = batch["logprobs"].requires_grad_()
    loss, _ = dpo_loss(**batch, valid_sequences=6, sft_loss_weight=1.0)
    loss.backward()
    assert loss == 0
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, torch.zeros(12, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sample_mask": torch.ones(3).bool()},
            r"sample_mask \[3\]: expected one for each of an even number of sequences",
        ),
        ({"mask": torch.ones(5).bool()}, r"mask \[5\]"),
        ({"loss_type": "hinge"}, "loss_type 'hinge': expected 'sigmoid' or 'ipo'"),
        (
            {"loss_type": "ipo", "reference_policy_kl_penalty": 0.0},
            "reference_policy_kl_penalty 0.0: expected .* above 0",
        ),
    ],
)
def test_bad_arguments_of_dpo_raise_errors_that_name_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(**{**pack(), "valid_sequences": 4, **changes})


# GRPO


def test_cispo_reports_its_clipping() -> None:
    """The tiled path of open-instruct once reported a fraction of 0 (O2)."""
    given = rollout(loss_fn="cispo", rho=None)
    given["old_logprobs"] = given["logprobs"].detach() - 1.0
    assert grpo_loss(**given)[1]["clipfrac"] == 1


@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
def test_the_chosen_estimator_is_in_the_loss(estimator: Any) -> None:
    """open-instruct's tiled path once used estimator 2 for every choice (O7)."""
    loss, metrics = grpo_loss(**rollout(beta=0.5, kl_estimator=estimator))
    torch.testing.assert_close(metrics["kl_avg"], 0.5 * metrics[f"kl{estimator}"])
    torch.testing.assert_close(loss.detach(), metrics["policy_avg"] + metrics["kl_avg"])


@pytest.mark.parametrize(
    "rho",
    [
        RhoCorrection(),
        RhoCorrection(rho_mask_lower_bound=0.9),
        RhoCorrection(rho_mask_sequence_level=True),
        RhoCorrection(rho_clamp_upper_bound=1.01),
    ],
)
def test_rho_is_not_ignored(rho: RhoCorrection) -> None:
    """open-instruct's tiled path once ignored the correction (O6)."""
    assert grpo_loss(**rollout(rho=rho))[0] != grpo_loss(**rollout(rho=None))[0]


def test_log_probabilities_of_a_reference_policy_equal_those_of_training() -> None:
    """That holds for kernels with gradients in forward, too.

    NeMo-RL's agreement test left out the pass for reference log-probabilities.
    """
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 4, generator=generator).bfloat16().requires_grad_() for n in (12, 9))
    labels = torch.randint(9, (12,), generator=generator)
    trained = linear_logprobs(hidden, weight, labels, chunk=5).logprobs
    with torch.no_grad():
        reference = linear_logprobs(hidden, weight, labels, chunk=5).logprobs
    assert torch.equal(trained, reference)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, chunk=5), -reference.mean())


def test_a_rank_without_tokens_has_zero_gradients() -> None:
    """A number of tiles that follows the number of tokens would be 0 here, and fail (O11)."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(9, 4, requires_grad=True)
    logprobs = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long)).logprobs
    none = {name: torch.zeros(0) for name in ("old_logprobs", "reference_logprobs", "vllm_logprobs", "advantages")}
    loss, metrics = grpo_loss(
        logprobs, **none, mask=torch.zeros(0, dtype=torch.bool), valid_tokens=9, rho=RhoCorrection()
    )
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()
    assert metrics["rho_min"] == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_overflows_where_it_is_clipped_has_no_gradient(dtype: torch.dtype) -> None:
    """A gradient of NaN would spoil those of all other tokens."""
    new, old = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True), torch.tensor([-1000.0, -2.0], dtype=dtype)
    ones, mask, zeros = torch.ones(2, dtype=dtype), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    grpo, _ = grpo_loss(new, old_logprobs=old, advantages=ones, mask=mask, valid_tokens=2, beta=0.0)
    others = {
        "prev_logprobs": old,
        "generation_logprobs": old,
        "reference_logprobs": old,
        "advantages": ones,
        "mask": mask,
        "sequence": zeros,
    }
    config = ClippedPGConfig(reference_policy_kl_penalty=0.0)
    clipped, _ = clipped_pg_loss(new, **others, sample_mask=mask[:1], valid_tokens=2, valid_sequences=1, config=config)
    for loss in (grpo, clipped):
        torch.testing.assert_close(torch.autograd.grad(loss, new)[0], torch.tensor([0.0, -0.5], dtype=dtype))


def test_tensors_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages \[12, 1\]: expected \[12\], one for each token, as logprobs"):
        grpo_loss(**rollout(advantages=torch.zeros(12, 1)))


def test_a_denominator_below_1_is_not_clamped() -> None:
    """open-instruct's tiled path clamps it to at least 1 (O14)."""
    whole, half = (grpo_loss(**rollout(loss_denominator=d))[0] for d in (1.0, 0.5))
    torch.testing.assert_close(half, 2 * whole)


@pytest.mark.parametrize("garbage", [float("nan"), float("-inf")])
def test_garbage_at_masked_tokens_has_no_effect_on_grpo(garbage: float) -> None:
    """Masked values are selected away; multiplied by 0, infinity would become NaN (O15)."""
    given = rollout(rho=RhoCorrection(rho_mask_sequence_level=True))
    assert_garbage_has_no_effect(partial(grpo_loss, **given), given, garbage)


def test_rho_of_a_sequence_does_not_depend_on_its_pack() -> None:
    """It is not the mean over a whole pack (O17)."""
    given = rollout(rho=RhoCorrection(rho_mask_sequence_level=True, rho_clamp_upper_bound=0.0))
    alone = {name: value[:3] if isinstance(value, Tensor) else value for name, value in given.items()} | {
        "sequences": 1
    }
    _, metrics = grpo_loss(**{**given, "mask": given["mask"] & (given["sequence"] == 0)})
    torch.testing.assert_close(grpo_loss(**alone)[1]["rho_weight"], metrics["rho_weight"])
    x = (given["old_logprobs"] - given["vllm_logprobs"])[:2].mean()
    torch.testing.assert_close(metrics["rho_weight"], x.exp() * 2 / 9)


def test_tokens_without_vllm_logprobs_are_not_corrected() -> None:
    """NaN means no correction; open-instruct replaces it by a log-probability of 1 (O18)."""
    given = rollout(mask=torch.ones(12, dtype=torch.bool), valid_tokens=12, beta=0.0)
    corrected, _ = grpo_loss(**{**given, "vllm_logprobs": torch.full((12,), float("nan"), dtype=torch.float64)})
    torch.testing.assert_close(corrected, grpo_loss(**{**given, "rho": None})[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_fn": "ppo"}, "loss_fn 'ppo': expected 'dapo' or 'cispo'"),
        ({"kl_estimator": 4}, "kl_estimator 4: expected 0, 1, 2 or 3"),
        ({"loss_denominator": 0.0}, "loss_denominator 0.0: expected a finite number above 0, or 'token'"),
        ({"reference_logprobs": None}, "reference_logprobs is missing"),
        ({"vllm_logprobs": None}, "vllm_logprobs is missing"),
        ({"sequence": None, "rho": RhoCorrection(rho_mask_tv_divergence=True)}, "sequence or sequences is missing"),
    ],
)
def test_bad_arguments_of_grpo_raise_errors_that_name_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo_loss(**rollout(**changes))


# The clipped policy gradient


@pytest.mark.parametrize("garbage", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize(
    "config",
    [{}, GSPO | TRUNCATED, {"positive_example_nll_weight": 0.1, "use_cispo": True}],
    ids=["default", "gspo", "cispo"],
)
def test_garbage_at_masked_tokens_has_no_effect_on_the_clipped_policy_gradient(
    garbage: float, config: dict[str, Any]
) -> None:
    given = experience(**config)
    assert_garbage_has_no_effect(partial(clipped_pg_loss, **given), given, garbage)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ratio_clip_min": -0.1}, "ratio_clip_min -0.1: expected a finite number from 0"),
        ({"ratio_clip_c": 0.9}, "ratio_clip_c 0.9: expected a finite number above 1, or None for no dual clip"),
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value 0.0: expected a finite number above 0, or None"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type 'k4': expected 'k1', 'k2' or 'k3'"),
        ({"sequence_level_importance_ratios": True}, "token_level_loss True: expected False"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo with ratio_clip_c"),
        ({"use_cispo": True, "token_level_loss": False}, "use_cispo with token_level_loss False"),
        (
            {"truncated_importance_sampling_ratio": 2.0},
            "truncated_importance_sampling_ratio 2.0, _min None: set the type",
        ),
        (
            TRUNCATED | {"truncated_importance_sampling_type": "clip"},
            "truncated_importance_sampling_type 'clip': expected None, 'tis'",
        ),
        (
            TRUNCATED | {"use_importance_sampling_correction": False},
            "use_importance_sampling_correction False: expected True",
        ),
        (
            TRUNCATED | {"truncated_importance_sampling_ratio": None},
            "truncated_importance_sampling_ratio None: expected a positive number",
        ),
        (
            TRUNCATED | {"truncated_importance_sampling_ratio_min": None},
            "truncated_importance_sampling_ratio_min None: expected a number",
        ),
        (
            TRUNCATED | {"truncated_importance_sampling_ratio_min": 2.0},
            "truncated_importance_sampling_ratio_min 2.0: expected at most 1.5",
        ),
        (
            GSPO | TRUNCATED | {"truncated_importance_sampling_type": "seq-mask-tis"},
            "'seq-mask-tis': expected another with sequence_level",
        ),
    ],
)
def test_options_that_contradict_each_other_raise_errors_that_name_them(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClippedPGConfig(**config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference_logprobs": None}, "reference_logprobs is missing"),
        (
            {"sequence": torch.zeros(5, dtype=torch.long)},
            r"sequence \[5\]: expected \[12\], one for each token, as logprobs",
        ),
        ({"advantages": torch.zeros(12, 1)}, r"advantages \[12, 1\]: expected \[12\]"),
        ({"rewards": torch.zeros(3)}, r"rewards \[3\]: expected \[4\], one for each sequence"),
        ({"sample_mask": torch.ones(2, 2).bool()}, r"sample_mask \[2, 2\]: expected \[S\]"),
        (
            {"rewards": None, "config": ClippedPGConfig(positive_example_nll_weight=0.1)},
            "^rewards: missing with positive_example_nll_weight 0.1",
        ),
    ],
)
def test_bad_arguments_of_the_clipped_policy_gradient_raise_errors_that_name_them(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_pg_loss(**{**experience(), **changes})


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith("linear")])
def test_autocast_does_not_change_losses(name: str) -> None:
    whole = Batch.whole()
    batch = replace(whole, numbers=whole.numbers.float())
    expected = LOSSES[name](batch, None).floats()
    with torch.autocast("cpu", torch.bfloat16):
        assert LOSSES[name](batch, None).floats() == expected
