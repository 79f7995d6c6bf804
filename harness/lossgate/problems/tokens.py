# SPDX-License-Identifier: Apache-2.0
"""The packed batch before any loss: token ids, labels, mask, and where sequences begin."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.problems.masks import draw_mask
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams


@dataclass(frozen=True)
class Packer:
    """Puts values per token where they belong in the padded pack."""

    partition: Partition
    streams: RandomStreams
    vocab: int

    def pack(self, garbage: str | None, values: Tensor) -> Tensor:
        """Returns ``[tokens of the padded pack, ...]`` of ``values``, ``[sum(lengths), ...]``.

        Padding gets random numbers from the stream ``garbage``, so that a kernel which uses it is
        seen; or zeros where ``garbage`` is None.
        """
        shape = (self.partition.tokens, *values.shape[1:])
        if garbage is None:
            full = torch.zeros(shape, dtype=values.dtype)
        elif values.is_floating_point():
            full = self.streams.normal(garbage, *shape)
        else:
            full = self.streams.integers(garbage, self.vocab, *shape)
        full[self.partition.real_tokens] = values
        return full


def draw_tokens(problem: Problem) -> dict[str, Tensor]:
    """Draws the fields that every spec has, of the whole padded pack.

    Ids and masks depend on the seed alone, so that a problem keeps them while it is made smaller.
    """
    streams, partition = RandomStreams(problem.seed), problem.partition
    ids = streams.integers("ids", problem.vocab, problem.tokens)
    for token, row in problem.forced_labels:
        if token + 1 < problem.tokens:
            ids[token + 1] = row
    mask = draw_mask(problem.masks, problem.lengths, streams)
    packer = Packer(partition, streams, problem.vocab)
    return {
        "input_ids": packer.pack("ids padding", ids),
        # The last token of a sequence gets the next sequence's first id as its label, and the last
        # of the pack wraps around: that is what a roll gives, and the mask must keep such labels
        # out.
        "labels": packer.pack("labels padding", ids.roll(-1)),
        "mask": packer.pack(None, mask),
        "sequence": partition.sequence_of_token,
        "lengths": torch.tensor(partition.lengths),
        "valid_tokens": mask.sum(),
    }
