# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics of tokens over a vocabulary that is never held as a whole.

Statistics are computed for some tokens at a time and combined over the ranks among which the
vocabulary is split, as in Megatron-LM (arXiv:1909.08053).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.ranks import alone


class TokenLogprobs(NamedTuple):
    """Log-probabilities and other statistics of tokens.

    Each field has the shape of the labels and is in float32 (float64 for float64 inputs), or None
    if the caller did not ask for it.
    """

    logprobs: Tensor
    """Log-probabilities of the labels, in nats."""
    entropy: Tensor | None
    """Entropies of the distributions after the temperature, in nats."""
    min_logits: Tensor | None
    """The smallest logit over the whole vocabulary, before the temperature; without gradient."""
    max_logits: Tensor | None
    """The largest logit over the whole vocabulary, before the temperature; without gradient."""
    unfiltered_logprobs: Tensor | None = None
    """Log-probabilities of the labels without top-k and top-p filtering, in nats.

    They equal ``logprobs`` if nothing is filtered.
    """


def add_at_labels_(logits: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Adds values to the entries of the labels, in place.

    Args:
        logits: ``[n, rows]``, changed in place.
        labels: ``[n]``, counted from the first of the rows; a label outside of them is skipped.
        values: ``[n]``.

    Returns:
        ``logits``.
    """
    rows = logits.shape[1]
    if not rows:
        return logits
    here = (labels >= 0) & (labels < rows)
    return logits.scatter_add_(1, labels.long().clamp(0, rows - 1)[:, None], torch.where(here, values, 0.0)[:, None])


@dataclass
class TokenSoftmax:
    """Softmax statistics of the logits z of each token, ``[tokens]`` each, in the compute dtype."""

    largest: Tensor
    """Maximum of z."""
    total: Tensor
    """Sum of ``exp(z - largest)``."""
    label: Tensor
    """Logit of the label; 0 if the label belongs to another rank."""
    owners: Tensor
    """How many ranks own the label: 1 if it is part of the vocabulary."""
    weighted: Tensor | None = None
    """Sum of ``(z - largest) exp(z - largest)``; None unless entropies are wanted."""
    lowest: Tensor | None = None
    """Minimum of z; None unless ranges are wanted."""

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, *, entropy: bool = False, lowest: bool = False) -> "TokenSoftmax":
        """Computes the statistics over this rank's rows of the vocabulary.

        Args:
            logits: ``[n, rows]``, overwritten: without ``entropy`` by ``exp(z - largest)``.
            labels: ``[n]``, counted from the first of the rows. Labels outside of the rows belong
                to other ranks.
            entropy: whether to compute ``weighted``.
            lowest: whether to compute ``lowest``.
        """
        if not logits.shape[1]:
            nothing, infinity = logits.new_zeros(len(logits)), logits.new_full((len(logits),), float("inf"))
            weighted, least = nothing if entropy else None, infinity if lowest else None
            return cls(-infinity, nothing, nothing, nothing, weighted, least)
        here = (labels >= 0) & (labels < logits.shape[1])
        at = labels.clamp(0, logits.shape[1] - 1)[:, None]
        label = torch.where(here, logits.gather(1, at).squeeze(1), 0.0)
        owners = here.to(logits.dtype)
        largest, least = logits.amax(-1), logits.amin(-1) if lowest else None
        # If all logits are -inf, 0 is subtracted: they stay so, and the total is 0 instead of NaN.
        shifted = logits.sub_(torch.where(largest == -torch.inf, 0.0, largest)[:, None])
        if not entropy:
            return cls(largest, shifted.exp_().sum(-1), label, owners, lowest=least)
        exps = shifted.exp()
        # A logit of -inf has weight 0; clamping it avoids 0 times -inf, which is NaN.
        weighted = torch.linalg.vecdot(exps, shifted.clamp_(min=torch.finfo(shifted.dtype).min))
        return cls(largest, exps.sum(-1), label, owners, weighted, least)

    @classmethod
    def cat(cls, parts: Sequence["TokenSoftmax"]) -> "TokenSoftmax":
        """Joins the statistics of consecutive tokens."""
        rows = zip(*([p.largest, p.total, p.label, p.owners, p.weighted, p.lowest] for p in parts), strict=True)
        return cls(*(None if row[0] is None else torch.cat(row) for row in rows))  # type: ignore[arg-type]

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Combines the statistics of all ranks of ``group``, in place.

        Collectives:
            One all-reduce MAX of ``[tokens]`` (``[2, tokens]`` with ``lowest``) and one all-reduce
            SUM of ``[3, tokens]`` (``[4, tokens]`` with ``weighted``); none in a group of one rank.
        """
        if alone(group):
            return
        extremes = self.largest.clone() if self.lowest is None else torch.stack([self.largest, -self.lowest])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest = extremes if self.lowest is None else extremes[0]
        # A rank without rows has a maximum of -inf and a total of 0; its total must stay 0.
        moved = torch.where(self.total > 0, self.largest - largest, 0.0)
        shrunk = moved.exp()
        sums = [self.total * shrunk, self.label, self.owners]
        if self.weighted is not None:
            sums.append((self.weighted + moved * self.total) * shrunk)
        summed = torch.stack(sums)
        dist.all_reduce(summed, group=group)
        self.largest, (self.total, self.label, self.owners) = largest, summed[:3]
        self.weighted = None if self.weighted is None else summed[3]
        self.lowest = None if self.lowest is None else -extremes[1]

    @property
    def logsumexp(self) -> Tensor:
        """``log sum exp(z)``."""
        return self.largest + self.total.log()

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities of the labels, in nats."""
        # Subtracting the maximum first cancels exactly if the label has the largest logit.
        return self.label - self.largest - self.total.log()

    @property
    def entropy(self) -> Tensor:
        """Entropies in nats; empty unless entropies are wanted."""
        return self.total.new_zeros(0) if self.weighted is None else self.total.log() - self.weighted / self.total

    def range(self, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns the smallest and the largest logits before the temperature.

        Both are empty unless ranges are wanted.
        """
        if self.lowest is None:  # two tensors: torch.compile wants outputs to differ
            return self.total.new_zeros(0), self.total.new_zeros(0)
        return self.lowest * temperature, self.largest * temperature
