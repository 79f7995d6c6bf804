# SPDX-License-Identifier: Apache-2.0
"""Losses of models that score: value models, spec ``value``, and reward models, spec
``preference``.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bank.right.formats import COARSE_LOSS, DOUBLE, FINE, LOW, Formats
from kernel_bank.right.kernel import Batch, Call, declared, of_tokens, of_values, selected_sum, sum_of_sequences
from kernel_bank.right.sigmoids import SIGMOIDS, Sigmoid
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.declaration.supports import ANY

# Value models


def value_by_clamp(values: Tensor, batch: Batch, options: Any) -> Tensor:
    error = (values - batch["returns"]) ** 2
    if options.cliprange is None:
        return options.scale / 2 * error
    old = batch["old_values"]
    clipped = torch.clamp(values, old - options.cliprange, old + options.cliprange)
    return options.scale / 2 * torch.max(error, (clipped - batch["returns"]) ** 2)


def value_by_moves(values: Tensor, batch: Batch, options: Any) -> Tensor:
    """As OpenAI's PPO: the move from the old value is clamped."""
    error = F.mse_loss(values, batch["returns"].to(values.dtype), reduction="none")
    if options.cliprange is None:
        return 0.5 * options.scale * error
    old = batch["old_values"]
    clipped = old + (values - old).clamp(-options.cliprange, options.cliprange)
    other = torch.square(clipped - batch["returns"])
    return 0.5 * options.scale * torch.where(error >= other, error, other)


def value_by_minimum(values: Tensor, batch: Batch, options: Any) -> Tensor:
    """With minimum and maximum in place of clamps, and half the error from the start."""
    error = 0.5 * (batch["returns"] - values).square()
    if options.cliprange is not None:
        low, high = batch["old_values"] - options.cliprange, batch["old_values"] + options.cliprange
        clipped = torch.minimum(torch.maximum(values, low), high)
        error = torch.maximum(error, 0.5 * (batch["returns"] - clipped).square())
    return error * options.scale


def value_models() -> Iterator[Candidate]:
    exempt = {"masked-nan": "it masks losses, and not the values that they are computed from"}
    given: dict[str, Any] = {"supports": {"cliprange": ANY, "scale": ANY}, "exempt": exempt}
    yield of_tokens("clamp", "value", "values", of_values(value_by_clamp), **given)
    yield of_tokens("moves", "value", "values", of_values(value_by_moves), total=selected_sum, **given)
    yield of_tokens("minimum", "value", "values", of_values(value_by_minimum), total=sum_of_sequences, **given)
    yield of_tokens("moves", "value", "values", of_values(value_by_moves), formats=DOUBLE, **given)
    yield of_tokens("clamp", "value", "values", of_values(value_by_clamp), formats=LOW, **given)
    yield of_tokens("minimum", "value", "values", of_values(value_by_minimum), formats=COARSE_LOSS, **given)


# Reward models


def _preference(sigmoid: Sigmoid, formats: Formats) -> Candidate:
    def kernel(call: Call) -> Outputs:
        batch, rewards = call.batch(slice(None)), call.to_loss(call.leaves[0])
        chosen, rejected = rewards[0::2], rewards[1::2]
        losses = sigmoid(chosen - rejected)[batch["sample_mask"][0::2]]
        pairs = batch["valid_sequences"].clamp(min=1) / 2
        return Outputs(loss=losses.sum() / pairs.to(losses.dtype))

    return declared(sigmoid.__name__, "preference", "rewards", kernel, formats=formats, axes=("dp",))


def reward_models() -> Iterator[Candidate]:
    for sigmoid in SIGMOIDS:
        yield _preference(sigmoid, FINE)
    yield _preference(SIGMOIDS[0], DOUBLE)
    yield _preference(SIGMOIDS[1], LOW)


KERNELS = (*value_models(), *reward_models())
