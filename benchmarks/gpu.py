# SPDX-License-Identifier: Apache-2.0
"""Checks every kernel of ``fused_losses`` on a GPU, records its memory, and measures its speed.

    python benchmarks/gpu.py [--tokens 8192 --hidden 4096 --vocab 131072] [--dtype bfloat16 float32]
        [--problems 8] [--snapshots memory_snapshots]

On a GPU for training it ends within five minutes:

1. Every candidate of ``ci/candidates/ours.py`` runs on random problems on the device, alone and on
   four simulated ranks that share it (cp=2,tp=2). lossgate compares losses, gradients and metrics
   with the dense references on the CPU in float64, within the judge's limits. Problems are drawn
   for 100 seconds at most, at least one for each kernel, dtype and layout.
2. ``MemorySnapshots`` records a step of linear cross-entropy, ours and dense. The files are for
   https://pytorch.org/memory_viz. The largest allocation is read from them, and in ours it must be
   smaller than the logits.
3. Forward and backward of linear cross-entropy are timed, beside dense, PyTorch's own, Liger and
   cut-cross-entropy: the fastest of the repeats, which end after 10 seconds. Memory is the device's
   at its peak beyond the inputs. A kernel that cannot run shows its error; after torch,
   ``pip install --no-deps liger-kernel cut-cross-entropy`` installs the peers.

It exits with 0 if all is right, 1 if something disagrees, and 2 if there is no CUDA device.
``--device cpu --small`` shows in seconds that the script itself works. It makes no snapshots, and
memory is that of the process.
"""

import argparse
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from fused import KERNELS as ON_ANY_DEVICE
from fused import Loss, forget_peak, peak_mib
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fused_losses import MemorySnapshots
from lossgate import Layout
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.engine.case_result import run_case
from lossgate.properties import PROPERTIES
from lossgate.worlds import World, make_world

ROOT = Path(__file__).parents[1]
SECONDS = 100
"""After these no more problems are drawn, once every kernel has had one."""
SECONDS_OF_REPEATS = 10
MIB = 2**20
Sizes = tuple[int, int, int]
RECORDED: tuple[Sizes, torch.dtype] = (16384, 1024, 32768), torch.bfloat16
"""Tokens, hidden and vocabulary of the snapshots; logits are larger than anything that ours has."""

# Every kernel beside its reference


def cells(small: bool) -> list[tuple[Candidate, str, str]]:
    """Returns every candidate, dtype and layout to check; if small, each candidate once."""
    layouts = ("single",) if small else ("single", "cp=2,tp=2")
    return [
        (candidate, dtype, layout)
        for candidate in load_candidates(str(ROOT / "ci/candidates/ours.py"))
        for dtype in (candidate.dtypes[:1] if small else candidate.dtypes)
        for layout in layouts
        if set(Layout.parse(layout).axes) <= set(candidate.axes)
    ]


def check(device: str, problems: int, small: bool, console: Console) -> bool:
    """Checks all cells, and prints a line for each candidate and what disagrees.

    Returns:
        Whether all agree.
    """
    started, counts, wrong = perf_counter(), dict[str, int](), dict[str, str]()
    worlds = dict[str, World]()
    drawn = [
        (candidate, dtype, layout, sample_problems(candidate, Layout.parse(layout), dtype, problems, seed=0))
        for candidate, dtype, layout in cells(small)
    ]
    for number in range(problems):
        for candidate, dtype, layout, of_cell in drawn:
            if number < len(of_cell) and (number == 0 or perf_counter() - started < SECONDS):
                world = worlds.setdefault(layout, make_world("simulated", Layout.parse(layout), device=device))
                result = run_case(Case(candidate, of_cell[number], world), PROPERTIES["agreement"])
                counts[candidate.name] = counts.get(candidate.name, 0) + 1
                if not result.agrees:
                    wrong.setdefault(candidate.name, "; ".join((f"{dtype} {layout}", *result.reasons)))
    for world in worlds.values():
        world.close()
    for name, count in counts.items():
        console.print(f"{'DISAGREE' if name in wrong else 'agree':8}  {name}, {count} problems", highlight=False)
        if name in wrong:
            console.print(f"          {wrong[name]}", highlight=False, markup=False)
    console.print(f"{len(counts)} kernels on {device}, {len(wrong)} wrong; {perf_counter() - started:.0f} s\n")
    return not wrong


# Snapshots of memory


@dataclass(frozen=True)
class Allocations:
    """What a snapshot says of the device's memory during the recording."""

    number: int
    largest: int
    """Bytes of the largest allocation."""
    peak: int
    """Bytes that were allocated at the peak, beyond those at the start."""

    @classmethod
    def of(cls, snapshot: Any) -> "Allocations":
        """Reads them from a snapshot, as ``torch.cuda.memory`` pickles it."""
        held, peak, sizes = 0, 0, list[int]()
        for event in (event for trace in snapshot["device_traces"] for event in trace):
            if event["action"] == "alloc":
                sizes.append(event["size"])
                held += event["size"]
                peak = max(peak, held)
            elif event["action"] == "free_completed":
                held -= event["size"]
        return cls(len(sizes), max(sizes, default=0), peak)


