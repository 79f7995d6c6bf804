# SPDX-License-Identifier: Apache-2.0
"""The mean over no trained token is NaN, as in a microbatch of prompts.

Cause: torch/nn/functional.py
    return torch._C._nn.cross_entropy_loss(

The sum is divided in C++, whatever the count.
"""

import torch

loss = torch.nn.functional.cross_entropy(torch.zeros(3, 5), torch.full((3,), -100))
print("loss:", loss.item())
raise SystemExit(bool(loss.isnan()))
