# SPDX-License-Identifier: Apache-2.0
"""With all labels ignored the loss is a constant 0, so a backward of it alone raises an error.

Cause: torchtune/modules/loss/kd_losses.py
    return torch.tensor(0.0, device=x.device)

This 0 hangs on no input.
"""

import torch
from torchtune.modules.loss import ForwardKLLoss

student, teacher = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5)
loss = ForwardKLLoss()(student, teacher, torch.tensor([-100, -100]))
try:
    loss.backward()
except RuntimeError as error:
    print("RuntimeError:", error)
    raise SystemExit(1) from None
