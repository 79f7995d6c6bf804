# SPDX-License-Identifier: Apache-2.0
"""Exponentials with finite gradients, divisors of means, and the check of a temperature."""

from math import floor, log

import torch
from torch import Tensor

from fused_losses.arguments import check_setting


def bounded_exp(x: Tensor) -> Tensor:
    """Computes ``exp(x)``, bounded by the largest number that the dtype of ``x`` holds.

    At the bound the gradient is 0. Without the bound it would be infinite, and a clip, whose own
    gradient is 0, would turn it into 0 times infinity, which is NaN.
    """
    return x.clamp(max=floor(8 * log(torch.finfo(x.dtype).max)) / 8).exp()


def divisor(count: Tensor, epsilon: float = 0.0) -> Tensor:
    """Returns what a sum over ``count`` things is divided by for their mean.

    Without epsilon, a count of 0 becomes 1, so that a mean over nothing is 0.
    """
    return count + epsilon if epsilon else torch.where(count == 0, 1.0, count)


def check_temperature(temperature: float) -> None:
    """Checks that a temperature is a positive number.

    Raises:
        ValueError: It is not.
    """
    check_setting("temperature", temperature, above=0, otherwise="since greedy decoding (0) has no log-probabilities")
