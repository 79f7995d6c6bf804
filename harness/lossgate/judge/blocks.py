# SPDX-License-Identifier: Apache-2.0
"""Cuts outputs into the blocks in which errors come: tokens, sequences and their shards; rows,
tiles and shards of the vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lossgate.judge.statistics import Blocks
from lossgate.problems.partition import Dim, Partition
from lossgate.specs.outputs import Output

TILE = 32
"""Rows of a vocabulary tile, unless the candidate declares its own."""


def blocks_of(
    output: Output, partition: Partition, tiles: Mapping[str, tuple[int, ...]], compared: Tensor | None = None
) -> list[Blocks]:
    """Returns every way to cut an output into blocks.

    Args:
        output: the output, without padding.
        partition: how a layout splits it.
        tiles: the candidate's tile sizes, by dim.
        compared: the slices along the first dim that are compared; None for all.
    """
    found: list[Blocks] = []
    for dim, name in enumerate(output.dims):
        for block, block_of_slice in _cuts(name, partition, tiles).items():
            index = block_of_slice if compared is None else block_of_slice[compared]
            count = int(index.max()) + 1 if len(index) else 0
            if count > 1:  # a single block is the whole, which SCALE looks at
                found.append(Blocks(block, dim, index, count))
    return found


def _cuts(dim: Dim, partition: Partition, tiles: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Returns the number of each slice's block along a dim, by the name of the block."""
    if dim == "token":
        return _token_cuts(partition)
    if dim == "sequence":
        return _sequence_cuts(partition)
    if dim == "vocab":
        return _vocab_cuts(partition, tiles)
    return {}


def _token_cuts(partition: Partition) -> dict[str, Tensor]:
    sequence = torch.repeat_interleave(torch.arange(len(partition.lengths)), torch.tensor(partition.lengths))
    owner = torch.zeros(len(sequence), dtype=torch.long)
    for rank, tokens in enumerate(partition.real_token_shards):
        owner[tokens] = rank
    return {"token": torch.arange(len(sequence)), "sequence": sequence, "token shard": owner}


def _sequence_cuts(partition: Partition) -> dict[str, Tensor]:
    sizes = torch.tensor([len(partition.sequences(rank)) for rank in range(partition.layout.dp)])
    shards = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return {"sequence": torch.arange(len(partition.lengths)), "sequence shard": shards}


def _vocab_cuts(partition: Partition, tiles: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    rows = torch.arange(partition.vocab)
    sizes = torch.tensor([shard.end - shard.start for shard in partition.vocab_shards])
    shards = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return {"vocab row": rows, "vocab tile": rows // tiles.get("vocab", (TILE,))[0], "vocab shard": shards}
