# SPDX-License-Identifier: Apache-2.0
"""The policy loss of a batch without a trained token is NaN: 0 / 0.

Cause: openrlhf/models/utils.py
    return (tensor * mask).sum(dim=dim) / mask.sum(dim=dim)

The mask is all 0.
"""

import torch
from openrlhf.models.loss import PolicyLoss

nothing = torch.zeros(2, 3)
loss, *metrics = PolicyLoss()(nothing.clone().requires_grad_(), nothing, nothing, action_mask=nothing)
print("loss:", loss.item(), "; clip ratio:", metrics[0].item())
raise SystemExit(bool(loss.isnan()))
