# SPDX-License-Identifier: Apache-2.0
"""The gradient of the logits is the logits themselves if their last stride is not 1.

Cause: liger_kernel/ops/cross_entropy.py
    HAS_GRADIENTS=_input.requires_grad,

It asks the contiguous copy, which requires no gradient inside of forward.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from liger_kernel.transformers.functional import liger_cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
logits = torch.randn(16, 4, device=device).T  # as of (weight @ hidden.T).T
labels = torch.tensor([1, 2, 3, 4], device=device)


def gradient(loss):
    leaf = logits.detach().clone().requires_grad_()  # which keeps the strides
    loss(leaf, labels).backward()
    return leaf.grad


got, want = gradient(liger_cross_entropy), gradient(torch.nn.functional.cross_entropy)
print("grad of logits, liger:", got[0, :3].tolist())
print("grad of logits, torch:", want[0, :3].tolist())
print("the logits themselves:", logits[0, :3].tolist())
raise SystemExit(not torch.allclose(got, want, atol=1e-5))
