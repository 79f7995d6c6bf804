# SPDX-License-Identifier: Apache-2.0
"""Every loss that returns metrics, on any part of one batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_losses import (
    ClippedPGConfig,
    Metrics,
    RhoCorrection,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_sft_loss,
)

TOKENS, SEQUENCES, WIDTH, VOCAB = 48, 8, 4, 9


@dataclass(frozen=True)
class Batch:
    """The tokens of some sequences. Sequences are counted from the first one of the part."""

    sequence: Tensor
    sequences: int
    hidden: Tensor
    labels: Tensor
    mask: Tensor
    real: Tensor
    numbers: Tensor
    """``[5, tokens]``: log-probabilities of four policies, and advantages."""

    @classmethod
    def whole(cls) -> "Batch":
        generator = torch.Generator().manual_seed(5)
        sequence = torch.randint(SEQUENCES, (TOKENS,), generator=generator).sort().values
        numbers = torch.rand(5, TOKENS, generator=generator, dtype=torch.float64) - 1
        numbers[-1] += 0.5
        draw = torch.rand(TOKENS, generator=generator)
        return cls(
            sequence,
            SEQUENCES,
            torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(VOCAB, (TOKENS,), generator=generator),
            draw < 0.6,
            draw < 0.9,
            numbers,
        )

    def part(self, first: int, end: int, rank: int = 0, ranks: int = 1) -> "Batch":
        """Returns a rank's tokens of sequences ``first`` to ``end``: every n-th token."""
        keep = ((self.sequence >= first) & (self.sequence < end)).nonzero().flatten()[rank::ranks]
        tokens = (self.hidden[keep], self.labels[keep], self.mask[keep], self.real[keep], self.numbers[:, keep])
        return Batch(self.sequence[keep] - first, end - first, *tokens)


VALID, VALID_SEQUENCES = int(Batch.whole().mask.sum()), SEQUENCES


def _dpo(b: Batch, group: Any) -> Metrics:
    given: dict[str, Any] = {"sequence": b.sequence, "sample_mask": torch.ones(b.sequences, dtype=torch.bool)}
    return dpo_loss(
        b.numbers[0],
        b.numbers[1],
        mask=b.mask,
        **given,
        valid_sequences=VALID_SEQUENCES,
        sft_loss_weight=0.5,
        cp_group=group,
    )[1]


_BOUNDS: dict[str, Any] = {"rho_mask_lower_bound": 0.8, "rho_mask_upper_bound": 1.5, "rho_clamp_upper_bound": 1.2}


def _grpo(b: Batch, group: Any, **options: Any) -> Metrics:
    policies = dict(zip(("old_logprobs", "reference_logprobs", "vllm_logprobs"), b.numbers[1:4], strict=True))
    return grpo_loss(
        b.numbers[0],
        **policies,
        advantages=b.numbers[4],
        mask=b.mask,
        valid_tokens=VALID,
        sequence=b.sequence,
        sequences=b.sequences,
        rho=RhoCorrection(**{**_BOUNDS, **options}),
        cp_group=group,
    )[1]


def _clipped_pg(b: Batch, group: Any, **options: Any) -> Metrics:
    policies = dict(zip(("prev_logprobs", "generation_logprobs", "reference_logprobs"), b.numbers[1:4], strict=True))
    return clipped_pg_loss(
        b.numbers[0],
        **policies,
        advantages=b.numbers[4],
        mask=b.mask,
        sequence=b.sequence,
        sample_mask=torch.ones(b.sequences, dtype=torch.bool),
        valid_tokens=VALID,
        valid_sequences=VALID_SEQUENCES,
        config=ClippedPGConfig(**options),
        cp_group=group,
    )[1]


def _sft(b: Batch, group: Any, **options: Any) -> Metrics:
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    given: dict[str, Any] = {"mask": b.mask, "real": b.real, "sequence": b.sequence, "sequences": b.sequences}
    return linear_sft_loss(b.hidden, weight, b.labels, **given, valid_tokens=VALID, cp_group=group, **options)[1]


_TRUNCATED: dict[str, Any] = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 1.5,
    "truncated_importance_sampling_ratio_min": 0.8,
}

LOSSES: dict[str, Callable[[Batch, Any], Metrics]] = {
    "dpo_loss": _dpo,
    "grpo_loss": _grpo,
    "grpo_loss, rho of sequences": partial(_grpo, rho_mask_sequence_level=True),
    "clipped_pg_loss": partial(_clipped_pg, **_TRUNCATED, truncated_importance_sampling_type="tis"),
    "clipped_pg_loss, of sequences": partial(
        _clipped_pg, **_TRUNCATED, truncated_importance_sampling_type="seq-mask-tis", token_level_loss=False
    ),
    "clipped_pg_loss, GSPO": partial(
        _clipped_pg,
        use_importance_sampling_correction=True,
        sequence_level_importance_ratios=True,
        token_level_loss=False,
    ),
    "linear_sft_loss": _sft,
    "linear_sft_loss, in parts": partial(_sft, entropy=False, logit_range=False),
}
"""From a part of the batch and its cp group to its metrics. Names begin with the function's."""
