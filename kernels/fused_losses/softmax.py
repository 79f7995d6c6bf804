# SPDX-License-Identifier: Apache-2.0
"""Statistics of a softmax over a vocabulary that is never held whole: some tokens at a time, and split over ranks.

Vocabulary over ranks: Megatron-LM, arXiv:1909.08053.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.ranks import alone


class TokenLogprobs(NamedTuple):
    """``[T]`` each, in float32 (float64 for float64 inputs); None where not asked for."""

    logprobs: Tensor
    """Of the labels, in nats."""
    entropy: Tensor | None
    """Of the tempered distribution, in nats."""
    min_logits: Tensor | None
    max_logits: Tensor | None
    """The least and the greatest logit over the whole vocabulary, before the temperature; without gradients."""

    @classmethod
    def of(
        cls, logprobs: Tensor, entropy: Tensor, lowest: Tensor, largest: Tensor, wanted: tuple[bool, bool]
    ) -> "TokenLogprobs":
        """wanted: the entropy, and the range."""
        return cls(
            logprobs, entropy if wanted[0] else None, lowest if wanted[1] else None, largest if wanted[1] else None
        )


def add_at_labels_(logits: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Add ``values [n]`` to the labels' entries of ``logits [n, rows]``, in place; nothing where the label is not among the rows."""
    rows = logits.shape[1]
    if not rows:
        return logits
    here = (labels >= 0) & (labels < rows)
    return logits.scatter_add_(1, labels.long().clamp(0, rows - 1)[:, None], torch.where(here, values, 0.0)[:, None])


@dataclass
class TokenSoftmax:
    """Of the logits z of each token, in the dtype of computation; ``[tokens]`` each.

    ``largest`` is the maximum, ``total`` the sum of ``exp(z - largest)``, ``label`` the label's logit, 0 where it is on another
    rank; ``weighted`` the sum of ``(z - largest) exp(z - largest)``, where entropies are asked for; ``lowest`` the minimum, where ranges are.
    """

    largest: Tensor
    total: Tensor
    label: Tensor
    weighted: Tensor | None = None
    lowest: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, *, entropy: bool = False, lowest: bool = False) -> "TokenSoftmax":
        """From ``logits [n, rows]``, which are overwritten. ``labels [n]`` count from the first of these rows; others are not here."""
        if not logits.shape[1]:
            nothing, infinity = logits.new_zeros(3, len(logits)), logits.new_full((len(logits),), float("inf"))
            return cls(-infinity, nothing[0], nothing[1], nothing[2] if entropy else None, infinity if lowest else None)
        here = (labels >= 0) & (labels < logits.shape[1])
        at = labels.clamp(0, logits.shape[1] - 1)[:, None]
        label = torch.where(here, logits.gather(1, at).squeeze(1), 0.0)
        largest, least = logits.amax(-1), logits.amin(-1) if lowest else None
        shifted = logits.sub_(
            torch.where(largest == -torch.inf, 0.0, largest)[:, None]
        )  # where all are -inf the total is 0
        if not entropy:
            return cls(largest, shifted.exp_().sum(-1), label, lowest=least)
        exps = shifted.exp()
        weighted = torch.linalg.vecdot(
            exps, shifted.clamp_(min=torch.finfo(shifted.dtype).min)
        )  # 0 times -inf would be NaN
        return cls(largest, exps.sum(-1), label, weighted, least)

    @classmethod
    def cat(cls, parts: Sequence["TokenSoftmax"]) -> "TokenSoftmax":
        """Of all tokens, one part after the other."""
        names = [field.name for field in fields(cls) if getattr(parts[0], field.name) is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Take in the other ranks of ``group``: one all-reduce MAX of T numbers, 2 T with ranges, and one SUM of 2 T, 3 T with entropies."""
        if alone(group):
            return
        extremes = self.largest.clone() if self.lowest is None else torch.stack([self.largest, -self.lowest])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest = extremes if self.lowest is None else extremes[0]
        moved = torch.where(
            self.total > 0, self.largest - largest, 0.0
        )  # a rank without rows has -inf here, and a total of 0
        shrunk = moved.exp()
        sums = [self.total * shrunk, self.label]
        if self.weighted is not None:
            sums.append((self.weighted + moved * self.total) * shrunk)
        summed = torch.stack(sums)
        dist.all_reduce(summed, group=group)
        self.largest, self.total, self.label = largest, summed[0], summed[1]
        self.weighted = None if self.weighted is None else summed[2]
        self.lowest = None if self.lowest is None else -extremes[1]

    @property
    def logsumexp(self) -> Tensor:
        return self.largest + self.total.log()

    @property
    def logprobs(self) -> Tensor:
        # (z - max) - log(total): exact cancellation where the label is the largest
        return self.label - self.largest - self.total.log()

    @property
    def entropy(self) -> Tensor:
        """In nats; of no tokens where not asked for."""
        return self.total.new_zeros(0) if self.weighted is None else self.total.log() - self.weighted / self.total

    def range(self, temperature: float) -> tuple[Tensor, Tensor]:
        """The least and the greatest logit before the temperature; of no tokens where not asked for."""
        nothing = self.total.new_zeros(0)
        return (nothing, nothing) if self.lowest is None else (self.lowest * temperature, self.largest * temperature)


@dataclass(frozen=True)
class Upstream:
    """The upstream gradients of some tokens, divided by the temperature, and by ``unit``: for float16 the largest of all, lest products underflow."""

    unit: Tensor
    of_logprobs: Tensor
    of_entropy: Tensor | None

    @classmethod
    def of(
        cls,
        of_logprobs: Tensor | None,
        of_entropy: Tensor | None,
        like: Tensor,
        temperature: float,
        products: torch.dtype,
    ) -> "Upstream":
        """like: ``[tokens]``, of the dtype of computation. products: dtype of the matrix products to come."""
        unit = like.new_ones(())
        given = [upstream.abs().amax() for upstream in (of_logprobs, of_entropy) if upstream is not None and len(like)]
        if given and products == torch.float16:
            largest = torch.stack(given).amax()
            unit = torch.where(largest > 0, largest, 1.0)
        scale = 1 / (unit * temperature)
        return cls(
            unit,
            torch.zeros_like(like) if of_logprobs is None else of_logprobs * scale,
            None if of_entropy is None else of_entropy * scale,
        )

    def part(self, tokens: slice) -> "Upstream":
        return Upstream(
            self.unit, self.of_logprobs[tokens], None if self.of_entropy is None else self.of_entropy[tokens]
        )

    @property
    def live(self) -> Tensor:
        return self.of_logprobs != 0 if self.of_entropy is None else (self.of_logprobs != 0) | (self.of_entropy != 0)

    def dlogits(self, z: Tensor, labels: Tensor, logsumexp: Tensor, entropy: Tensor | None) -> Tensor:
        """``u (onehot - p) - v p (log p + entropy)``, in the place of z. A token that takes no part gets zeros, though its logsumexp may be NaN."""
        live = self.live
        log_p = z.sub_(torch.where(live, logsumexp, 0.0)[:, None])
        if self.of_entropy is None or entropy is None:
            d = log_p.exp_().mul_(-self.of_logprobs[:, None])
        else:
            surprise = log_p + torch.where(live, entropy, 0.0)[:, None]
            factor = surprise.mul_(self.of_entropy[:, None]).add_(self.of_logprobs[:, None]).neg_()
            d = log_p.exp_().mul_(factor.masked_fill_(log_p == 0, 0.0))  # 0 log 0 = 0
        d.masked_fill_(~live[:, None], 0.0)
        return add_at_labels_(d, labels, self.of_logprobs)
