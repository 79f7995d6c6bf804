# SPDX-License-Identifier: Apache-2.0
"""From the ranks' local results back to the whole tensor, as the candidate's contract says."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.declaration.contract import Placements
from lossgate.layout import AXES, Axis
from lossgate.problems.partition import SHARDED_DIMS, Dims, Partition


@dataclass(frozen=True)
class Assembled:
    """The whole tensor in float64, and what is wrong with its parts, in words."""

    tensor: Tensor
    faults: tuple[str, ...]


def assemble(
    parts: Sequence[Tensor], dims: Dims, placements: Placements, partition: Partition, hidden: int
) -> Assembled:
    """Put one part from each rank together.

    Along an axis that splits one of ``dims`` parts are laid side by side; along another they are added, their minimum or
    maximum is taken, or they must be equal bit for bit. Padding rows of the vocabulary must be zero and are dropped.
    """
    sizes = {"token": partition.tokens, "vocab": partition.vocab, "hidden": hidden, "sequence": len(partition.lengths)}
    whole = torch.zeros([sizes[dim] for dim in dims], dtype=torch.float64)
    replicated: list[Axis] = [
        a for a in AXES if not set(SHARDED_DIMS[a]) & set(dims) and placements.get(a, "replicate") == "replicate"
    ]
    averaged: list[Axis] = [a for a in AXES if placements.get(a) == "avg"]
    factor = 1.0
    for axis in averaged:
        factor /= partition.layout.sizes[axis]
    faults: list[str] = []
    extremum = next(
        (torch.minimum if p == "min" else torch.maximum for p in placements.values() if p in ("min", "max")), None
    )
    for rank, part in enumerate(parts):
        leader = _leader(rank, replicated, partition)
        if leader != rank:
            if not _equal(part, parts[leader]):
                faults.append(
                    f"ranks {leader} and {rank} should hold the same, and differ by up to {_distance(part, parts[leader]):.3g}"
                )
            continue
        at = partition.layout.coordinate(rank)
        target, local = whole, part.detach().double() * factor
        for dim, name in enumerate(dims):
            if name == "vocab":
                shard = partition.vocab_shards[at["tp"]]
                real = shard.end - shard.start
                if shard.padding and bool((local.narrow(dim, real, shard.padding) != 0).any()):
                    faults.append(
                        f"rank {rank}: the {shard.padding} padding rows of its vocabulary should be zero, and are not"
                    )
                target, local = target.narrow(dim, shard.start, real), local.narrow(dim, 0, real)
        if extremum is not None:
            whole = extremum(whole, local) if rank else local
        elif "sequence" in dims:
            own = partition.sequences(at["dp"])
            target.narrow(dims.index("sequence"), own.start, len(own)).add_(local)
        elif "token" in dims:
            target.index_add_(dims.index("token"), partition.token_shards[at["dp"], at["cp"]], local)
        else:
            target += local
    return Assembled(whole, tuple(faults))


def _leader(rank: int, replicated: Sequence[Axis], partition: Partition) -> int:
    """The first of the ranks that hold the same as ``rank``."""
    layout, at = partition.layout, dict(partition.layout.coordinate(rank))
    at.update(dict.fromkeys(replicated, 0))
    return (at["dp"] * layout.cp + at["cp"]) * layout.tp + at["tp"]


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
