# SPDX-License-Identifier: Apache-2.0
"""The loss of fused linear DPO is NaN if no chosen answer of a call is trained.

Cause: liger_kernel/chunked_loss/fused_linear_preference.py
    chosen_nll_loss = chosen_nll_loss / (full_target[: full_target.shape[0] // 2]

It divides even where no NLL is asked for.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOLoss

torch.manual_seed(0)
hidden, weight = torch.randn(4, 3, 8), torch.randn(16, 8, requires_grad=True)
labels = torch.randint(16, (4, 3))
labels[:2] = -100  # the chosen answers
loss, _ = LigerFusedLinearDPOLoss(use_ref_model=False, compiled=False)(weight, hidden, labels)
print("loss:", loss.item())
raise SystemExit(bool(loss.isnan()))
