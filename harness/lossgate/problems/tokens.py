# SPDX-License-Identifier: Apache-2.0
"""The packed batch before any loss: token ids, labels, mask, and where sequences begin."""

import torch
from torch import Tensor

from lossgate.problems.masks import draw_mask
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams


def draw_tokens(problem: Problem) -> dict[str, Tensor]:
    """Draws the fields that every spec has, of the sequences end to end without padding.

    Ids and masks depend on the seed alone, so that a problem keeps them while it is made smaller.
    """
    streams = RandomStreams(problem.seed)
    ids = streams.integers("ids", problem.vocab, problem.tokens)
    for token, row in problem.forced_labels:
        if token + 1 < problem.tokens:
            ids[token + 1] = row
    mask = draw_mask(problem.masks, problem.lengths, streams)
    return {
        "input_ids": ids,
        # The last token of a sequence gets the next sequence's first id as its label, and the last
        # of the pack wraps around: that is what a roll gives, and the mask must keep such labels
        # out.
        "labels": ids.roll(-1),
        "mask": mask,
        "sequence": torch.repeat_interleave(torch.arange(len(problem.lengths)), torch.tensor(problem.lengths)),
        "lengths": torch.tensor(problem.lengths),
        "valid_tokens": mask.sum(),
    }
