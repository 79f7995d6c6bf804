# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics of tokens over a vocabulary that is never held as a whole.

Statistics are computed for some tokens at a time and combined over the ranks among which the
vocabulary is split, as in Megatron-LM (arXiv:1909.08053).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.ranks import alone


class TokenLogprobs(NamedTuple):
    """Log-probabilities and other statistics of tokens.

    Each field is ``[tokens]`` in float32 (float64 for float64 inputs), or None if the caller did
    not ask for it.
    """

    logprobs: Tensor
    """Log-probabilities of the labels, in nats."""
    entropy: Tensor | None
    """Entropies of the distributions after the temperature, in nats."""
    min_logits: Tensor | None
    """The smallest logit over the whole vocabulary, before the temperature; without gradient."""
    max_logits: Tensor | None
    """The largest logit over the whole vocabulary, before the temperature; without gradient."""

    @classmethod
    def of(
        cls, logprobs: Tensor, entropy: Tensor, lowest: Tensor, largest: Tensor, wanted: tuple[bool, bool]
    ) -> "TokenLogprobs":
        """Makes the result of a kernel from the outputs of its autograd function.

        Args:
            logprobs: ``[tokens]``.
            entropy: ``[tokens]``, or empty if not wanted.
            lowest: ``[tokens]``, or empty if not wanted.
            largest: ``[tokens]``, or empty if not wanted.
            wanted: whether the caller asked for the entropy, and for the range of logits.
        """
        return cls(
            logprobs, entropy if wanted[0] else None, lowest if wanted[1] else None, largest if wanted[1] else None
        )


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
    weighted: Tensor | None = None
    """Sum of ``(z - largest) exp(z - largest)``; None unless entropies are wanted."""
    lowest: Tensor | None = None
    """Minimum of z; None unless ranges are wanted."""

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, *, entropy: bool = False, lowest: bool = False) -> "TokenSoftmax":
        """Computes the statistics over this rank's rows of the vocabulary.

        Args:
            logits: ``[n, rows]``, overwritten: without ``entropy`` by ``exp(z - largest)``.
            labels: ``[n]``, counted from the first of the rows; other labels belong to other ranks.
            entropy: whether to compute ``weighted``.
            lowest: whether to compute ``lowest``.
        """
        if not logits.shape[1]:
            nothing, infinity = logits.new_zeros(3, len(logits)), logits.new_full((len(logits),), float("inf"))
            return cls(-infinity, nothing[0], nothing[1], nothing[2] if entropy else None, infinity if lowest else None)
        here = (labels >= 0) & (labels < logits.shape[1])
        at = labels.clamp(0, logits.shape[1] - 1)[:, None]
        label = torch.where(here, logits.gather(1, at).squeeze(1), 0.0)
        largest, least = logits.amax(-1), logits.amin(-1) if lowest else None
        # If all logits are -inf, subtracting 0 leaves them so, and the total is 0 instead of NaN.
        shifted = logits.sub_(torch.where(largest == -torch.inf, 0.0, largest)[:, None])
        if not entropy:
            return cls(largest, shifted.exp_().sum(-1), label, lowest=least)
        exps = shifted.exp()
        # A logit of -inf has weight 0; clamping it avoids 0 times -inf, which is NaN.
        weighted = torch.linalg.vecdot(exps, shifted.clamp_(min=torch.finfo(shifted.dtype).min))
        return cls(largest, exps.sum(-1), label, weighted, least)

    @classmethod
    def cat(cls, parts: Sequence["TokenSoftmax"]) -> "TokenSoftmax":
        """Joins the statistics of consecutive tokens."""
        names = [field.name for field in fields(cls) if getattr(parts[0], field.name) is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Combines the statistics of all ranks of ``group``, in place.

        Collectives:
            One all-reduce MAX of ``[tokens]`` (``[2, tokens]`` with ``lowest``) and one all-reduce
            SUM of ``[2, tokens]`` (``[3, tokens]`` with ``weighted``); none in a group of one rank.
        """
        if alone(group):
            return
        extremes = self.largest.clone() if self.lowest is None else torch.stack([self.largest, -self.lowest])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest = extremes if self.lowest is None else extremes[0]
        # A rank without rows has a maximum of -inf and a total of 0; its total must stay 0.
        moved = torch.where(self.total > 0, self.largest - largest, 0.0)
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
        nothing = self.total.new_zeros(0)
        return (nothing, nothing) if self.lowest is None else (self.lowest * temperature, self.largest * temperature)


@dataclass(frozen=True)
class Upstream:
    """Upstream gradients of some tokens, divided by the temperature and by ``unit``.

    The final gradients must be multiplied by ``unit``. It is 1, except for products in float16:
    there it is the largest upstream gradient, so that products with small gradients do not
    underflow.
    """

    unit: Tensor
    """A scalar."""
    of_logprobs: Tensor
    """``[tokens]``."""
    of_entropy: Tensor | None
    """``[tokens]``; None if the entropy has no gradient."""

    @classmethod
    def of(
        cls,
        of_logprobs: Tensor | None,
        of_entropy: Tensor | None,
        like: Tensor,
        temperature: float,
        products: torch.dtype,
    ) -> "Upstream":
        """Scales the gradients that autograd passes to backward.

        Args:
            of_logprobs: ``[tokens]``; None if log-probabilities have no gradient.
            of_entropy: ``[tokens]``; None if entropies have no gradient.
            like: ``[tokens]``, a tensor of the compute dtype.
            temperature: the divisor of the logits.
            products: dtype of the matrix products that follow.
        """
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
        """Returns the gradients of a slice of the tokens."""
        return Upstream(
            self.unit, self.of_logprobs[tokens], None if self.of_entropy is None else self.of_entropy[tokens]
        )

    @property
    def live(self) -> Tensor:
        """``[tokens]`` bool: the token has a gradient other than 0."""
        return self.of_logprobs != 0 if self.of_entropy is None else (self.of_logprobs != 0) | (self.of_entropy != 0)

    def dlogits(self, z: Tensor, labels: Tensor, logsumexp: Tensor, entropy: Tensor | None) -> Tensor:
        """Computes the gradient of the logits, ``u (onehot - p) - v p (log p + entropy)``.

        u and v are the upstream gradients of log-probability and entropy. A token whose upstream
        gradients are 0 gets zeros, even if its logsumexp is NaN.

        Args:
            z: ``[n, rows]`` logits, overwritten by the result.
            labels: ``[n]``, counted from the first of the rows.
            logsumexp: ``[n]``.
            entropy: ``[n]``; None if entropies have no gradient.
        """
        live = self.live
        log_p = z.sub_(torch.where(live, logsumexp, 0.0)[:, None])
        if self.of_entropy is None or entropy is None:
            d = log_p.exp_().mul_(-self.of_logprobs[:, None])
        else:
            surprise = log_p + torch.where(live, entropy, 0.0)[:, None]
            factor = surprise.mul_(self.of_entropy[:, None]).add_(self.of_logprobs[:, None]).neg_()
            d = log_p.exp_().mul_(factor.masked_fill_(log_p == 0, 0.0))  # p is 0 there: 0 log 0 = 0
        d.masked_fill_(~live[:, None], 0.0)
        return add_at_labels_(d, labels, self.of_logprobs)
