# SPDX-License-Identifier: Apache-2.0
"""NaN at a masked token is dropped by "token-mean", and makes the loss NaN in "seq-mean-...".

Cause: verl/trainer/ppo/core_algos.py
    seq_losses = torch.sum(loss_mat * loss_mask, dim=-1)  # token-sum

NaN * 0 is NaN.
"""

import torch
from verl.trainer.ppo.core_algos import agg_loss

losses, mask = torch.tensor([[1.0, 2.0, float("nan")]]), torch.tensor([[1.0, 1.0, 0.0]])
modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
found = {mode: agg_loss(losses, mask, mode).item() for mode in modes}
print(*(f"{mode}: {loss}" for mode, loss in found.items()), sep="\n")
raise SystemExit(found["token-mean"] == 1.5 and found["seq-mean-token-sum"] != 3.0)
