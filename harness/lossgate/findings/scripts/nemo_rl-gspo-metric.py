# SPDX-License-Identifier: Apache-2.0
"""With GSPO, sampling_importance_ratio is multiplied by the number of sequences of a call.

Cause: nemo_rl/algorithms/loss/loss_functions.py
    sample_importance_ratio = masked_mean(

It multiplies the weights, [B, 1], by the mask of sequences, [B], before it adds them up.
"""

import torch
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

B, S = 8, 5
logprobs, ones = torch.full((B, S + 1), -1.0), torch.ones(B, S + 1)
given = {"token_mask": ones, "sample_mask": torch.ones(B), "advantages": ones}
given |= {"prev_logprobs": logprobs, "generation_logprobs": logprobs, "reference_policy_logprobs": logprobs}
config = ClippedPGLossConfig(sequence_level_importance_ratios=True, token_level_loss=False)
_, metrics = ClippedPGLossFn(config)(logprobs[:, 1:], given, torch.tensor(float(B)), torch.tensor(float(B * S)))
ratio = metrics["sampling_importance_ratio"]
print(f"the policy has not moved, so the ratio is 1; the metric of {B} sequences says", ratio)
raise SystemExit(abs(ratio - 1) > 1e-3)
