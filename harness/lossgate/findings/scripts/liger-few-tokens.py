# SPDX-License-Identifier: Apache-2.0
"""Chunked DAPO, CISPO and VESPO: the loss is too small if a batch trains fewer tokens than ranks.

Cause: liger_kernel/chunked_loss/fused_linear_ppo.py
    return torch.clamp(normalizer, min=1.0)

The count is divided by the number of ranks before it is bounded; TRL bounds it before. The Triton
kernel has the same line, in ops/grpo_loss.py.
"""

import torch
import torch.distributed as dist
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

RANKS = 4


def loss(trained):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 2, 8, generator=generator), torch.randn(16, 8, generator=generator)
    grpo = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
    mask, ids, advantages = torch.tensor([[trained, 0]]), torch.tensor([[3, 5]]), torch.tensor([2.0])
    return grpo(hidden, weight, ids, mask, advantages, num_items_in_batch=torch.tensor(1))[0].detach()


def rank_main(rank, file, means):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    total = loss(trained=int(rank == 0))  # the only trained token of the batch
    dist.all_reduce(total)
    means[rank] = total / RANKS  # as DDP averages
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    means = torch.zeros(RANKS).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (f"{folder}/ranks", means), RANKS)
    print(f"one rank: {loss(trained=1).item():.4f}")
    print(f"mean over {RANKS} ranks: {means[0].item():.4f}")
    raise SystemExit(not torch.allclose(means[0], loss(trained=1)))
