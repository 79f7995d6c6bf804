# SPDX-License-Identifier: Apache-2.0
"""loss_parallel loses the gradient of confident labels in bfloat16: 1 - 2^-9 rounds to 1.

Cause: torch/distributed/tensor/parallel/loss.py
    return (grad_input + torch.exp(x)) * grad_output

In bfloat16, exp(x) is 1 before 1 is subtracted.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
logits = torch.tensor([[7.0, 0.0, 0.0]], dtype=torch.bfloat16)
whole = distribute_tensor(logits, init_device_mesh("cpu", (1,)), [Shard(1)]).requires_grad_()
with loss_parallel():
    torch.nn.functional.cross_entropy(whole, torch.tensor([0])).backward()
got, want = whole.grad.full_tensor()[0, 0].item(), logits.double().softmax(-1)[0, 0].item() - 1
print(f"gradient at the label: got {got}, want {want:.5f}")
raise SystemExit(got == 0)
