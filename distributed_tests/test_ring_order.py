# SPDX-License-Identifier: Apache-2.0
"""The simulated reduction order ``ring`` equals that of gloo on real processes, bit for bit."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.worlds.simulated.reduction import reduce_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (1, 2, 5, 13, 33, 100, 777, 5000)


def part(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size)).to(dtype)


def all_reduce_everything(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    sums = []
    for dtype in DTYPES:
        for size in SIZES:
            x = part(rank, size, dtype)
            dist.all_reduce(x)
            sums.append(x)
    if rank == 0:
        torch.save(sums, out)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_is_gloo_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "sums.pt"
    command = [sys.executable, __file__, str(ranks), str(tmp_path / "store"), str(out)]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(ranks)]
    assert [process.wait(timeout=120) for process in processes] == [0] * ranks
    real = iter(torch.load(out))
    for dtype in DTYPES:
        for size in SIZES:
            simulated = reduce_tensors([part(rank, size, dtype) for rank in range(ranks)], dist.ReduceOp.SUM, "ring", 0)
            assert torch.equal(simulated, next(real)), (dtype, size)


if __name__ == "__main__":
    world_size, store_file, out_file, own_rank = sys.argv[1:]
    all_reduce_everything(int(own_rank), int(world_size), store_file, out_file)
