# SPDX-License-Identifier: Apache-2.0
"""Arguments of the losses on log-probabilities, for a pack of four sequences with twelve tokens."""

from typing import Any

import torch
from torch import Tensor

from fused_losses import ClippedPGConfig, RhoCorrection


def pack() -> dict[str, Tensor]:
    """Makes a pack of two pairs, with 3, 2, 3 and 4 tokens."""
    generator = torch.Generator().manual_seed(1)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 2, 3, 4]))
    logprobs, reference = -torch.rand(2, 12, generator=generator, dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1]).bool()
    return {
        "logprobs": logprobs,
        "reference_logprobs": reference,
        "mask": mask,
        "sequence": sequence,
        "sample_mask": torch.ones(4, dtype=torch.bool),
    }


def rollout(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    new, noise, reference, sampler = torch.rand(4, 12, generator=generator, dtype=torch.float64) - 1
    batch = pack()
    return {
        "logprobs": new.clone().requires_grad_(),
        "old_logprobs": new + noise,
        "reference_logprobs": reference,
        "vllm_logprobs": sampler,
        "advantages": torch.linspace(-1, 1, 12, dtype=torch.float64),
        "mask": batch["mask"],
        "sequence": batch["sequence"],
        "sequences": 4,
        "valid_tokens": 9,
        "rho": RhoCorrection(),
        **changes,
    }


def experience(**config: Any) -> dict[str, Any]:
    batch, given = pack(), rollout()
    return {
        "logprobs": given["logprobs"],
        "prev_logprobs": given["old_logprobs"],
        "generation_logprobs": given["vllm_logprobs"],
        "reference_logprobs": given["reference_logprobs"],
        "advantages": given["advantages"],
        **{name: batch[name] for name in ("mask", "sequence", "sample_mask")},
        "valid_tokens": 9,
        "valid_sequences": 4,
        "rewards": torch.tensor([1.0, 0.0, 2.0, -1.0]),
        "positive_tokens": 5,
        "config": ClippedPGConfig(**config),
    }


GSPO: dict[str, Any] = {"token_level_loss": False, "sequence_level_importance_ratios": True}
TRUNCATED: dict[str, Any] = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.5,
    "truncated_importance_sampling_ratio_min": 0.5,
}
