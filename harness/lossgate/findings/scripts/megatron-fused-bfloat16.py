# SPDX-License-Identifier: Apache-2.0
"""The fused cross entropy gives the gradient of float32 logits in bfloat16.

Cause: megatron/core/fusions/fused_cross_entropy.py
    grad_input = grad_input.to(torch.bfloat16)

It rounds whatever the dtype of the logits is.
"""

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
logits, labels = torch.randn(5, 1, 32), torch.randint(32, (5, 1))
given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
fused_vocab_parallel_cross_entropy(given * 1, labels, dist.group.WORLD).sum().backward()
torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum").backward()
error = ((given.grad - exact.grad).norm() / exact.grad.norm()).item()
print(f"relative error of the gradient of float32 logits: {error:.1e}")
raise SystemExit(error > 1e-4)
