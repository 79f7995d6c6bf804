# SPDX-License-Identifier: Apache-2.0
"""Chunked DAPO without num_items_in_batch: ranks wait for each other if they have unequal batches.

Cause: liger_kernel/chunked_loss/fused_linear_ppo.py
    dist.all_reduce(normalizer, op=dist.ReduceOp.SUM)

It is called for each chunk, and a chunk is a sequence. TRL gives num_items_in_batch.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

RANKS, WAIT = 2, timedelta(seconds=5)


def rank_main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=WAIT)
    sequences = 1 + rank
    hidden, weight, mask = torch.randn(sequences, 2, 8), torch.randn(16, 8), torch.ones(sequences, 2)
    grpo = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
    grpo(hidden, weight, torch.full((sequences, 2), 3), mask, torch.ones(sequences))
    print(f"rank {rank}, {sequences} of 3 sequences: done", flush=True)
    dist.barrier()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(rank_main, (f"{folder}/ranks",), RANKS)
        except torch.multiprocessing.ProcessRaisedException as error:
            print("a rank:", str(error).strip().splitlines()[-1][:100])
            raise SystemExit(1) from None
