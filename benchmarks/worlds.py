# SPDX-License-Identifier: Apache-2.0
"""Measures what ranks cost in each world, in one run.

    python benchmarks/worlds.py

For 2, 4 and 8 ranks of tp: the time to start a world, the cases per second that it then runs, and
the time from a rank's death to the next result. A case is the loss and gradients of a small
example. Simulated ranks and the pool are compared with processes that are spawned for each case, as
distributed tests commonly do.
"""

import argparse
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from fused_losses import linear_cross_entropy
from lossgate import Layout
from lossgate.worlds import RankContext, World, make_world
from lossgate.worlds.base import RankFailure
from lossgate.worlds.pool import close_pool

TOKENS, WIDTH, VOCAB = 64, 48, 304


def example(rank: int, ranks: int) -> None:
    """Computes loss and gradients of one rank, on the default group."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    rows = VOCAB // ranks
    local = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    linear_cross_entropy(hidden, local, labels, vocab_start=rank * rows, tp_group=dist.group.WORLD).backward()


def on_rank(context: RankContext) -> None:
    example(context.rank, context.layout.ranks)


def dies(context: RankContext) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    on_rank(context)


def raises(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError
    on_rank(context)


def in_process(rank: int, ranks: int, store: str) -> None:
    """Runs the example on one process that was spawned for it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    example(rank, ranks)
    dist.destroy_process_group()


def spawn(ranks: int) -> None:
    with TemporaryDirectory() as folder:
        mp.spawn(in_process, (ranks, str(Path(folder) / "store")), nprocs=ranks)


def seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def recovery(world: World, fault: Callable[[RankContext], None]) -> float:
    """Returns the time from the report of a failed rank to the next result."""
    try:
        world.run(fault)
    except RankFailure:
        return seconds(lambda: world.run(on_rank))
    raise AssertionError("the rank did not fail")


def measure(kind: str, ranks: int, cases: int) -> tuple[float, float, float]:
    """Returns the time to start a world, and the medians for a case and for a recovery."""
    world = make_world(kind, Layout(tp=ranks))
    started = seconds(lambda: world.run(on_rank))
    case = median(seconds(lambda: world.run(on_rank)) for _ in range(cases))
    fault = raises if kind == "simulated" else dies
    recovered = median(recovery(world, fault) for _ in range(5))
    world.close()
    close_pool()
    return started, case, recovered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="cases in each world (default: 100)")
    parser.add_argument("--spawns", type=int, default=3, help="cases on spawned processes (default: 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make_world("gloo", Layout(tp=2)).run(on_rank)  # the server of processes loads torch, once in a run
    close_pool()
    table = Table("ranks", "world", "start", "cases/s", "beside spawned", "recovery")
    for ranks in (2, 4, 8):
        spawned = median(seconds(partial(spawn, ranks)) for _ in range(arguments.spawns))
        for kind in ("simulated", "gloo"):
            started, case, recovered = measure(kind, ranks, arguments.cases)
            cells = f"{started:.2f} s", f"{1 / case:.0f}", f"x{spawned / case:.0f}", f"{recovered:.3f} s"
            table.add_row(str(ranks), kind, *cells)
        table.add_row(str(ranks), "spawned for each", "", f"{1 / spawned:.2f}", "x1", "", end_section=True)
    Console().print(table)


if __name__ == "__main__":
    main()
