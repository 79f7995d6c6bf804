# SPDX-License-Identifier: Apache-2.0
"""Sums on real gloo processes: ``python gloo_sums.py store out rank``, once for each of 4 ranks.

It imports torch alone, so that the processes start quickly.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

RANKS = (2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (1, 2, 5, 13, 33, 100, 777, 5000)


def part(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Returns what a rank adds."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size)).to(dtype)


def all_reduce_everything(rank: int, store: str, out: str) -> None:
    """Saves the sums of the first 2, 3 and 4 ranks."""
    torch.set_num_threads(1)
    ranks = max(RANKS)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    sums: dict[tuple[int, torch.dtype, int], Tensor] = {}
    for number in RANKS:
        group = dist.new_group(list(range(number)))
        for dtype in DTYPES if rank < number else ():
            for size in SIZES:
                sums[number, dtype, size] = part(rank, size, dtype)
                dist.all_reduce(sums[number, dtype, size], group=group)
    if rank == 0:
        torch.save(sums, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    store_file, out_file, own_rank = sys.argv[1:]
    all_reduce_everything(int(own_rank), store_file, out_file)
