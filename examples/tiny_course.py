# SPDX-License-Identifier: Apache-2.0
"""Batches for the transformer of tiny_training.py: three kinds, all made from one text."""

from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB, CONTEXT = 256, 64
PHASES = ("SFT", "DPO", "GRPO")
GROUP, UPDATES = 4, 5
"""Completions of each prompt, and GRPO's updates on the same completions.

Ratios are 1 at the first update alone, so one update would not test them.
"""


@dataclass(frozen=True)
class Batch:
    """Sequences, one in each row, as a data loader returns them; the same on every rank."""

    ids: Tensor
    """``[sequences, CONTEXT]`` token ids; arbitrary beyond the length of a sequence."""
    lengths: Tensor
    """``[sequences]``, from 2 to CONTEXT."""
    prompts: Tensor
    """``[sequences]``: the number of leading tokens that are not trained.

    It is at least 1, since nothing predicts the first token.
    """
    advantages: Tensor
    """``[sequences]``; 0 outside of GRPO."""

    @property
    def trained(self) -> Tensor:
        """``[sequences, CONTEXT]`` bool: the token is trained."""
        column = torch.arange(CONTEXT)
        return (column >= self.prompts[:, None]) & (column < self.lengths[:, None])

    def part(self, number: int, of: int) -> "Batch":
        """Returns part ``number`` of ``of`` parts of the sequences.

        With two pairs and at most two parts, no pair is cut.
        """
        rows = slice(len(self.ids) * number // of, len(self.ids) * (number + 1) // of)
        return Batch(self.ids[rows], self.lengths[rows], self.prompts[rows], self.advantages[rows])


class Course:
    """All batches of a run, drawn in advance from a seed.

    No batch is sampled from the model, so every run has the same ones.

    Args:
        text: the bytes to learn.
        steps: the number of updates in each of ``PHASES``.
        seed: the seed of all batches.
    """

    def __init__(self, text: bytes, steps: dict[str, int], seed: int) -> None:
        self._text = torch.tensor(list(text))
        self._random = torch.Generator().manual_seed(seed)
        self.steps = steps
        self.sft = [self._text_batch() for _ in range(steps["SFT"])]
        self.dpo = [self._pairs() for _ in range(steps["DPO"])]
        self.rollouts = [self._rollouts() for _ in range(-(-steps["GRPO"] // UPDATES))]

    def _draw(self, low: int, high: int, count: int) -> Tensor:
        """Draws ``[count]`` integers from low to high, both included."""
        return torch.randint(low, high + 1, (count,), generator=self._random)

    def _windows(self, count: int) -> Tensor:
        return self._text[self._draw(0, len(self._text) - CONTEXT, count)[:, None] + torch.arange(CONTEXT)]

    def _text_batch(self) -> Batch:
        return Batch(
            self._windows(4), self._draw(CONTEXT // 3, CONTEXT, 4), torch.ones(4, dtype=torch.long), torch.zeros(4)
        )

    def _pairs(self) -> Batch:
        """Draws two pairs of responses.

        The chosen one is what follows the prompt in the text. The rejected one has the same bytes
        in another order, without the last few.
        """
        chosen, prompts, lengths = self._windows(2), self._draw(8, 16, 2), self._draw(40, CONTEXT, 2)
        rejected = chosen.clone()
        for row, prompt, length in zip(rejected, prompts.tolist(), lengths.tolist(), strict=True):
            row[prompt:length] = row[prompt:length][torch.randperm(length - prompt, generator=self._random)]
        both = torch.stack([lengths, lengths - self._draw(0, 7, 2)], dim=1).flatten()
        return Batch(
            torch.stack([chosen, rejected], dim=1).flatten(0, 1), both, prompts.repeat_interleave(2), torch.zeros(4)
        )

    def _rollouts(self) -> Batch:
        """Draws a group of completions for each of two prompts.

        They start from the completion in the text; more and more of their bytes are random. They
        stand for samples of a model, which would differ from run to run by its rounding. The reward
        is the share of lower-case letters; advantages are rewards normalised within the group.
        """
        ids = self._windows(2).repeat_interleave(GROUP, dim=0)
        count = len(ids)
        prompts, lengths = self._draw(8, 16, 2).repeat_interleave(GROUP), self._draw(30, CONTEXT, count)
        spoilt = torch.rand(count, CONTEXT, generator=self._random) < (torch.arange(count) % GROUP / GROUP)[:, None]
        column = torch.arange(CONTEXT)
        completion = (column >= prompts[:, None]) & (column < lengths[:, None])
        ids = torch.where(spoilt & completion, self._draw(0, VOCAB - 1, ids.numel()).view_as(ids), ids)
        rewards = ((ids >= ord("a")) & (ids <= ord("z")) & completion).sum(1) / completion.sum(1)
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return Batch(ids, lengths, prompts, advantages.flatten())
