# SPDX-License-Identifier: Apache-2.0
"""Calls as trainers write them: their enums, their heads, their sections, and their names."""

from collections.abc import Callable
from enum import Enum, StrEnum
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_losses
from fused_losses import (
    ClippedPGConfig,
    RhoCorrection,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    tiled_grpo_loss,
    tiled_loss,
    tiled_token_logprobs,
    vocab_parallel_logprobs,
)
from property_tests.kernels.loss_inputs import experience, pack, rollout

# Choices


class LossType(StrEnum):
    """As in open-instruct."""

    dapo = "dapo"
    cispo = "cispo"


class Estimator(Enum):
    K3 = "k3"


@pytest.mark.parametrize("loss_fn", LossType)
def test_a_member_of_a_str_enum_is_its_text(loss_fn: LossType) -> None:
    found, _ = grpo_loss(**rollout(loss_fn=loss_fn))
    assert found == grpo_loss(**rollout(loss_fn=loss_fn.value))[0]
    found.backward()


def test_a_member_of_another_enum_has_a_value() -> None:
    with pytest.raises(ValueError, match=r"reference_policy_kl_type <Estimator.K3: 'k3'>: .*; pass its value, 'k3'"):
        ClippedPGConfig(reference_policy_kl_type=Estimator.K3)  # type: ignore[arg-type]


# Heads with dropout


