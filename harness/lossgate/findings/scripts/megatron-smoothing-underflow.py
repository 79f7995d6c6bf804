# SPDX-License-Identifier: Apache-2.0
"""Label smoothing is infinite where a probability underflows to 0.

Cause: megatron/core/tensor_parallel/cross_entropy.py
    log_probs = torch.log(exp_logits)

These are probabilities, which can be 0.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
logits, labels = torch.tensor([[[200.0, 0.0, 0.0, 0.0]]]), torch.tensor([[0]])
got = vocab_parallel_cross_entropy(logits.clone(), labels, 0.1).item()
# Megatron spreads the smoothing over the other ids alone; torch over all, so it gets 4 / 3 as much.
want = torch.nn.functional.cross_entropy(logits[0], labels[0], label_smoothing=0.1 * 4 / 3).item()
print(f"loss: got {got}, want {want:.2f}")
raise SystemExit(got == float("inf"))
