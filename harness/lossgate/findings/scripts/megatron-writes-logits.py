# SPDX-License-Identifier: Apache-2.0
"""The cross entropy writes probabilities over its float32 logits.

Cause: megatron/core/tensor_parallel/cross_entropy.py
    vocab_parallel_logits -= logits_max.unsqueeze(dim=-1)

For float32, .float() before it makes no copy.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])
before = logits.clone()
vocab_parallel_cross_entropy(logits, torch.tensor([[0]]))
print("logits before:", before.flatten().tolist())
print("logits after: ", logits.flatten().tolist())
raise SystemExit(not torch.equal(before, logits))