class LoraHead(nn.Module):
    """A linear layer with an adapter whose input drops out, as peft's."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 9, bias=False).requires_grad_(False)
        self.lora_dropout, self.lora_a, self.lora_b = nn.Dropout(0.5), nn.Linear(4, 2), nn.Linear(2, 9)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.lora_b(self.lora_a(self.lora_dropout(hidden)))


def of_head(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, 6, generator=generator)
    given = {"advantages": advantages, "old_logprobs": -old.abs(), "mask": torch.ones(6), "valid_tokens": 6, "beta": 0}
    return {"hidden": torch.randn(6, 4, generator=generator), "labels": torch.arange(6), **given, **changes}


def gradients(loss: Tensor, head: nn.Module) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in head.parameters() if p.requires_grad])]


@pytest.mark.parametrize("rho", [None, RhoCorrection(rho_mask_sequence_level=True)], ids=["no rho", "rho of sequences"])
def test_a_loss_in_one_pass_takes_a_head_with_dropout(rho: RhoCorrection | None) -> None:
    """Its gradients are those of the numbers that it has drawn."""
    head = LoraHead()
    of_rho = {"sequence": torch.zeros(6).long(), "sequences": 1, "vllm_logprobs": -torch.ones(6)} if rho else {}
    given = of_head(rho=rho, **of_rho)
    torch.manual_seed(1)
    found = gradients(tiled_grpo_loss(head, **given, tiles=1)[0], head)
    torch.manual_seed(1)
    hidden, labels = given.pop("hidden"), given.pop("labels")
    logprobs = head(hidden).log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(found, gradients(grpo_loss(logprobs, **given)[0], head))


def test_a_second_pass_refuses_dropout() -> None:
    head, given = LoraHead(), of_head()
    words = r"its lora_dropout drops out with probability 0.5, .*, or use tiled_loss or tiled_grpo_loss"
    with pytest.raises(ValueError, match=words):
        tiled_token_logprobs(head, given["hidden"], given["labels"])
    of_sequences = {"rho": RhoCorrection(rho_mask_sequence_level=True), "sequences": 1, "vllm_logprobs": -torch.ones(6)}
    with pytest.raises(ValueError, match=r"\(if rho averages over sequences, with old_logprobs\)"):
        tiled_grpo_loss(head, **of_head(old_logprobs=None, sequence=torch.zeros(6).long(), **of_sequences))


# Policies before the update


def test_no_previous_log_probabilities_where_they_have_no_effect() -> None:
    given = experience(force_on_policy_ratio=True)
    expected = clipped_pg_loss(**given)
    del given["prev_logprobs"]
    for found in (clipped_pg_loss(**given), clipped_pg_loss(**given, prev_logprobs=None)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"prev_logprobs is missing: .*; or set force_on_policy_ratio"):
        clipped_pg_loss(**{**given, "config": ClippedPGConfig()})


# Names

RECIPE: dict[str, Any] = {
    "max_num_epochs": 1,
    "max_num_steps": 150,
    "val_period": 25,
    "val_at_start": True,
    "seed": 42,
    "reference_policy_kl_penalty": 0.05,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
    "preference_loss_weight": 1,
    "sft_loss_weight": 0,
}
"""The section ``dpo`` of a recipe of NeMo-RL has options of the trainer too."""

UNKNOWN: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "DPO, beta": (
        dpo_loss,
        {"beta": 0.1},
        "dpo_loss has no argument 'beta': 'beta' is reference_policy_kl_pena",
    ),
    "DPO, a recipe": (
        dpo_loss,
        RECIPE,
        "dpo_loss has no argument 'max_num_epochs', .*, 'seed': leave out .*, such as options of the trainer",
    ),
    "DPO, both": (dpo_loss, {"beta": 1, "seed": 1}, "'beta' is reference_.* here; leave out 'seed', such as"),
    "tiled, shards": (tiled_grpo_loss, {"shards": 8}, "'shards' is tiles here"),
    "tiled, an option of grpo_loss": (
        tiled_grpo_loss,
        {"ref_logprobs": 0},
        "'ref_logprobs' is reference_logprobs here",
    ),
    "tiled logprobs": (tiled_token_logprobs, {"shards": 8}, "'shards' is tiles here"),
    "tiled loss": (tiled_loss, {"chunk_size": 8}, "'chunk_size' is tiles here"),
    "cross-entropy": (linear_cross_entropy, {"chunk_size": 8}, "'chunk_size' is chunk here"),
    "log-probabilities": (linear_logprobs, {"vocab_start_index": 8}, "'vocab_start_index' is vocab_start here"),
    "split logits": (vocab_parallel_logprobs, {"target": 8}, "'target' is labels here"),
    "GRPO": (grpo_loss, {"prev_logprobs": 8}, "'prev_logprobs' is old_logprobs here"),
    "clipped PG": (clipped_pg_loss, {"global_valid_toks": 8}, "'global_valid_toks' is valid_tokens here"),
    "a slip": (
        ClippedPGConfig,
        {"ratio_clip_maximum": 0.2},
        "ClippedPGConfig has no .*: '.*' may be ratio_clip_max",
    ),
    "an option of a later version": (
        ClippedPGConfig,
        {"loss_mode": 1},
        "leave out 'loss_mode', such .*; it has dis",
    ),
    "rho": (RhoCorrection, {"rho_clamp": 1}, "RhoCorrection has no argument 'rho_clamp'"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_refused_with_the_name_that_is_meant(name: str) -> None:
    function, given, message = UNKNOWN[name]
    with pytest.raises(TypeError, match=message):
        function(**given)


def test_what_a_section_has_for_the_loss_passes() -> None:
    options = {name: value for name, value in RECIPE.items() if name in signature(dpo_loss).parameters}
    assert len(options) == 5
    dpo_loss(**pack(), valid_sequences=4, **options)


def test_every_loss_and_every_kernel_says_so() -> None:
    functions = [getattr(fused_losses, name) for name in fused_losses.__all__]
    options = [ClippedPGConfig, RhoCorrection, fused_losses.LinearCrossEntropyLoss]
    named = [one for one in functions if one in options or one.__name__.endswith(("_loss", "_logprobs", "_entropy"))]
    assert len(named) == 14
    for one in named:
        with pytest.raises(TypeError, match=f"{one.__name__} has no argument 'number_of_things'"):
            partial(one, number_of_things=1)()
