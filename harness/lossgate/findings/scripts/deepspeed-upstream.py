# SPDX-License-Identifier: Apache-2.0
"""The tiled loss scales the gradient of hidden by the upstream gradient, and the weight's not.

Cause: deepspeed/runtime/sequence_parallel/ulysses_sp.py
    torch.autograd.backward(output, incoming_grad)

That is in forward, for an upstream gradient of 1. Backward multiplies the gradient of hidden alone.
"""

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

torch.manual_seed(0)
head = torch.nn.Linear(8, 16, bias=False)
hidden, labels = torch.randn(1, 6, 8, requires_grad=True), torch.randint(16, (1, 6))


def loss_fn(head, x, y):
    return torch.nn.functional.cross_entropy(head(x).view(-1, 16), y.view(-1), reduction="sum")


(0.25 * loss_fn(head, hidden, labels)).backward()
want, head.weight.grad = head.weight.grad, None
(0.25 * TiledFusedLogitsLoss.apply(loss_fn, head, hidden, labels, None, 2, [head.weight], "sum")).backward()
ratio = (head.weight.grad.norm() / want.norm()).item()
print("gradient of the weight for 0.25 * loss: got", ratio, "times what it should be")
raise SystemExit(abs(ratio - 1) > 1e-3)
