# SPDX-License-Identifier: Apache-2.0
"""IcePop raises an error if it rejects every token of a call: a metric divides by 0.

Cause: verl/trainer/ppo/rollout_corr_helper.py
    1.0 / verl_F.masked_mean(is_weights_normalized.square(), response_mask).item()

All weights are 0 then, and so is what the effective sample size divides by.
"""

import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

log_ratio, mask = torch.full((2, 3), 1.0), torch.ones(2, 3)  # e times as likely as when they were sampled
try:
    compute_rollout_correction_weights(log_ratio, mask, rollout_is="token", rollout_is_threshold="0.5_2.0")
except ZeroDivisionError as error:
    print("six tokens with a weight of 2.7, for a range of 0.5 to 2:", error)
    raise SystemExit(1) from None
