# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy adds gradients of the weight up over chunks in bfloat16.

Cause: torch/nn/modules/linear_cross_entropy.py
    grad_linear_weight.sub_(weight_grad_chunk)

The sum over chunks has the dtype of the weight.
"""

import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import cross_entropy, linear_cross_entropy

torch.manual_seed(0)
hidden, labels = torch.randn(2048, 64).bfloat16(), torch.randint(256, (2048,))
exact = torch.randn(256, 64).mul(0.1).bfloat16().double().requires_grad_()
cross_entropy(hidden.double() @ exact.T, labels, reduction="sum").backward()


def error(tokens_at_once):
    weight = exact.detach().bfloat16().requires_grad_()
    policy = "balanced" if torch.__version__ < "2.14" else "compact"  # its new name
    options = LinearCrossEntropyOptions(acc_policy=policy, acc_dtype=torch.float32, batch_chunk_size=tokens_at_once)
    linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options).backward()
    return ((weight.grad.double() - exact.grad).norm() / exact.grad.norm()).item()


few, many = error(2048), error(1)
print(f"error of the gradient: {few:.4f} in one chunk, {many:.4f} in chunks of one token")
raise SystemExit(many > 3 * few)
