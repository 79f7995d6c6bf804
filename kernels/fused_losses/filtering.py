# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p (nucleus) filtering of logits whose vocabulary may be split over ranks.

The order is that of vLLM, Hugging Face and NeMo-RL: temperature, top-k, top-p. Tokens with equal
logits stay or go together. So a filter is one bound for each row: logits at or above it stay.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import check_integer, check_setting
from fused_losses.ranks import alone

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integer dtype with as many bits as each float dtype."""


@dataclass(frozen=True)
class LogitFilter:
    """Which logits of a token stay in its softmax.

    Raises:
        ValueError: A setting does not fit; the message names it.
    """

    top_k: int | None = None
    """The k largest logits stay, and logits that tie with the last of them; None for all."""
    top_p: float = 1.0
    """Of these, the most probable stay, until their probabilities sum to ``top_p``; 1 for all."""

    def __post_init__(self) -> None:
        if self.top_k is not None:
            check_integer("top_k", self.top_k, least=1, otherwise="or None for no filter")
        check_setting("top_p", self.top_p, above=0, largest=1, otherwise="where 1 is no filter")

    @property
    def filters(self) -> bool:
        """Whether anything is filtered. It is no ``__bool__``, which torch compiles since 2.13."""
        return self.top_k is not None or self.top_p < 1

    def bound(self, logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Computes the bound of each token: its logits at or above it stay.

        The bound lies halfway between the least logit that stays and the largest that goes. So
        logits that backward computes anew with another rounding are filtered alike.

        Args:
            logits: ``[n, rows]``, this rank's rows of the vocabulary, after the temperature, in
                float32 or float64. They are not changed.
            group: the ranks among which the vocabulary is split; None if it is whole here.

        Returns:
            ``[n]``, the same on every rank.

        Collectives:
            With ``top_k``: an all-gather of ``[n, top_k]``. With ``top_k`` and ``top_p``: also an
            all-reduce SUM of ``[n]``. With ``top_p`` alone: an all-reduce MAX and 33 all-reduces
            SUM of ``[n]`` (65 in float64). Always at the end: an all-reduce MAX of ``[n]``.
        """
        if self.top_k is None:
            weights = (logits - _largest(logits, group)[:, None]).exp_()
            least = _least_reaching(logits, weights, self.top_p * _sum(weights.sum(-1), group), group)
        else:
            least = self._least_of_top_k(_top(logits, self.top_k, group), logits, group)
        going = _largest(logits.masked_fill(logits >= least[:, None], -torch.inf), group)
        halfway = going + (least - going) / 2
        return torch.where(going == -torch.inf, going, torch.where(halfway > going, halfway, least))

    def _least_of_top_k(self, top: Tensor, logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Returns the least logit that stays, ``[n]``, from the ``top_k`` largest in order."""
        last = top[:, -1:]
        if self.top_p == 1:
            return last.squeeze(1)
        ties = _sum((logits == last).sum(-1).to(top.dtype), group)
        weights = (top - top[:, :1]).exp()
        # Logits that tie with the last one stay as well. Its weight stands for all of them.
        weights = torch.where(top == last, weights * (ties / (top == last).sum(-1))[:, None], weights)
        return _least_reaching(top, weights, self.top_p * weights.sum(-1), None)


def _top(logits: Tensor, k: int, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the k largest logits of each token in order, ``[n, k]``; -inf beyond the last."""
    mine = logits.topk(min(k, logits.shape[1])).values
    mine = torch.cat([mine, mine.new_full((len(mine), k - mine.shape[1]), -torch.inf)], 1)
    if group is None or alone(group):
        return mine
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, 1).topk(k).values


def _least_reaching(values: Tensor, weights: Tensor, target: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the largest t for which the weights of values from t up sum to the target.

    t is one of the values. It is found by bisection over all floats, which apart from the sign are
    ordered like the integers with the same bits.

    Args:
        values: ``[n, m]``, the values of this rank.
        weights: ``[n, m]``, not negative.
        target: ``[n]``, positive, and at most the sum of the weights over all ranks.
        group: the ranks among which the values are split.
    """
    bits = torch.finfo(values.dtype).bits
    low = _ordered(torch.full_like(target, -torch.inf))
    high = _ordered(torch.full_like(target, torch.inf))
    for _ in range(bits):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        at_least = _float(middle, values.dtype)
        reached = _sum((weights * (values >= at_least[:, None])).sum(-1), group) >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return _float(low, values.dtype)


def _ordered(x: Tensor) -> Tensor:
    """Returns integers in the order of the floats."""
    return _flip(x.view(_INTEGERS[x.dtype]))


def _float(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _flip(x).view(dtype)


def _flip(x: Tensor) -> Tensor:
    """Flips all bits but the sign of negative numbers. A second call undoes this."""
    return torch.where(x < 0, x ^ torch.iinfo(x.dtype).max, x)


def _largest(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the largest logit of each token over all ranks; -inf if there are no logits."""
    own = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    return _reduced(own, "max", group)


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return _reduced(x, "sum", group)


def _reduced(x: Tensor, operation: str, group: dist.ProcessGroup | None) -> Tensor:
    if not alone(group):
        operations: dict[str, Any] = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
        dist.all_reduce(x, op=operations[operation], group=group)
    return x
