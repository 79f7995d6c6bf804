# SPDX-License-Identifier: Apache-2.0
"""Fused linear JSD and KL, scaled: wrong gradients of inputs that lie column by column.

Cause: liger_kernel/ops/fused_linear_jsd.py
    element_mul_kernel[(n_rows,)](

Unlike the fused linear cross entropy, it passes no X_col_stride; nor does the call for the weight,
nor do those of fused_linear_kl_div.py.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.transformers.functional import liger_fused_linear_jsd, liger_fused_linear_kl_div

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
hidden, teacher = torch.randn(6, 8, device=device), torch.randn(6, 8, device=device)
weight, labels = torch.randn(16, 8, device=device), torch.randint(16, (6,), device=device)
probabilities = (teacher @ weight.T).softmax(-1)


def gradient(given, loss):
    leaf = given.detach().requires_grad_()
    (2 * loss(leaf, weight.clone().requires_grad_())).backward()
    return leaf.grad


def shows(name, loss):
    by_row, by_column = gradient(hidden, loss), gradient(hidden.T.contiguous().T, loss)  # the same numbers
    print(f"greatest |gradient| of 2 * {name}, rows one after another: {by_row.abs().max().item():.4f}")
    print(f"greatest |gradient| of 2 * {name}, columns one after another: {by_column.abs().max().item():.4f}")
    return not torch.allclose(by_row, by_column, atol=1e-5)


shown = [
    shows("JSD", lambda leaf, own: liger_fused_linear_jsd(leaf, own, teacher, weight, labels)),
    shows("KL", lambda leaf, own: liger_fused_linear_kl_div(leaf, own, probabilities)),
]
raise SystemExit(any(shown))
