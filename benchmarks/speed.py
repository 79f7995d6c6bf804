# SPDX-License-Identifier: Apache-2.0
"""What verification costs, as ratios of times taken in one run.

    python benchmarks/speed.py

1. A loss-and-gradient example on tp=4 simulated ranks, against the same example by spawning four gloo processes, as
   distributed tests commonly do.
2. Judging a problem, ensemble included, against running candidate and reference on it, at T=64, H=48, V=301.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from controls import STYLES, make

from fused_losses import linear_cross_entropy
from lossgate import Candidate, Layout, Problem
from lossgate.cases.execute import execute
from lossgate.cases.materialize import materialize
from lossgate.cases.reference import run_reference
from lossgate.declaration.loading import load_candidates
from lossgate.judge.comparison import Yardstick
from lossgate.worlds import RankContext, SimulatedWorld

RANKS, TOKENS, WIDTH, VOCAB = 4, 64, 48, 304


def example(rank: int, group: dist.ProcessGroup | None) -> None:
    """Loss and gradients of one rank."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    rows = VOCAB // RANKS
    local = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    linear_cross_entropy(hidden, local, labels, vocab_start=rank * rows, tp_group=group).backward()


def in_process(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    example(rank, dist.group.WORLD)
    dist.destroy_process_group()


def spawn() -> None:
    with TemporaryDirectory() as folder:
        mp.spawn(in_process, (str(Path(folder) / "store"),), nprocs=RANKS)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median of so many calls, after one to warm up."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)


def worlds(spawns: int) -> None:
    world = SimulatedWorld(Layout(tp=RANKS))

    def body(context: RankContext) -> None:
        example(context.rank, context.mesh.get_group("tp"))

    simulated = seconds(lambda: world.run(body), 100)
    world.close()
    spawned = seconds(spawn, spawns)
    print(
        f"tp=4 example: simulated {1e3 * simulated:.1f} ms, four gloo processes spawned {spawned:.2f} s: 1/{spawned / simulated:.0f}"
    )


def judging(candidate: Candidate, dtype: str) -> None:
    problem = Problem(
        spec="nll", head="hidden", dtype=dtype, lengths=(TOKENS,), masks=("all",), hidden=WIDTH, vocab=301
    )
    batch, world = materialize(problem), SimulatedWorld(Layout())
    result = execute(candidate, batch, world)
    run, reference = seconds(lambda: execute(candidate, batch, world), 100), seconds(lambda: run_reference(batch), 100)
    judged = seconds(lambda: Yardstick(candidate, batch, result.outputs).judge(result), 50)
    world.close()
    print(
        f"judging {candidate.name} in {dtype}: candidate {1e3 * run:.1f} ms, reference {1e3 * reference:.1f} ms, "
        f"judge {1e3 * judged:.1f} ms: {judged / (run + reference):.1f} times both"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spawns", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worlds(arguments.spawns)
    ours = load_candidates(str(Path(__file__).parents[1] / "ci/candidates/ours.py"))[0]
    for dtype, styles in STYLES.items():
        for candidate in (ours, make(styles[1])):
            judging(candidate, dtype)


if __name__ == "__main__":
    main()