def record(device: str, directory: Path, console: Console) -> bool:
    """Records a step of ours and of the dense loss.

    Returns:
        Whether both left a file, and ours has no allocation as large as the logits.
    """
    (sizes, dtype), right = RECORDED, True
    logits = sizes[0] * sizes[2] * dtype.itemsize
    for name in ("ours", "dense"):
        given = inputs(sizes, dtype, device)
        KERNELS[name](*given).backward()  # A first call makes workspaces.
        given[0].grad = given[1].grad = None
        snapshots = MemorySnapshots(profile_steps=(), directory=directory)
        snapshots.start(f"cross_entropy_{name}")
        KERNELS[name](*given).backward()
        file = snapshots.stop()
        found = Allocations.of(pickle.loads(file.read_bytes())) if file else Allocations(0, 0, 0)
        right &= found.number > 0 and (name != "ours" or found.largest < logits)
        console.print(
            f"{file}: {found.number} allocations, the largest of {found.largest / MIB:.0f} MiB, "
            f"{found.peak / MIB:.0f} MiB at the peak; logits would have {logits / MIB:.0f}",
            highlight=False,
            soft_wrap=True,
        )
    console.print("snapshots are right\n" if right else "DISAGREE: a snapshot is empty, or ours has logits\n")
    return right


# Time and memory


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut

    return cut(hidden, weight, labels, impl="cce" if hidden.is_cuda else "torch_compile")


OURS = ("ours", "ours, through log-probabilities")
KERNELS: dict[str, Loss] = {
    **{name: ON_ANY_DEVICE[name] for name in (*OURS, "dense", "torch F.linear_cross_entropy, chunked")},
    "Liger": _liger,
    "cut-cross-entropy": _cut_cross_entropy,
}


def inputs(sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draws states ``[tokens, hidden]``, a weight ``[vocab, hidden]`` and labels ``[tokens]``."""
    tokens, hidden, vocab = sizes
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype)
    h, w = draw(tokens, hidden), draw(vocab, hidden) / hidden**0.5
    return h.requires_grad_(), w.requires_grad_(), torch.arange(tokens, device=device) * 7919 % vocab


@dataclass
class Peak:
    """The peak memory of a device, beyond what is held when this is made."""

    device: str

    def __post_init__(self) -> None:
        if self.device == "cpu":
            forget_peak()
            self._before = peak_mib()
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated() / MIB

    def mib(self) -> float:
        """Returns the peak until now."""
        found = peak_mib() if self.device == "cpu" else torch.cuda.max_memory_allocated() / MIB
        return found - self._before


def measure(kernel: Loss, sizes: Sizes, dtype: torch.dtype, device: str, repeats: int) -> tuple[float, float, float]:
    """Returns seconds of the fastest run, MiB at the peak, and the loss."""
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    h, w, y = inputs(sizes, dtype, device)
    kernel(h, w, y).backward()  # This compiles, and makes workspaces.
    h.grad = w.grad = None
    peak, taken, loss = Peak(device), list[float](), torch.zeros(())
    for _ in range(repeats):
        h.grad = w.grad = None
        wait()
        start = perf_counter()
        loss = kernel(h, w, y)
        loss.backward()
        wait()
        taken.append(perf_counter() - start)
        if sum(taken) > SECONDS_OF_REPEATS:
            break
    return min(taken), peak.mib(), float(loss.detach())


def rows(sizes: Sizes, dtype: torch.dtype, device: str, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yields the row of each kernel."""
    ours: tuple[float, float] | None = None
    for name, kernel in KERNELS.items():
        try:
            seconds, mib, loss = measure(kernel, sizes, dtype, device, repeats)
        except Exception as error:
            yield name, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:60]
            continue
        ours = ours or (seconds, max(mib, 1.0))
        ratios = f"{seconds / ours[0]:.2f}", f"{mib / ours[1]:.2f}"
        yield name, f"{1000 * seconds:.1f}", f"{mib:.0f}", *ratios, f"{loss:.5f}"


def compare(sizes: Sizes, dtype: torch.dtype, device: str, repeats: int, console: Console) -> bool:
    """Prints the table of one dtype.

    Returns:
        Whether our kernels ran.
    """
    size = f"T={sizes[0]}, H={sizes[1]}, V={sizes[2]}"
    title = f"{str(dtype).removeprefix('torch.')}, {size}, forward and backward on {device}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "ms", "MiB", "time / ours", "MiB / ours", "loss"):
        table.add_column(heading, justify="right" if heading else "left")
    found = [*rows(sizes, dtype, device, repeats)]
    for row in found:
        table.add_row(*row)
    console.print(table)
    return all(len(row) > 2 for row in found if row[0] in OURS)


def main() -> int:
    """Runs the command, and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="one problem for each kernel, and tiny sizes")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--problems", type=int, default=8, help="for each kernel, dtype and layout, if time allows")
    parser.add_argument("--repeats", type=int, default=5, help="number of runs, of which the fastest counts")
    parser.add_argument("--snapshots", type=Path, default=Path("memory_snapshots"), help="where the snapshots go")
    given, console = parser.parse_args(), Console(width=160 if not sys.stdout.isatty() else None)
    if given.device == "cuda" and not torch.cuda.is_available():
        console.print(
            f"no CUDA device: torch {torch.__version__} sees none, so nothing was checked; run this where there is "
            "one, or try the script with --device cpu --small",
            soft_wrap=True,
        )
        return 2
    sizes = (64, 16, 512) if given.small else (given.tokens, given.hidden, given.vocab)
    dtypes = [getattr(torch, name) for name in (given.dtype[:1] if given.small else given.dtype)]
    problems, repeats = (1, 1) if given.small else (given.problems, given.repeats)
    if given.device == "cuda":
        console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    right = check(given.device, problems, given.small, console)
    if given.device == "cuda":
        right &= record(given.device, given.snapshots, console)
    else:
        console.print("no snapshots: they are of CUDA's memory\n")
    for dtype in dtypes:
        right &= compare(sizes, dtype, given.device, repeats, console)
    console.print("all is right" if right else "something is wrong: see above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
