# SPDX-License-Identifier: Apache-2.0
"""Under tensor parallelism, label smoothing is that of each rank's own part of the vocabulary.

Cause: megatron/core/tensor_parallel/cross_entropy.py
    vocab_size = exp_logits.size(-1)

That is the size of the part, and the mean over it is not reduced, so ranks return different losses.
Nothing in megatron-core itself asks for smoothing.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

RANKS, LOGITS, LABEL = 2, torch.tensor([[[2.0, 1.0, 0.0, -1.0, 3.0, 0.5, -2.0, 1.5]]]), torch.tensor([[4]])


def rank_main(rank, file, losses):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    own = LOGITS.chunk(RANKS, dim=-1)[rank].contiguous()
    losses[rank] = vocab_parallel_cross_entropy(own, LABEL, 0.1)[0, 0]
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    losses = torch.zeros(RANKS).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (f"{folder}/ranks", losses), RANKS)
    # Megatron spreads the smoothing over the other ids alone, and torch over all: so 8 / 7 of it.
    want = torch.nn.functional.cross_entropy(LOGITS[0], LABEL[0], label_smoothing=0.1 * 8 / 7)
    print(f"one rank: {want.item():.4f}")
    print(f"two ranks of tp: {losses[0].item():.4f} and {losses[1].item():.4f}")
    raise SystemExit(not torch.allclose(losses, want))
