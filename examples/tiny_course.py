# SPDX-License-Identifier: Apache-2.0
"""What the transformer of tiny_training.py learns: batches of three kinds, from a text."""

from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB, CONTEXT = 256, 64
PHASES = ("SFT", "DPO", "GRPO")
GROUP, UPDATES = 4, 5
"""Completions of a prompt, and GRPO's updates on the same completions: ratios are 1 at the first of them only."""


@dataclass(frozen=True)
class Batch:
    """Sequences, one in a row, as a data loader has them; the same on every rank."""

    ids: Tensor
    """``[B, CONTEXT]``, whatever beyond a sequence's length."""
    lengths: Tensor
    """``[B]``, from 2 to CONTEXT."""
    prompts: Tensor
    """``[B]``: how many of its first tokens are not trained; at least 1, since nothing predicts the first."""
    advantages: Tensor
    """``[B]``, 0 where there are none."""

    @property
    def trained(self) -> Tensor:
        """``[B, CONTEXT]`` bool."""
        column = torch.arange(CONTEXT)
        return (column >= self.prompts[:, None]) & (column < self.lengths[:, None])

    def part(self, number: int, of: int) -> "Batch":
        """Whole sequences, and so whole pairs where there are that many."""
        rows = slice(len(self.ids) * number // of, len(self.ids) * (number + 1) // of)
        return Batch(self.ids[rows], self.lengths[rows], self.prompts[rows], self.advantages[rows])


class Course:
    """What is learnt: batches, drawn up front from a seed. No batch is sampled from the model, so every run has the same ones."""

    def __init__(self, text: bytes, steps: dict[str, int], seed: int) -> None:
        self._text = torch.tensor(list(text))
        self._random = torch.Generator().manual_seed(seed)
        self.steps = steps
        self.sft = [self._text_batch() for _ in range(steps["SFT"])]
        self.dpo = [self._pairs() for _ in range(steps["DPO"])]
        self.rollouts = [self._rollouts() for _ in range(-(-steps["GRPO"] // UPDATES))]

    def _draw(self, low: int, high: int, count: int) -> Tensor:
        """``[count]`` from low to high, both included."""
        return torch.randint(low, high + 1, (count,), generator=self._random)

    def _windows(self, count: int) -> Tensor:
        return self._text[self._draw(0, len(self._text) - CONTEXT, count)[:, None] + torch.arange(CONTEXT)]

    def _text_batch(self) -> Batch:
        return Batch(
            self._windows(4), self._draw(CONTEXT // 3, CONTEXT, 4), torch.ones(4, dtype=torch.long), torch.zeros(4)
        )

    def _pairs(self) -> Batch:
        """Chosen: what the text has after a prompt. Rejected: the same bytes in another order, without the last few."""
        chosen, prompts, lengths = self._windows(2), self._draw(8, 16, 2), self._draw(40, CONTEXT, 2)
        rejected = chosen.clone()
        for row, prompt, length in zip(rejected, prompts.tolist(), lengths.tolist(), strict=True):
            row[prompt:length] = row[prompt:length][torch.randperm(length - prompt, generator=self._random)]
        both = torch.stack([lengths, lengths - self._draw(0, 7, 2)], dim=1).flatten()
        return Batch(
            torch.stack([chosen, rejected], dim=1).flatten(0, 1), both, prompts.repeat_interleave(2), torch.zeros(4)
        )

    def _rollouts(self) -> Batch:
        """Of each of two prompts a group of completions: that of the text, with more and more of its bytes random.

        They stand for samples of a model, which would differ from run to run with its rounding. The reward is the share of lower-case letters;
        advantages are rewards normalised within the group.
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
