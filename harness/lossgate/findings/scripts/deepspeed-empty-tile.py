# SPDX-License-Identifier: Apache-2.0
"""The mean over tiles is NaN if a tile has no label; for masks, its docstring recommends "sum".

Cause: deepspeed/runtime/sequence_parallel/ulysses_sp.py
    output = output_unsharded.mean()

The means of tiles are averaged.
"""

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

torch.manual_seed(0)
head = torch.nn.Linear(8, 16, bias=False)
hidden, labels = torch.randn(1, 6, 8, requires_grad=True), torch.randint(16, (1, 6))
labels[0, :3] = -100  # the first of two tiles


def loss_fn(head, x, y):
    return torch.nn.functional.cross_entropy(head(x).view(-1, 16), y.view(-1))


loss = TiledFusedLogitsLoss.apply(loss_fn, head, hidden, labels, None, 2, [head.weight], "mean")
print("loss: got", loss.item(), "want", loss_fn(head, hidden, labels).item())
raise SystemExit(bool(loss.isnan()))
