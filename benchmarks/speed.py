# SPDX-License-Identifier: Apache-2.0
"""Measures what verification costs, as ratios of times taken in one run.

    python benchmarks/speed.py

1. Loss and gradients of a small example on the simulated ranks of tp=4, compared with the same
   example on four gloo processes that are spawned for it, as distributed tests commonly do.
2. Judging a problem, ensemble included, compared with running candidate and reference on it.
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

from fused_losses import linear_cross_entropy
from lossgate import Candidate, Layout, Problem
from lossgate.bank.cross_entropy import STYLES, make
from lossgate.cases.assemble import Assembled, assemble
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.oracle import Oracle
from lossgate.cases.reference import run_reference
from lossgate.cases.task import RankTask
from lossgate.declaration.loading import load_candidates
from lossgate.worlds import RankContext, SimulatedWorld

RANKS, TOKENS, WIDTH, VOCAB = 4, 64, 48, 304


def example(rank: int, group: dist.ProcessGroup | None) -> None:
    """Computes loss and gradients of one rank."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    rows = VOCAB // RANKS
    local = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    linear_cross_entropy(hidden, local, labels, vocab_start=rank * rows, tp_group=group).backward()


def in_process(rank: int, store: str) -> None:
    """Runs the example on one gloo process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    example(rank, dist.group.WORLD)
    dist.destroy_process_group()


def spawn() -> None:
    """Runs the example on processes that are spawned for it."""
    with TemporaryDirectory() as folder:
        mp.spawn(in_process, (str(Path(folder) / "store"),), nprocs=RANKS)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the median time of so many calls, after one to warm up."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)


def compare_worlds(spawns: int) -> None:
    """Prints what the example takes on simulated ranks and on spawned processes."""
    world = SimulatedWorld(Layout(tp=RANKS))

    def on_rank(context: RankContext) -> None:
        example(context.rank, context.mesh.get_group("tp"))

    simulated = seconds(lambda: world.run(on_rank), 100)
    world.close()
    spawned = seconds(spawn, spawns)
    print(
        f"tp=4 example: simulated {1e3 * simulated:.1f} ms, four gloo processes spawned {spawned:.2f} s: "
        f"1/{spawned / simulated:.0f}"
    )


def measure_judge(candidate: Candidate, dtype: str) -> None:
    """Prints what judging a candidate takes, and what running it and the reference takes."""
    problem = Problem(
        spec="nll", head="hidden", dtype=dtype, lengths=(TOKENS,), masks=("all",), hidden=WIDTH, vocab=301
    )
    bound, world = BoundProblem(candidate.spec, problem), SimulatedWorld(Layout())

    def run() -> Assembled:
        return assemble(world.run(RankTask(candidate, bound)), candidate, bound.batch.partition, problem.hidden)

    result = run()

    def judge() -> None:
        oracle = Oracle(candidate, bound, result.outputs)
        for output, tensor in result.outputs.items():
            oracle.compare(output, tensor, result.dtypes[output])

    ran, judged = seconds(run, 100), seconds(judge, 50)
    reference = seconds(lambda: run_reference(bound.batch, problem.head, bound.bound_spec), 100)
    world.close()
    print(
        f"judging {candidate.name} in {dtype}: candidate {1e3 * ran:.1f} ms, reference {1e3 * reference:.1f} ms, "
        f"judge {1e3 * judged:.1f} ms: {judged / (ran + reference):.1f} times both"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spawns", type=int, default=5, help="how often the gloo processes are spawned")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    compare_worlds(arguments.spawns)
    fused_losses = load_candidates(str(Path(__file__).parents[1] / "ci/candidates/ours.py"))[0]
    for dtype, styles in STYLES.items():
        for candidate in (fused_losses, make(styles[1])):
            measure_judge(candidate, dtype)


if __name__ == "__main__":
    main()
