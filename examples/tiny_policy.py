# SPDX-License-Identifier: Apache-2.0
"""The transformer of tiny_training.py, and how it and its batches are split over ranks.

dp splits the sequences of a batch, cp the tokens of each sequence, and tp the rows of the lm-head.
The rest of the model is whole on every rank.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tiny_course import CONTEXT, VOCAB, Batch
from torch import Tensor, nn
from torch.nn import functional as F

from fused_losses import Pack
from lossgate.worlds import RankContext

WIDTH, HEADS, LAYERS = 32, 4, 2
SPLIT = ord("i")
"""The id at which two tp ranks split the vocabulary.

The text is ASCII, so a split in the middle of the 256 bytes would leave the second rank unused.
"""


@dataclass(frozen=True)
class Ranks:
    """The groups of this rank; each has one rank if nothing is split along its axis."""

    dp: dist.ProcessGroup
    cp: dist.ProcessGroup
    tp: dist.ProcessGroup

    @classmethod
    def of(cls, context: RankContext) -> "Ranks":
        return cls(*(context.mesh.get_group(axis) for axis in ("dp", "cp", "tp")))


def starts(lengths: Tensor) -> Tensor:
    """Returns where sequences start that lie end to end, and where the last one ends."""
    return F.pad(lengths.cumsum(0), (1, 0))


@dataclass(frozen=True)
class Share:
    """This rank's tokens of a batch, ``[tokens]`` each, unless said otherwise.

    dp chooses the sequences, which are packed, and cp the tokens of each of them.
    """

    pack: Pack
    ids: Tensor
    labels: Tensor
    mask: Tensor
    """Bool: the label is trained."""
    advantages: Tensor
    trained_tokens: Tensor
    """Number of trained tokens in the whole batch. Divided by it, the losses of ranks add up."""
    sequences: int
    """Number of sequences in the whole batch."""

    @classmethod
    def of(cls, batch: Batch, ranks: Ranks) -> "Share":
        own = batch.part(ranks.dp.rank(), ranks.dp.size())
        multiple = 2 * ranks.cp.size() if ranks.cp.size() > 1 else 1
        padded = (own.lengths + multiple - 1) // multiple * multiple
        pack = Pack.of(starts(own.lengths), starts(padded), cp_group=ranks.cp)
        return cls(
            pack=pack,
            ids=pack.from_rows(own.ids, shift=0),
            labels=pack.labels(own.ids, fill=0),  # Dense losses look up every label, so -100 would fail.
            mask=pack.from_rows(own.trained, shift=1),
            advantages=own.advantages[pack.sequence],
            trained_tokens=batch.trained.sum(),
            sequences=len(batch.ids),
        )


class GatherTokens(torch.autograd.Function):
    """Gathers ``[tokens, ...]`` of every cp rank into ``[cp tokens, ...]``, in rank order.

    Each rank uses all tokens for its own part of the loss, so backward adds up all ranks' gradients
    of a token.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, cp: dist.ProcessGroup) -> Tensor:
        ctx.cp = cp
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(cp.size())]
        dist.all_gather(parts, own.contiguous(), group=cp)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.cp)
        return total.chunk(ctx.cp.size())[ctx.cp.rank()], None


def gather_tokens(own: Tensor, cp: dist.ProcessGroup) -> Tensor:
    return GatherTokens.apply(own, cp)  # type: ignore[return-value]


class Block(nn.Module):
    """A transformer block: attention and a multilayer perceptron, each with a residual connection.

    Both work on normalised input.
    """

    def __init__(self) -> None:
        super().__init__()
        # There are no biases. That of keys has a gradient of 0 up to rounding, from which Adam
        # would make steps of full size.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, seen: Tensor, cp: dist.ProcessGroup) -> Tensor:
        """Computes the block.

        Args:
            x: ``[tokens, WIDTH]``.
            seen: ``[tokens, cp tokens]`` bool, the tokens to which each token of this rank attends.
            cp: the ranks over which the tokens of sequences are split.

        Returns:
            ``[tokens, WIDTH]``.
        """
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).view(len(x), 3, HEADS, -1).unbind(1)
        k, v = gather_tokens(torch.stack([k, v], dim=1), cp).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / k.shape[-1] ** 0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        x = x + self.out(mixed.flatten(1))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (WIDTH,)))))


class Policy(nn.Module):
    """The transformer, whole on every rank, and this rank's rows of the lm-head.

    It returns hidden states; the losses compute logits.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Parameter(torch.empty(VOCAB, WIDTH))
        self.vocab_start = 0
        random = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5 / WIDTH**0.5, generator=random)

    def forward(self, share: Share, cp: dist.ProcessGroup) -> Tensor:
        """Returns the hidden states of this rank's tokens, ``[tokens, WIDTH]``."""
        pack = share.pack
        of, at = gather_tokens(torch.stack([pack.sequence, pack.position], dim=1), cp).unbind(1)
        seen = (pack.sequence[:, None] == of) & (pack.position[:, None] >= at)
        x = self.tokens(share.ids) + self.positions(pack.position)
        for block in self.blocks:
            x = block(x, seen, cp)
        return F.rms_norm(x, (WIDTH,))

    def on(self, tp: dist.ProcessGroup) -> "Policy":
        """Returns a copy with the lm-head rows of this rank of ``tp``."""
        bounds = {1: (0, VOCAB), 2: (0, SPLIT, VOCAB)}[tp.size()]
        policy = copy.deepcopy(self)
        policy.vocab_start, end = bounds[tp.rank() : tp.rank() + 2]
        policy.head = nn.Parameter(self.head.detach()[policy.vocab_start : end].clone())
        return policy

    def frozen(self) -> "Policy":
        """Returns a copy without gradients."""
        return copy.deepcopy(self).requires_grad_(False)

    def nudged(self, seed: int) -> "Policy":
        """Returns a copy in which every weight is the next number above or below, at random."""
        random = torch.Generator().manual_seed(seed)
        policy = copy.deepcopy(self)
        with torch.no_grad():
            for parameter in policy.parameters():
                up = torch.rand(parameter.shape, generator=random) < 0.5
                parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf)))
        return policy
