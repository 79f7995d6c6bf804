# SPDX-License-Identifier: Apache-2.0
"""A second backward multiplies by an upstream gradient other than 1 again, in fused linear losses.

Cause: liger_kernel/ops/fused_linear_cross_entropy.py
    element_mul_kernel[(n_rows,)](

It multiplies what forward has kept in place.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
hidden, labels = torch.randn(4, 8, device=device, requires_grad=True), torch.tensor([1, 2, 3, 4], device=device)
weight = torch.randn(16, 8, device=device, requires_grad=True)
loss = 2 * liger_fused_linear_cross_entropy(hidden, weight, labels)
first = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
second = torch.autograd.grad(loss, weight)[0]
print("gradient of 2 * loss, second time / first time:", (second.norm() / first.norm()).item())
raise SystemExit(not torch.allclose(first, second))
