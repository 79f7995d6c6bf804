# SPDX-License-Identifier: Apache-2.0
"""The blocks in which errors of an output come: tokens, sequences, ranks; rows, tiles and shards of
the vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lossgate.judge.statistics import Blocks
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Dim
from lossgate.specs.outputs import Output

TILE = 32
"""Rows of a vocabulary tile, unless the candidate declares its own."""


def blocks_of(
    output: Output, batch: GlobalBatch, tiles: Mapping[str, tuple[int, ...]], compared: Tensor | None = None
) -> list[Blocks]:
    """Returns every way to cut an output into blocks.

    Args:
        output: the output.
        batch: the whole batch.
        tiles: the candidate's tile sizes, by dim.
        compared: which slices along the first dim are compared; None for all.
    """
    found: list[Blocks] = []
    for dim, name in enumerate(output.dims):
        for block, every_index in _cuts(name, batch, tiles).items():
            index = every_index if compared is None else every_index[compared]
            count = int(index.max()) + 1 if len(index) else 0
            if count > 1:  # a single block is the whole, which SCALE looks at
                found.append(Blocks(block, dim, index, count))
    return found


def _cuts(dim: Dim, batch: GlobalBatch, tiles: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    if dim == "token":
        return _token_cuts(batch)
    if dim == "sequence":
        return _sequence_cuts(batch)
    return _vocab_cuts(batch, tiles) if dim == "vocab" else {}


def _token_cuts(batch: GlobalBatch) -> dict[str, Tensor]:
    partition = batch.partition
    owner = torch.zeros(partition.tokens, dtype=torch.long)
    for i, tokens in enumerate(partition.token_shards.values()):
        owner[tokens] = i
    return {"token": torch.arange(partition.tokens), "sequence": partition.sequence_of_token, "token shard": owner}


def _sequence_cuts(batch: GlobalBatch) -> dict[str, Tensor]:
    partition = batch.partition
    sizes = torch.tensor([len(partition.sequences(rank)) for rank in range(partition.layout.dp)])
    shards = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return {"sequence": torch.arange(len(partition.lengths)), "sequence shard": shards}


def _vocab_cuts(batch: GlobalBatch, tiles: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    rows = torch.arange(batch.partition.vocab)
    sizes = torch.tensor([shard.end - shard.start for shard in batch.partition.vocab_shards])
    shards = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return {"vocab row": rows, "vocab tile": rows // tiles.get("vocab", (TILE,))[0], "vocab shard": shards}
