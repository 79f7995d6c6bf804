# SPDX-License-Identifier: Apache-2.0
"""Fused linear JSD, scaled: wrong gradients of hidden or weight if they lie column by column.

Cause: liger_kernel/ops/fused_linear_jsd.py
    element_mul_kernel[(n_rows,)](

Unlike the fused linear cross entropy, it passes no X_col_stride; nor does the call for the weight.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.transformers.functional import liger_fused_linear_jsd

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
hidden, teacher = torch.randn(6, 8, device=device), torch.randn(6, 8, device=device)
weight, labels = torch.randn(16, 8, device=device), torch.randint(16, (6,), device=device)


def gradient(given):
    leaf = given.detach().requires_grad_()
    own = weight.clone().requires_grad_()
    (2 * liger_fused_linear_jsd(leaf, own, teacher, weight.roll(1, 0), labels)).backward()
    return leaf.grad


want, got = gradient(hidden), gradient(hidden.T.contiguous().T)  # the same numbers, column by column
print("greatest |gradient| of 2 * loss, rows one after another:", want.abs().max().item())
print("greatest |gradient| of 2 * loss, columns one after another:", got.abs().max().item())
raise SystemExit(not torch.allclose(got, want, atol=1e-5))
