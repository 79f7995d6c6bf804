# SPDX-License-Identifier: Apache-2.0
"""A second backward multiplies by an upstream gradient other than 1 again.

Cause: liger_kernel/ops/cross_entropy.py
    element_mul_kernel[(n_rows,)](

It multiplies what forward has kept in place.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.transformers.functional import liger_cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
leaf = torch.randn(4, 16, device=device, requires_grad=True)
loss = liger_cross_entropy(leaf * 1, torch.tensor([1, 2, 3, 4], device=device))
(first,) = torch.autograd.grad(loss * 0.5, leaf, retain_graph=True)
first = first.clone()
(second,) = torch.autograd.grad(loss * 0.5, leaf)
print("gradient of loss / 2, first and second time:", first[0, 0].item(), second[0, 0].item())
raise SystemExit(not torch.allclose(first, second))
