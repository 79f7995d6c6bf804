# SPDX-License-Identifier: Apache-2.0
"""The clipped squared error of a value model (critic), as in PPO.

    v_clip = clamp(v, v_old - c, v_old + c)
    L = scale / 2 * sum_t m_t max((v - R)^2, (v_clip - R)^2) / N
    L = scale / 2 * sum_t m_t (v - R)^2 / N                         without a clip

v are the values, v_old the values at the time of the rollout, R the returns, c the clip range, m
the mask of trained tokens and N their number in the whole batch. Where the clipped error is the
larger one, the maximum stops the gradient; this happens to values that left the range and are
nearer to their return than the edge of the range is.

Source: NeMo-RL ``MseValueLossFn``, which differs in three ways:

- It multiplies masked values by zero, so that a NaN among them spoils the batch.
- It reports 0 as the extreme values of a microbatch without trained tokens, and its minimum and
  maximum over microbatches then take this 0 for a value.
- It reports ``num_valid_samples``, which counts all rows, masked ones too. We leave it out.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import largest, select, smallest, token_mean


def value_loss(
    *,
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
    options: Any,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Computes the clipped value loss and its metrics.

    Args:
        values: v ``[tokens]``. The loss is differentiable in it.
        old_values: v_old ``[tokens]``, unused without a clip.
        returns: R ``[tokens]``.
        mask: m ``[tokens]``, true at trained tokens.
        valid_tokens: N, the number of trained tokens over every rank and microbatch.
        options: The options of ``lossgate.options.ValueOptions``, as attributes.

    Returns:
        The loss, in the squared unit of the values, and the metrics, which carry no gradient. Ranks
        sum all metrics but the two extremes:

        - ``loss``;
        - ``vf_clipfrac``, the share of tokens whose clipped error is the larger one: these have no
          gradient;
        - ``returns_mean``, ``values_mean``, ``returns_sq_mean`` (of R^2) and ``residual_sq_mean``
          (of (R - v)^2). Once summed, ``explained_variance`` is computed from these moments;
        - ``values_min`` (ranks take the minimum) and ``values_max`` (the maximum), which are +inf
          and -inf without a trained token.
    """
    values, old_values, returns = (select(mask, x) for x in (values, old_values, returns))
    # The count needs the dtype of the values: an int64 plus epsilon is a float32, which loses 1e-8.
    mean = partial(token_mean, mask=mask, count=valid_tokens.to(values.dtype), epsilon=options.epsilon)

    error = clipped_error = (values - returns) ** 2
    if options.cliprange is not None:
        clipped = torch.clamp(values, old_values - options.cliprange, old_values + options.cliprange)
        clipped_error = (clipped - returns) ** 2
    loss = options.scale / 2 * mean(torch.maximum(error, clipped_error))
    metrics = {
        "loss": loss,
        "vf_clipfrac": mean((clipped_error > error).to(values.dtype)),
        "returns_mean": mean(returns),
        "values_mean": mean(values),
        "returns_sq_mean": mean(returns**2),
        "residual_sq_mean": mean(error),
        "values_min": smallest(values, mask),
        "values_max": largest(values, mask),
    }
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def explained_variance(moments: Mapping[str, Float[Tensor, ""]]) -> Float[Tensor, ""]:
    """Computes ``1 - Var(R - v) / Var(R)`` from summed moments.

    It is not linear: the mean of the explained variances of ranks is a different number.

    Args:
        moments: The metrics of ``value_loss``, summed over ranks and microbatches.

    Returns:
        A scalar: 1 if the values are the returns, 0 if they explain no more than a constant does,
        NaN if the returns do not vary. NeMo-RL divides by at least 1e-8 instead.
    """
    variance = moments["returns_sq_mean"] - moments["returns_mean"] ** 2
    residual_variance = moments["residual_sq_mean"] - (moments["returns_mean"] - moments["values_mean"]) ** 2
    return torch.where(variance > 0, 1 - residual_variance / variance, float("nan"))
