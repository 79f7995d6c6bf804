# SPDX-License-Identifier: Apache-2.0
"""Cross entropy writes gradients over its logits, so a second loss on them is wrong.

Cause: liger_kernel/ops/cross_entropy.py
    tl.store(X_ptr + X_offsets, X_block, mask=X_offsets < n_cols)

X_ptr points to the logits that the caller gave.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.transformers.functional import liger_cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
logits, labels = torch.randn(4, 16, device=device), torch.tensor([1, 2, 3, 4], device=device)
leaf = logits.clone().requires_grad_()
copy = leaf * 1
before = torch.nn.functional.cross_entropy(copy, labels)
liger_cross_entropy(copy, labels)
after = torch.nn.functional.cross_entropy(copy, labels)
print("cross entropy of the same logits before and after a call:", before.item(), after.item())
raise SystemExit(before.item() != after.item())
