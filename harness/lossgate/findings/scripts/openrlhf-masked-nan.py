# SPDX-License-Identifier: Apache-2.0
"""NaN at a masked token makes the policy loss NaN: it is multiplied by 0.

Cause: openrlhf/models/utils.py
    return (tensor * mask).sum(dim=dim) / mask.sum(dim=dim)

NaN * 0 is NaN.
"""

import torch
from openrlhf.models.loss import PolicyLoss

logprobs = torch.tensor([[-1.0, -2.0, float("nan")]])
others, mask = torch.tensor([[-1.0, -2.0, -1.0]]), torch.tensor([[1.0, 1.0, 0.0]])
loss, *_ = PolicyLoss()(logprobs, others, torch.ones(1, 3), action_mask=mask)
print("loss:", loss.item())
raise SystemExit(bool(loss.isnan()))
