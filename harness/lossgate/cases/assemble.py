# SPDX-License-Identifier: Apache-2.0
"""Puts the ranks' local outputs together to whole tensors, as the candidate's contract says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isnan, prod

import torch
from torch import Tensor

from lossgate.base.layout import AXES, Axis
from lossgate.cases.own_counts import LEFT_OUT, Weights
from lossgate.cases.rank_call import RankOutputs
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.contract import Placements
from lossgate.problems.partition import SHARDED_DIMS, Dims, Partition
from lossgate.problems.whole_sequences import Tokens, WholeSequences
from lossgate.specs.outputs import Output


@dataclass(frozen=True)
class Assembled:
    """A candidate's whole outputs in float64, their original dtypes, and their faults in words.

    Outputs of tokens hold those of the sequences end to end, without padding.
    """

    outputs: Mapping[Output, Tensor]
    dtypes: Mapping[Output, torch.dtype]
    faults: Mapping[Output, tuple[str, ...]]


def assemble(
    ranks: Sequence[RankOutputs],
    candidate: Candidate,
    partition: Partition,
    hidden: int,
    weights: Weights | None = None,
) -> Assembled:
    """Puts the outputs of all ranks together.

    Args:
        ranks: the outputs of each rank.
        candidate: the kernel, whose contract says how to put parts together.
        partition: how the problem was split.
        hidden: width of the hidden states.
        weights: the factors by which the caller multiplies what each rank returns; by default none.
    """
    outputs: dict[Output, Tensor] = {}
    dtypes: dict[Output, torch.dtype] = {}
    faults: dict[Output, tuple[str, ...]] = {}
    for output in dict.fromkeys(output for local in ranks for output in local):
        parts = [part for local in ranks if (part := local.get(output)) is not None]
        if len(parts) < len(ranks):
            missing = [rank for rank, local in enumerate(ranks) if local.get(output) is None]
            faults[output] = (_missing(output, missing),)
            continue
        dtypes[output] = parts[0].dtype
        if weights and output in weights:
            parts = [_weighed(part, weight) for part, weight in zip(parts, weights[output], strict=True)]
        unequal: tuple[str, ...] = ()
        if candidate.returns_whole(output):
            parts, unequal = _own_tokens(parts, candidate.tokens, partition)
        padded, wrong = assemble_tensor(parts, output.dims, candidate.placements(output), partition, hidden)
        outputs[output], leaks = _without_padding(padded, output, partition)
        if found := (*unequal, *wrong, *leaks):
            faults[output] = found
    return Assembled(outputs, dtypes, faults)


def _weighed(part: Tensor, weight: float) -> Tensor:
    """Multiplies what a rank returns. What is left out may be NaN."""
    return torch.zeros_like(part, dtype=torch.float64) if weight == LEFT_OUT else part.double() * weight


def _own_tokens(parts: Sequence[Tensor], tokens: Tokens, partition: Partition) -> tuple[list[Tensor], tuple[str, ...]]:
    """Takes each rank's own tokens from its whole sequences.

    Returns:
        The tokens of each rank, and a fault for each rank whose whole sequences differ from those
        of the first cp rank.
    """
    packed = [WholeSequences.of(partition, tokens, rank).pack(part) for rank, part in enumerate(parts)]
    faults: list[str] = []
    for rank, part in enumerate(packed):
        leader = _leader(rank, ["cp"], partition)
        if not equal(part, packed[leader]):
            faults.append(_unequal(leader, rank, _distance(part, packed[leader])))
    return [partition.shard(part, ("token",), rank) for rank, part in enumerate(packed)], tuple(faults)


def _without_padding(padded: Tensor, output: Output, partition: Partition) -> tuple[Tensor, tuple[str, ...]]:
    """Drops padding tokens. Returns a fault if their gradient is not zero."""
    if "token" not in output.dims or partition.tokens == sum(partition.lengths):
        return padded, ()
    real, dim = partition.real_tokens, output.dims.index("token")
    without = padded.index_select(dim, real)
    leaks = int((padded.index_fill(dim, real, 0.0) != 0).sum()) if output.kind == "gradient" else 0
    if not leaks:
        return without, ()
    return without, (f"{leaks} entries of its padding tokens should be zero, but are not",)


def _missing(output: Output, ranks: Sequence[int]) -> str:
    where = f"on rank {', '.join(map(str, ranks))}"
    if output.kind == "gradient":
        return f"backward did not reach it {where}; it is None there"
    return f"it is missing {where}, but other ranks return it"


def assemble_tensor(
    parts: Sequence[Tensor], dims: Dims, placements: Placements, partition: Partition, hidden: int
) -> tuple[Tensor, tuple[str, ...]]:
    """Puts one part from each rank together.

    If an axis splits one of ``dims``, its parts are laid side by side. Otherwise ``placements``
    says whether they are added up, averaged, or must be equal bit for bit. Numbers may also be
    reduced to their minimum or maximum. Padding rows of the vocabulary must be zero, and are
    dropped.

    Returns:
        The whole tensor in float64, and the faults of its parts in words.
    """
    if not dims:
        return _assemble_number(parts, placements, partition)
    sizes = {"token": partition.tokens, "vocab": partition.vocab, "hidden": hidden, "sequence": len(partition.lengths)}
    whole = torch.zeros([sizes[dim] for dim in dims], dtype=torch.float64)
    not_splitting: list[Axis] = [axis for axis in AXES if not set(SHARDED_DIMS[axis]) & set(dims)]
    replicated: list[Axis] = [axis for axis in not_splitting if _replicated(placements, axis)]
    factor, faults = _mean_factor(placements, partition), list[str]()
    for rank, part in enumerate(parts):
        leader = _leader(rank, replicated, partition)
        if leader != rank:
            if not equal(part, parts[leader]):
                faults.append(_unequal(leader, rank, _distance(part, parts[leader])))
            continue
        faults += _add(whole, part.detach().double() * factor, dims, partition, rank)
    return whole, tuple(faults)


def _assemble_number(
    parts: Sequence[Tensor], placements: Placements, partition: Partition
) -> tuple[Tensor, tuple[str, ...]]:
    """Puts numbers together as ``assemble_tensor`` does tensors, in far less time."""
    replicated: list[Axis] = [axis for axis in AXES if _replicated(placements, axis)]
    factor = _mean_factor(placements, partition)
    numbers = [float(part) for part in parts]
    summands: list[float] = []
    faults: list[str] = []
    for rank, number in enumerate(numbers):
        leader = _leader(rank, replicated, partition)
        if leader == rank:
            summands.append(number * factor)
        elif number != numbers[leader] and not (isnan(number) and isnan(numbers[leader])):
            faults.append(_unequal(leader, rank, abs(number - numbers[leader])))
    whole = torch.tensor(summands, dtype=torch.float64)
    for placement in placements.values():
        if placement in _EXTREMA:
            return reduce(_EXTREMA[placement], whole.unbind()), tuple(faults)
    return whole.sum(), tuple(faults)


def _mean_factor(placements: Placements, partition: Partition) -> float:
    """Returns the factor that makes a sum over ranks a mean over the axes that average."""
    return prod(1 / partition.layout.sizes[axis] for axis in AXES if placements.get(axis) == "avg")


def _unequal(leader: int, rank: int, difference: float) -> str:
    return f"ranks {leader} and {rank} should hold the same, but differ by up to {difference:.3g}"


_EXTREMA = {"min": torch.minimum, "max": torch.maximum}


def _replicated(placements: Placements, axis: Axis) -> bool:
    return placements.get(axis, "replicate") == "replicate"


def _add(whole: Tensor, local: Tensor, dims: Dims, partition: Partition, rank: int) -> list[str]:
    """Adds a rank's part to its place in the whole. Returns the faults of its padding rows."""
    at, faults, target = partition.layout.coordinate(rank), list[str](), whole
    for dim, name in enumerate(dims):
        if name == "vocab":
            shard = partition.vocab_shards[at["tp"]]
            real = shard.end - shard.start
            if shard.padding and bool((local.narrow(dim, real, shard.padding) != 0).any()):
                faults.append(
                    f"rank {rank}: the {shard.padding} padding rows of its vocabulary should be zero, but are not"
                )
            target, local = target.narrow(dim, shard.start, real), local.narrow(dim, 0, real)
    if "sequence" in dims:
        own = partition.sequences(at["dp"])
        target.narrow(dims.index("sequence"), own.start, len(own)).add_(local)
    elif "token" in dims:
        target.index_add_(dims.index("token"), partition.token_shards[at["dp"], at["cp"]], local)
    else:
        target += local
    return faults


def _leader(rank: int, replicated: Sequence[Axis], partition: Partition) -> int:
    """Returns the first rank that holds the same part as ``rank``."""
    layout, at = partition.layout, dict(partition.layout.coordinate(rank))
    at.update(dict.fromkeys(replicated, 0))
    return (at["dp"] * layout.cp + at["cp"]) * layout.tp + at["tp"]


def equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors of one shape have equal entries. NaN equals NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
