# SPDX-License-Identifier: Apache-2.0
"""Measures what the systems that these losses come from claim, against what they replaced.

    python benchmarks/originals.py                      all four claims, in about two minutes
    python benchmarks/originals.py dpo --length 10000   one of them, at another size

- ``packing`` (NeMo-RL): one call for a pack, against one for each sequence.
- ``dpo`` (NeMo-RL): hidden states, against dense logits, in the passes of reference and policy.
- ``cp`` (AReaL): SFT on each rank's own tokens, against logits gathered over four ranks.
- ``tiled`` (open-instruct): GRPO through a tiled lm-head, against open-instruct's algorithm and
  dense logits. These are the rows of ``benchmarks/tiled.py``.

Peers are written down here in plain PyTorch, from the descriptions of the originals. Ratios are
relative to the first row of a table. "Error of dW" is that of the gradient of the weight, relative
to the first row in float64: all rows compute the same.

Rows take turns. Times are medians of forward and backward, ratios are medians over turns. They are
processor times on one thread, or times of a GPU if there is one. MiB are those alive at the peak,
without inputs. On a CPU they are counted by tensors, so they are the same in every run.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

import tiled as heads
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fused_losses import (
    ClippedPGConfig,
    Pack,
    SFTStatistics,
    TokenLogprobs,
    clipped_pg_loss,
    dpo_loss,
    linear_logprobs,
    linear_sft_loss,
    vocab_parallel_logprobs,
)
from lossgate import Layout
from lossgate.observe import MemoryWatch
from lossgate.worlds import RankContext, SimulatedWorld

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CP, TP, MIB = 4, 2, 2**20

Group = dist.ProcessGroup | None
Figures = dict[str, dict[str, float]]
"""Numbers of a table by row and heading."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a pack of sequences of one length, and of the lm-head."""

    sequences: int
    length: int
    hidden: int
    vocab: int
    dtype: torch.dtype = torch.float32


