# SPDX-License-Identifier: Apache-2.0
"""Dense reference implementations of post-training losses.

The modules are written to be read beside their formulas and to run in float64. Nothing here is
fast, fused or sharded. The package imports neither ``fused_losses`` nor ``lossgate``: an oracle
that shared code with a kernel would share its bugs.

Conventions of all modules:

- Sequences are packed: per-token tensors have the shape ``[tokens]``, sequence after sequence, and
  ``sequence[t]`` is the number of the sequence that token t belongs to.
- ``mask`` is true at trained tokens. Masked values are selected away, so that NaN or inf in them
  has no effect.
- Counts that divide (``valid_tokens``, ``valid_sequences``) are those of the whole batch, over
  every rank and microbatch, so that losses, gradients and metrics of parts add up.
- Log-probabilities, entropies and divergences are in nats. Metrics carry no gradient.
- ``options`` is any object that has the options of the loss as attributes.
"""

from dense_losses.clipped_pg import clipped_pg
from dense_losses.distill import distill, distill_mean, teacher_topk_logprobs, topk_kl
from dense_losses.divergence import divergence
from dense_losses.filtering import filtered_token_entropy, filtered_token_logprobs, kept_tokens
from dense_losses.grpo import grpo
from dense_losses.heads import linear_logits, softcapped, token_entropy, token_logprobs
from dense_losses.nll import mean_entropy, nll, sequence_nll
from dense_losses.preference import dpo, preference
from dense_losses.regularisers import smoothed_nll, z_penalty
from dense_losses.sft_statistics import sft_statistics
from dense_losses.value import value_loss

__all__ = [
    "clipped_pg",
    "distill",
    "distill_mean",
    "divergence",
    "dpo",
    "filtered_token_entropy",
    "filtered_token_logprobs",
    "grpo",
    "kept_tokens",
    "linear_logits",
    "mean_entropy",
    "nll",
    "preference",
    "sequence_nll",
    "sft_statistics",
    "smoothed_nll",
    "softcapped",
    "teacher_topk_logprobs",
    "token_entropy",
    "token_logprobs",
    "topk_kl",
    "value_loss",
    "z_penalty",
]
