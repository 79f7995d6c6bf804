# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch whose labels are all ignored is NaN: 0 / 0.

Cause: cut_cross_entropy/torch_compile.py
    loss = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction=reduction)

It is torch's mean.
"""

import torch
from cut_cross_entropy import linear_cross_entropy

loss = linear_cross_entropy(torch.zeros(4, 8), torch.zeros(16, 8), torch.full((4,), -100), impl="torch_compile")
print("loss:", loss.item())
raise SystemExit(bool(loss.isnan()))
