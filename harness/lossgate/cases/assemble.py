# SPDX-License-Identifier: Apache-2.0
"""From the ranks' local outputs back to whole tensors, as the candidate's contract says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isnan, prod

import torch
from torch import Tensor

from lossgate.base.layout import AXES, Axis
from lossgate.cases.rank_call import RankOutputs
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.contract import Placements
from lossgate.problems.partition import SHARDED_DIMS, Dims, Partition
from lossgate.problems.whole_sequences import Tokens, WholeSequences
from lossgate.specs.outputs import Output

KEEPS_THE_GRAPH = "A rank that has nothing to compute adds 0.0 * x.sum() to its loss"
"""What to do about a gradient that some ranks do not give."""


@dataclass(frozen=True)
class Assembled:
    """A candidate's whole outputs in float64, their original dtypes, and their faults in words.

    Padding is dropped: tokens are those of the sequences end to end.
    """

    outputs: Mapping[Output, Tensor]
    dtypes: Mapping[Output, torch.dtype]
    faults: Mapping[Output, tuple[str, ...]]


def assemble(ranks: Sequence[RankOutputs], candidate: Candidate, partition: Partition, hidden: int) -> Assembled:
    """Puts the outputs of all ranks together.

    Args:
        ranks: what each rank returned, by rank.
        candidate: whose contract says how.
        partition: how the problem was split.
        hidden: width of the hidden states.
    """
    outputs: dict[Output, Tensor] = {}
    dtypes: dict[Output, torch.dtype] = {}
    faults: dict[Output, tuple[str, ...]] = {}
    for output in dict.fromkeys(output for local in ranks for output in local):
        parts = [local.get(output) for local in ranks]
        if missing := [rank for rank, part in enumerate(parts) if part is None]:
            faults[output] = (_missing(output, missing),)
            continue
        present, unequal = [part for part in parts if part is not None], tuple[str, ...]()
        if candidate.returns_whole(output):
            present, unequal = _own_tokens(present, candidate.tokens, partition)
        padded, wrong = assemble_tensor(present, output.dims, candidate.placements(output), partition, hidden)
        outputs[output], leak = _without_padding(padded, output, partition)
        dtypes[output], wrong = present[0].dtype, (*unequal, *wrong, *leak)
        if wrong:
            faults[output] = wrong
    return Assembled(outputs, dtypes, faults)


def _own_tokens(parts: Sequence[Tensor], tokens: Tokens, partition: Partition) -> tuple[list[Tensor], tuple[str, ...]]:
    """Takes each rank's own tokens from whole sequences, which must be equal over cp."""
    packed = [WholeSequences.of(partition, tokens, rank).pack(part) for rank, part in enumerate(parts)]
    faults: list[str] = []
    for rank, part in enumerate(packed):
        leader = _leader(rank, ["cp"], partition)
        if not equal(part, packed[leader]):
            faults.append(_unequal(leader, rank, _distance(part, packed[leader])))
    return [partition.shard(part, ("token",), rank) for rank, part in enumerate(packed)], tuple(faults)


def _without_padding(padded: Tensor, output: Output, partition: Partition) -> tuple[Tensor, tuple[str, ...]]:
    """Drops padding tokens, whose gradient must be zero; returns what is wrong with it."""
    if "token" not in output.dims or partition.tokens == sum(partition.lengths):
        return padded, ()
    real, dim = partition.real_tokens, output.dims.index("token")
    leak = int((padded.index_fill(dim, real, 0.0) != 0).sum()) if output.kind == "gradient" else 0
    fault = f"{leak} entries of its padding tokens should be zero, and are not"
    return padded.index_select(dim, real), (fault,) if leak else ()


def _missing(output: Output, ranks: Sequence[int]) -> str:
    where = f"on rank {', '.join(map(str, ranks))}"
    if output.kind == "gradient":
        return f"backward did not reach it {where}; it is None there. {KEEPS_THE_GRAPH}"
    return f"it is missing {where}, and other ranks return it"


def assemble_tensor(
    parts: Sequence[Tensor], dims: Dims, placements: Placements, partition: Partition, hidden: int
) -> tuple[Tensor, tuple[str, ...]]:
    """Puts one part from each rank together.

    Along an axis that splits one of ``dims``, parts are laid side by side. Along another they are
    added, or they must be equal bit for bit. Padding rows of the vocabulary must be zero and are
    dropped. Of numbers the minimum or maximum may be taken.

    Returns:
        The whole tensor in float64, and what is wrong with its parts, in words.
    """
    if not dims:
        return _assemble_number(parts, placements, partition)
    sizes = {"token": partition.tokens, "vocab": partition.vocab, "hidden": hidden, "sequence": len(partition.lengths)}
    whole = torch.zeros([sizes[dim] for dim in dims], dtype=torch.float64)
    replicated: list[Axis] = [a for a in AXES if not set(SHARDED_DIMS[a]) & set(dims) and _replicated(placements, a)]
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
    """Does what ``assemble_tensor`` does for numbers, in far less time."""
    replicated: list[Axis] = [axis for axis in AXES if _replicated(placements, axis)]
    factor = _mean_factor(placements, partition)
    numbers, faults, own = [float(part) for part in parts], list[str](), list[float]()
    for rank, number in enumerate(numbers):
        leader = _leader(rank, replicated, partition)
        if leader == rank:
            own.append(number * factor)
        elif number != numbers[leader] and not (isnan(number) and isnan(numbers[leader])):
            faults.append(_unequal(leader, rank, abs(number - numbers[leader])))
    extremum = next((_EXTREMA[p] for p in placements.values() if p in _EXTREMA), None)
    whole = torch.tensor(own, dtype=torch.float64)
    return whole.sum() if extremum is None else reduce(extremum, whole.unbind()), tuple(faults)


def _mean_factor(placements: Placements, partition: Partition) -> float:
    return prod(1 / partition.layout.sizes[axis] for axis in AXES if placements.get(axis) == "avg")


def _unequal(leader: int, rank: int, difference: float) -> str:
    return f"ranks {leader} and {rank} should hold the same, and differ by up to {difference:.3g}"


_EXTREMA = {"min": torch.minimum, "max": torch.maximum}


def _replicated(placements: Placements, axis: Axis) -> bool:
    return placements.get(axis, "replicate") == "replicate"


def _add(whole: Tensor, local: Tensor, dims: Dims, partition: Partition, rank: int) -> list[str]:
    """Adds a rank's part to its place in the whole; returns what is wrong with its padding rows."""
    at, faults, target = partition.layout.coordinate(rank), list[str](), whole
    for dim, name in enumerate(dims):
        if name == "vocab":
            shard = partition.vocab_shards[at["tp"]]
            real = shard.end - shard.start
            if shard.padding and bool((local.narrow(dim, real, shard.padding) != 0).any()):
                faults.append(
                    f"rank {rank}: the {shard.padding} padding rows of its vocabulary should be zero, and are not"
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
    """Returns the first of the ranks that hold the same as ``rank``."""
    layout, at = partition.layout, dict(partition.layout.coordinate(rank))
    at.update(dict.fromkeys(replicated, 0))
    return (at["dp"] * layout.cp + at["cp"]) * layout.tp + at["tp"]


def equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors of one shape hold the same, NaN included."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
