# SPDX-License-Identifier: Apache-2.0
"""Without batch_num_tokens, the loss of a batch without a trained token is NaN: 0 / 0.

Cause: verl/trainer/ppo/core_algos.py
    loss = verl_F.masked_sum(loss_mat, loss_mask) / batch_num_tokens * dp_size

The number of tokens is that of the mask.
"""

import torch
from verl.trainer.ppo.core_algos import agg_loss

loss = agg_loss(torch.zeros(2, 3), torch.zeros(2, 3), "token-mean")
print("loss:", loss.item())
raise SystemExit(bool(loss.isnan()))
