# SPDX-License-Identifier: Apache-2.0
"""The parts in which errors of an output come: tokens, sequences, ranks; rows, tiles and shards of the vocabulary."""

import torch
from torch import Tensor

from lossgate.declaration.candidate import Candidate
from lossgate.judge.statistics import Grouping
from lossgate.problems.batch import Batch
from lossgate.problems.partition import Dim
from lossgate.specs.outputs import output_dims

TILE = 32
"""Rows of a vocabulary tile, unless the candidate names its own."""


def groupings_of(output: str, batch: Batch, candidate: Candidate, keep: Tensor | None = None) -> list[Grouping]:
    """Of an output of a candidate; ``keep`` says which of its slices along the first dim are compared."""
    found: list[Grouping] = []
    for dim, name in enumerate(output_dims(output, candidate.head)):
        parts = _parts(name, batch, candidate)
        for part, index in parts.items():
            index = index if keep is None else index[keep]
            count = int(index.max()) + 1 if len(index) else 0
            if count > 1:  # one part is the whole, which SCALE looks at
                found.append(Grouping(part, dim, index, count))
    return found


def _parts(dim: Dim, batch: Batch, candidate: Candidate) -> dict[str, Tensor]:
    if dim == "token":
        return _token_parts(batch)
    if dim == "sequence":
        return _sequence_parts(batch)
    return _vocab_parts(batch, candidate) if dim == "vocab" else {}


def _token_parts(batch: Batch) -> dict[str, Tensor]:
    partition = batch.partition
    owner = torch.zeros(partition.tokens, dtype=torch.long)
    for i, tokens in enumerate(partition.token_shards.values()):
        owner[tokens] = i
    return {"token": torch.arange(partition.tokens), "sequence": partition.sequence_of_token, "token shard": owner}


def _sequence_parts(batch: Batch) -> dict[str, Tensor]:
    partition = batch.partition
    sizes = torch.tensor([len(partition.sequences(rank)) for rank in range(partition.layout.dp)])
    return {
        "sequence": torch.arange(len(partition.lengths)),
        "sequence shard": torch.repeat_interleave(torch.arange(len(sizes)), sizes),
    }


def _vocab_parts(batch: Batch, candidate: Candidate) -> dict[str, Tensor]:
    rows = torch.arange(batch.partition.vocab)
    sizes = torch.tensor([shard.end - shard.start for shard in batch.partition.vocab_shards])
    tile = candidate.tiles.get("vocab", (TILE,))[0]
    return {
        "vocab row": rows,
        "vocab tile": rows // tile,
        "vocab shard": torch.repeat_interleave(torch.arange(len(sizes)), sizes),
    }
