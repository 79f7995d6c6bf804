# SPDX-License-Identifier: Apache-2.0
"""Exponentials with finite gradients, divisors of means, units in float16, and temperatures."""

from math import floor, log

import torch
from torch import Tensor

from fused_losses.arguments import check_setting

_LARGEST_IN_FLOAT16 = 4096
"""The largest upstream gradient that needs no unit above 1.

A gradient of logits is up to 15 times as large as it: once for each log-probability, and ln V + 1/e
times for an entropy over V <= 2^18 ids. float16 goes up to 65504.
"""


def bounded_exp(x: Tensor) -> Tensor:
    """Computes ``exp(x)``, bounded by the largest number that the dtype of ``x`` holds.

    At the bound the gradient is 0. Without the bound it would be infinite, and a clip, whose own
    gradient is 0, would turn it into 0 times infinity, which is NaN.
    """
    return x.clamp(max=floor(8 * log(torch.finfo(x.dtype).max)) / 8).exp()


def divisor(count: Tensor, epsilon: float = 0.0) -> Tensor:
    """Returns the divisor of a mean over ``count`` things.

    Without epsilon, a count of 0 becomes 1, so that a mean over nothing is 0.
    """
    return count + epsilon if epsilon else torch.where(count == 0, 1.0, count)


def float16_unit(largest: Tensor) -> Tensor:
    """Returns the unit in which upstream gradients are passed to products in float16.

    If all upstream gradients are below 1, they are enlarged, or gradients of logits would
    underflow. They are reduced only if the largest would overflow, because this makes the gradients
    of small ones underflow.

    Args:
        largest: the largest magnitude of the upstream gradients, divided by the temperature.

    Returns:
        The unit: upstream gradients are divided by it, and the final gradients multiplied by it.
    """
    return torch.where(largest > 0, largest / largest.clamp(1, _LARGEST_IN_FLOAT16), 1.0)


def check_temperature(temperature: float) -> None:
    """Checks that a temperature is a positive number.

    Raises:
        ValueError: The temperature is something else.
    """
    check_setting("temperature", temperature, above=0, otherwise="since greedy decoding (0) has no log-probabilities")
