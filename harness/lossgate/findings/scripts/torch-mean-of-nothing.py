# SPDX-License-Identifier: Apache-2.0
"""The mean over no trained token is NaN, as in a microbatch of prompts."""

import torch

loss = torch.nn.functional.cross_entropy(torch.zeros(3, 5), torch.full((3,), -100))
print("loss:", loss.item())
raise SystemExit(bool(loss.isnan()))