class Batch:
    """The inputs of every loss on one rank: its tokens of the pack, and its rows of the weight."""

    def __init__(self, sizes: Sizes, cp_group: Group = None, tp_group: Group = None) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE, sizes.dtype)

        shape = sizes.sequences, sizes.length
        self.starts = torch.arange(sizes.sequences + 1, device=DEVICE) * sizes.length
        self.pack = Pack.of(self.starts, cp_group=cp_group)
        hidden = normal(sizes.sequences * sizes.length, sizes.hidden)
        self.hidden = self.pack.split(hidden).requires_grad_()
        self.reference = self.pack.split(hidden + normal(*hidden.shape) / 100)
        rows, rank = (sizes.vocab, 0) if tp_group is None else (sizes.vocab // tp_group.size(), tp_group.rank())
        weight = normal(sizes.vocab, sizes.hidden) / sizes.hidden**0.5
        self.head = nn.Linear(sizes.hidden, rows, bias=False, device="meta")
        self.head.weight = nn.Parameter(weight[rows * rank :][:rows].clone())
        self.ids = torch.randint(sizes.vocab, shape, generator=generator).to(DEVICE)
        policies = ("prev_logprobs", "generation_logprobs", "reference_logprobs")
        self.rows = {name: -normal(*shape).abs() for name in policies}
        self.rows |= {"advantages": normal(*shape), "mask": torch.ones(shape, dtype=torch.bool, device=DEVICE)}
        self.sample_mask = torch.ones(sizes.sequences, dtype=torch.bool, device=DEVICE)
        self.valid_tokens = sizes.sequences * (sizes.length - 1)
        self.shard: dict[str, Any] = {"tp_group": tp_group, "vocab_start": rows * rank}
        self.cp_group = cp_group

    def double(self) -> "Batch":
        """Returns the same numbers in float64."""
        other = copy(self)
        other.hidden, other.reference = self.hidden.detach().double().requires_grad_(), self.reference.double()
        other.head = deepcopy(self.head).double()
        other.rows = {name: x.double() if x.is_floating_point() else x for name, x in self.rows.items()}
        return other

    def of_tokens(self, name: str) -> Tensor:
        """Lays rows out like this rank's tokens."""
        return self.pack.from_rows(self.rows[name], shift=1)


Way = Callable[[Batch], Tensor]
"""Computes the loss of a batch."""


def dense_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes log-probabilities as most trainers do; those of labels below 0 mean nothing."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(dtype), 1).gather(1, labels.clamp(min=0)[:, None])[:, 0]


def step(way: Way, batch: Batch) -> None:
    """Runs forward and backward."""
    batch.hidden.grad = batch.head.weight.grad = None
    way(batch).backward()


def peak_mib(way: Way, batch: Batch) -> float:
    """Returns the MiB that live at the peak of a step, without its inputs."""
    batch.hidden.grad = batch.head.weight.grad = None
    if DEVICE == "cpu":
        with MemoryWatch() as made:
            step(way, batch)
        return made.peak_bytes / MIB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(way, batch)
    return (torch.cuda.max_memory_allocated() - before) / MIB


def seconds(way: Way, batch: Batch) -> float:
    """Returns the time of a step."""
    if DEVICE == "cpu":
        start = process_time()
        step(way, batch)
        return process_time() - start
    torch.cuda.synchronize()
    start = perf_counter()
    step(way, batch)
    torch.cuda.synchronize()
    return perf_counter() - start


def gradient(batch: Batch) -> Tensor:
    """Returns the gradient of the weight in the last step, in float64."""
    assert batch.head.weight.grad is not None
    return batch.head.weight.grad.double()


def exact_gradient(way: Way, batch: Batch) -> Tensor:
    """Computes the gradient of the weight in float64."""
    exact = batch.double()
    step(way, exact)
    return gradient(exact)


def error(gradient: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference, relative to what is expected."""
    return float((gradient - expected).norm() / expected.norm())


def compared(ways: Mapping[str, Way], batch: Batch, repeats: int) -> Figures:
    """Measures peaks, then times in turns."""
    expected = exact_gradient(next(iter(ways.values())), batch)
    mib, errors = list[float](), list[float]()
    for way in ways.values():
        mib.append(peak_mib(way, batch))
        errors.append(error(gradient(batch), expected))
    turns = [[seconds(way, batch) for way in ways.values()] for _ in range(repeats)]
    return {
        name: {
            "ms": 1000 * median(turn[i] for turn in turns),
            "time / first": median(turn[i] / turn[0] for turn in turns),
            "MiB": mib[i],
            "MiB / first": mib[i] / mib[0],
            "error of dW": errors[i],
        }
        for i, name in enumerate(ways)
    }


FirstStep = Callable[[Batch], tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]]
"""Returns a vector for each token, and what makes log-probabilities of vectors and labels."""


def _from_logits(batch: Batch) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    return batch.head(batch.hidden), lambda x, labels: vocab_parallel_logprobs(x, labels, **batch.shard).logprobs


def _from_hidden(batch: Batch) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    weight = batch.head.weight
    return batch.hidden, lambda x, labels: linear_logprobs(x, weight, labels, **batch.shard).logprobs


def _pg_loss(batch: Batch, logprobs: Tensor, of_tokens: dict[str, Tensor], **where: Tensor) -> Tensor:
    counts = {"valid_tokens": batch.valid_tokens, "valid_sequences": len(batch.sample_mask)}
    return clipped_pg_loss(logprobs, **of_tokens, **where, **counts, config=ClippedPGConfig())[0]


def _packed(batch: Batch, first_step: FirstStep) -> Tensor:
    x, logprobs_of = first_step(batch)
    pack = Pack.of(batch.starts)
    of_tokens = {name: pack.from_rows(rows, shift=1) for name, rows in batch.rows.items()}
    logprobs = logprobs_of(x, pack.labels(batch.ids))
    return _pg_loss(batch, logprobs, of_tokens, sequence=pack.sequence, sample_mask=batch.sample_mask)


def _split(x: Tensor, length: int) -> list[Tensor]:
    return list(x.split(length))


def _narrowed(x: Tensor, length: int) -> list[Tensor]:
    """Cuts as NeMo-RL does: backward makes a gradient of the whole for each sequence."""
    return [x.narrow(0, start, length) for start in range(0, len(x), length)]


def _one_at_a_time(batch: Batch, first_step: FirstStep, cut: Callable[[Tensor, int], list[Tensor]]) -> Tensor:
    """Calls kernel and loss for each sequence, as NeMo-RL's wrapper does without ``fuse_loss``."""
    x, logprobs_of = first_step(batch)
    loss = x.new_zeros(())
    for i, part in enumerate(cut(x, batch.ids.shape[1])):
        of_tokens = {name: rows[i, 1:] for name, rows in batch.rows.items()}
        logprobs, sequence = logprobs_of(part[:-1], batch.ids[i, 1:]), torch.zeros_like(batch.ids[i, 1:])
        loss = loss + _pg_loss(batch, logprobs, of_tokens, sequence=sequence, sample_mask=batch.sample_mask[i : i + 1])
    return loss


PACKING: dict[str, Way] = {
    "logits: the pack": partial(_packed, first_step=_from_logits),
    "logits: each sequence, cut as in NeMo-RL": partial(_one_at_a_time, first_step=_from_logits, cut=_narrowed),
    "logits: each sequence, cut by torch.split": partial(_one_at_a_time, first_step=_from_logits, cut=_split),
    "hidden states: the pack": partial(_packed, first_step=_from_hidden),
    "hidden states: each sequence": partial(_one_at_a_time, first_step=_from_hidden, cut=_split),
}


def packing(sizes: Sizes, repeats: int) -> Figures:
    """Compares one call for a pack with one for each sequence, also by collectives over tp=2."""
    figures = compared(PACKING, Batch(sizes), repeats)
    world = SimulatedWorld(Layout(tp=TP), device=DEVICE)
    for name, way in PACKING.items():
        world.run(lambda context, w=way: step(w, Batch(sizes, tp_group=context.mesh.get_group("tp"))))
        figures[name]["collectives, tp=2"] = sum(logged.rank == 0 for logged in world.log)
    world.close()
    return figures


def _dpo(batch: Batch, logprobs_of: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> Tensor:
    labels = batch.pack.labels(batch.ids)
    with torch.no_grad():
        reference = logprobs_of(batch.reference, batch.head, labels)
    return dpo_loss(
        logprobs_of(batch.hidden, batch.head, labels),
        reference,
        mask=batch.of_tokens("mask"),
        sequence=batch.pack.sequence,
        sample_mask=batch.sample_mask,
        valid_sequences=len(batch.sample_mask),
    )[0]


DPO: dict[str, Way] = {
    "from hidden states": partial(_dpo, logprobs_of=lambda x, head, y: linear_logprobs(x, head.weight, y).logprobs),
    "dense logits": partial(_dpo, logprobs_of=lambda x, head, y: dense_logprobs(head(x), y)),
}


def dpo(sizes: Sizes, repeats: int) -> Figures:
    """Compares DPO from hidden states with dense logits."""
    return compared(DPO, Batch(sizes), repeats)


def _sft(batch: Batch, logprobs: Tensor, pack: Pack, cp_group: Group) -> Tensor:
    """Computes AReaL's loss and statistics of single log-probabilities."""
    mask, found = pack.from_rows(batch.rows["mask"], shift=1), TokenLogprobs(logprobs, None, None, None)
    where: dict[str, Any] = {"mask": mask, "real": pack.real, "sequence": pack.sequence, "sequences": pack.sequences}
    SFTStatistics.of(found, **where, cp_group=cp_group)
    return -torch.where(mask, logprobs, 0.0).sum() / batch.valid_tokens


def _own_hidden_states(batch: Batch) -> Tensor:
    pack = batch.pack
    return linear_sft_loss(
        batch.hidden,
        batch.head.weight,
        pack.labels(batch.ids),
        mask=batch.of_tokens("mask"),
        real=pack.real,
        sequence=pack.sequence,
        sequences=pack.sequences,
        valid_tokens=batch.valid_tokens,
        entropy=False,
        logit_range=False,
        cp_group=batch.cp_group,
    )[0]


def _own_logits(batch: Batch) -> Tensor:
    logprobs = dense_logprobs(batch.head(batch.hidden), batch.pack.labels(batch.ids))
    return _sft(batch, logprobs, batch.pack, batch.cp_group)


def _gathered_logits(batch: Batch) -> Tensor:
    """Computes the whole loss on every rank. The gradient of its own logits is the rank's part."""
    whole = Pack.of(batch.starts)
    logits = batch.pack.gather(batch.head(batch.hidden), batch.cp_group)
    return _sft(batch, dense_logprobs(logits, whole.labels(batch.ids)), whole, None)


CONTEXT_PARALLEL: dict[str, Way] = {
    "own tokens, from hidden states": _own_hidden_states,
    "own tokens, logits (as AReaL)": _own_logits,
    "gathered logits": _gathered_logits,
}


def cp(sizes: Sizes, repeats: int) -> Figures:
    """Compares what ranks make and send in SFT; times of simulated ranks would mean nothing."""

    def on_rank(context: RankContext, way: Way) -> tuple[MemoryWatch, Tensor]:
        batch = Batch(sizes, cp_group=context.mesh.get_group("cp"))
        with MemoryWatch() as made:
            step(way, batch)
        return made, gradient(batch)

    def exact(context: RankContext) -> Tensor:
        return exact_gradient(_own_hidden_states, Batch(sizes, cp_group=context.mesh.get_group("cp")))

    world, figures = SimulatedWorld(Layout(cp=CP), device=DEVICE), Figures()
    expected = torch.stack(world.run(exact))
    for name, way in CONTEXT_PARALLEL.items():
        ranks = world.run(partial(on_rank, way=way))
        # Ranks hold the same; in a collective, the last one makes copies for the simulation.
        mib = min(made.peak_bytes for made, _ in ranks) / MIB
        first = figures[next(iter(figures))]["MiB"] if figures else mib
        figures[name] = {
            "MiB sent": sum(logged.bytes for logged in world.log if logged.rank == 0) / MIB,
            "largest tensor, MiB": max(made.largest_bytes for made, _ in ranks) / MIB,
            "MiB": mib,
            "MiB / first": mib / first,
            "error of dW": error(torch.stack([g for _, g in ranks]), expected),
        }
    world.close()
    return figures


def _through_head(batch: Batch, loss: Callable[[nn.Linear, heads.Batch], Tensor]) -> Tensor:
    names = ("mask", "advantages", "prev_logprobs", "reference_logprobs")
    labels = batch.pack.labels(batch.ids).clamp(min=0)
    return loss(batch.head, heads.Batch(batch.hidden, labels, *map(batch.of_tokens, names)))


TILED: dict[str, Way] = {name: partial(_through_head, loss=loss) for name, loss in heads.WAYS.items()}


def tiled(sizes: Sizes, repeats: int) -> Figures:
    """Compares GRPO through an lm-head with open-instruct's algorithm, as ``tiled.py`` does."""
    return compared(TILED, Batch(sizes), repeats)


CLAIMS: dict[str, tuple[Callable[[Sizes, int], Figures], Sizes]] = {
    "packing": (packing, Sizes(sequences=64, length=64, hidden=64, vocab=512)),
    "dpo": (dpo, Sizes(sequences=8, length=5000, hidden=128, vocab=5120)),
    "cp": (cp, Sizes(sequences=8, length=512, hidden=128, vocab=4096)),
    "tiled": (tiled, Sizes(sequences=8, length=256, hidden=512, vocab=16384)),
}
"""The claims, with sizes by default."""

FORMATS = {"ms": ".0f", "MiB": ".1f", "error of dW": ".1g", "collectives, tp=2": ".0f", "MiB sent": ".3g"}


def shown(heading: str, number: float) -> str:
    """Returns a number as tables show it."""
    return f"{number:{FORMATS.get(heading, '.2f')}}"


def table(title: str, figures: Figures) -> Table:
    """Returns the table of a claim."""
    whole, headings = Table(title=title, title_justify="left"), list(next(iter(figures.values())))
    whole.add_column("")
    for heading in headings:
        whole.add_column(heading, justify="right")
    for name, row in figures.items():
        whole.add_row(name, *(shown(heading, row[heading]) for heading in headings))
    return whole


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("claims", nargs="*", choices=("all", *CLAIMS), default="all", metavar="claim")
    for name in ("sequences", "length", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int, help="in place of the default of each claim")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="number of turns (default: 3)")
    given, console = parser.parse_args(), Console(width=160 if not sys.stdout.isatty() else None)
    torch.set_num_threads(1)
    asked = {name: getattr(given, name) for name in ("sequences", "length", "hidden", "vocab")}
    changed = {name: size for name, size in asked.items() if size is not None}
    for claim in CLAIMS if "all" in given.claims else given.claims:
        measure, defaults = CLAIMS[claim]
        sizes = replace(defaults, **changed, dtype=getattr(torch, given.dtype))
        at = f"{sizes.sequences} sequences of {sizes.length}, H={sizes.hidden}, V={sizes.vocab}, {given.dtype}"
        console.print(table(f"{claim}: {at}, {DEVICE}", measure(sizes, given.repeats)))


if __name__ == "__main__":
    main()
