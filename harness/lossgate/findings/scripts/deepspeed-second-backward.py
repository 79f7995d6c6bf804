# SPDX-License-Identifier: Apache-2.0
"""A second backward raises an error if the loss was multiplied: what was saved is written."""

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

torch.manual_seed(0)
head = torch.nn.Linear(8, 16, bias=False)
hidden, labels = torch.randn(1, 6, 8, requires_grad=True), torch.randint(16, (1, 6))


def loss_fn(head, x, y):
    return torch.nn.functional.cross_entropy(head(x).view(-1, 16), y.view(-1), reduction="sum")


loss = TiledFusedLogitsLoss.apply(loss_fn, head, hidden, labels, None, 2, [head.weight], "sum")
torch.autograd.grad(0.5 * loss, hidden, retain_graph=True)
try:
    torch.autograd.grad(0.5 * loss, hidden)
except RuntimeError as error:
    print("RuntimeError:", str(error).partition(";")[0])
    raise SystemExit(1) from None
