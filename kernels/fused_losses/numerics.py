# SPDX-License-Identifier: Apache-2.0
"""Exponentials of log-ratios, whose gradients stay finite."""

from math import floor, log

import torch
from torch import Tensor


def bounded_exp(x: Tensor) -> Tensor:
    """``exp(x)``, bounded by what its dtype holds, without a gradient there: that of a clip is 0, and 0 times infinity would be NaN."""
    return x.clamp(max=floor(8 * log(torch.finfo(x.dtype).max)) / 8).exp()


def check_tokens(logprobs: Tensor, **others: Tensor | None) -> None:
    """Raises ``ValueError`` that names what is not ``[T]``: it would broadcast."""
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs {list(logprobs.shape)}: expected [T], one for each token; flatten a batch of rows")
    for name, x in others.items():
        if x is not None and x.shape != logprobs.shape:
            raise ValueError(
                f"{name} {list(x.shape)}: expected {list(logprobs.shape)}, one for each token, as logprobs"
            )
