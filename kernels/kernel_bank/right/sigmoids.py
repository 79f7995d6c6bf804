# SPDX-License-Identifier: Apache-2.0
"""Ways to write -log sigmoid(x), the loss of a pair whose margin is x."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Sigmoid = Callable[[Tensor], Tensor]


def by_logsigmoid(x: Tensor) -> Tensor:
    return -F.logsigmoid(x)


def by_softplus(x: Tensor) -> Tensor:
    """torch's softplus is the identity above 20, which float32 rounds it to by then."""
    return F.softplus(-x)


def by_log1p(x: Tensor) -> Tensor:
    """On either side of 0 written so that no exponential overflows.

    ``log1p(exp(-abs(x))) + relu(-x)`` is wrong at exactly 0, where autograd gives neither a slope.
    """
    above, below = x.clamp(min=0), x.clamp(max=0)
    return torch.where(x >= 0, torch.log1p(torch.exp(-above)), torch.log1p(torch.exp(below)) - below)


def by_logaddexp(x: Tensor) -> Tensor:
    return torch.logaddexp(torch.zeros_like(x), -x)


def by_binary_cross_entropy(x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none")


def by_two_classes(x: Tensor) -> Tensor:
    """The cross-entropy of two classes whose logits are x and 0."""
    logits = torch.stack([x, torch.zeros_like(x)], -1)
    return F.cross_entropy(logits, torch.zeros_like(x, dtype=torch.long), reduction="none")


SIGMOIDS: tuple[Sigmoid, ...] = (
    by_logsigmoid,
    by_softplus,
    by_log1p,
    by_logaddexp,
    by_binary_cross_entropy,
    by_two_classes,
)
