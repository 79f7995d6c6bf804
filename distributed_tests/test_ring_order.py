# SPDX-License-Identifier: Apache-2.0
"""The simulated reduction order ``ring`` equals that of gloo on real processes, bit for bit."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_tests import gloo_sums
from distributed_tests.gloo_sums import DTYPES, RANKS, SIZES, part
from lossgate.worlds.simulated.reduction import reduce_tensors


def sums_by_gloo(folder: Path) -> dict[tuple[int, torch.dtype, int], Tensor]:
    """Returns them for each number of ranks, dtype and size."""
    command = [sys.executable, gloo_sums.__file__, str(folder / "store"), str(folder / "sums.pt")]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(max(RANKS))]
    assert [process.wait(timeout=120) for process in processes] == [0] * len(processes)
    return torch.load(folder / "sums.pt")


def test_ring_is_gloo_bit_for_bit(tmp_path: Path) -> None:
    """It is one test, so that the processes start once."""
    sums = sums_by_gloo(tmp_path)
    for ranks, dtype, size in product(RANKS, DTYPES, SIZES):
        simulated = reduce_tensors([part(rank, size, dtype) for rank in range(ranks)], dist.ReduceOp.SUM, "ring", 0)
        assert torch.equal(simulated, sums[ranks, dtype, size]), (ranks, dtype, size)
