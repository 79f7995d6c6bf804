# SPDX-License-Identifier: Apache-2.0
"""The weight gets no gradient if the hidden states need none.

Cause: liger_kernel/ops/fused_linear_cross_entropy.py
    input_requires_grad = _input.requires_grad if compute_gradients is None else compute_gradients

All gradients hang on that of the hidden states.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
hidden, labels = torch.randn(4, 8, device=device), torch.tensor([1, 2, 3, 4], device=device)
weight = torch.randn(16, 8, device=device, requires_grad=True)
liger_fused_linear_cross_entropy(hidden, weight, labels).backward()
print("gradient of the weight:", weight.grad)
raise SystemExit(weight.grad is None)
