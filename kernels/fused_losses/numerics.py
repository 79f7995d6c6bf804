# SPDX-License-Identifier: Apache-2.0
"""Exponentials with finite gradients, and checks that several kernels share."""

from math import floor, log

import torch
from torch import Tensor

from fused_losses.arguments import check_number


def bounded_exp(x: Tensor) -> Tensor:
    """Computes ``exp(x)``, bounded by the largest number that the dtype of ``x`` holds.

    At the bound the gradient is 0. Without the bound it would be infinite, and a clip, whose own
    gradient is 0, would turn it into 0 times infinity, which is NaN.
    """
    return x.clamp(max=floor(8 * log(torch.finfo(x.dtype).max)) / 8).exp()


def check_tokens(logprobs: Tensor, **others: Tensor | None) -> None:
    """Checks that every tensor has one number for each token.

    A tensor of another shape, such as ``[tokens, 1]``, would broadcast silently.

    Args:
        logprobs: ``[tokens]``.
        others: tensors by argument name, ``[tokens]`` each; None is skipped.

    Raises:
        ValueError: A tensor has another shape; the message names it.
    """
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs {list(logprobs.shape)}: expected [T], one for each token; flatten a batch of rows")
    for name, x in others.items():
        if x is not None and x.shape != logprobs.shape:
            raise ValueError(
                f"{name} {list(x.shape)}: expected {list(logprobs.shape)}, one for each token, as logprobs"
            )


def check_temperature(temperature: float) -> None:
    """Checks that a temperature is a positive number.

    Raises:
        ValueError: It is not.
    """
    check_number("temperature", temperature, above=0, otherwise="since greedy decoding (0) has no log-probabilities")
