# SPDX-License-Identifier: Apache-2.0
"""loss_parallel skips a collective on a rank without rows of the vocabulary.

Cause: torch/distributed/tensor/parallel/loss.py
    if x.numel() == 0:

This rank leaves out the all_reduce of the maximum.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

LOGITS, LABEL = torch.tensor([[1.0, 2.0, 0.5, 3.0, 1.5]]), torch.tensor([3])


def rank_main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    logits = distribute_tensor(LOGITS, init_device_mesh("cpu", (4,)), [Shard(1)])  # 2, 2, 1 and 0 ids
    with loss_parallel():
        loss = cross_entropy(logits, LABEL).item()
    print(f"rank {rank}: {loss:.4f}", flush=True)


if __name__ == "__main__":
    import tempfile

    print(f"one rank: {cross_entropy(LOGITS, LABEL).item():.4f}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(rank_main, (f"{folder}/ranks",), 4)
        except torch.multiprocessing.ProcessRaisedException as error:
            print("a rank:", str(error).strip().splitlines()[-1])
            raise SystemExit(1) from None
