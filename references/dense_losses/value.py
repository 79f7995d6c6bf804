# SPDX-License-Identifier: Apache-2.0
"""The clipped squared error of a value model (critic), as in PPO.

    v_clip = clamp(v, v_old - c, v_old + c)
    L = scale / 2 * sum_t m_t max((v - R)^2, (v_clip - R)^2) / N;    without a clip  L = scale / 2 * sum_t m_t (v - R)^2 / N

with v the values, v_old those of the policy's rollout, R the returns, c the clip range and N the number of trained tokens of
the whole batch. The maximum stops the gradient of a value that came nearer to its return by leaving the range, and keeps that
of one that went further away.

NeMo-RL ``MseValueLossFn``. It multiplies masked values by zero, so that NaN there spoils the batch; reports 0 as the
extreme values of a microbatch without trained tokens, which its min and max over microbatches then take for values; and
counts sequences with their padding and masked ones as ``num_valid_samples``, which is left out here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import largest, select, smallest, token_mean


@dataclass(frozen=True, kw_only=True)
class ValueOptions:
    """The options of ``value_loss``; names and defaults are NeMo-RL's."""

    cliprange: float | None = None
    """c, in the unit of the values: how far from its old value a value may move; None for no clip, where NeMo-RL also takes 0."""
    scale: float = 1.0
    """The factor of the loss, beside the 1/2. Metrics other than ``loss`` are without it."""
    epsilon: float = 0.0
    """Added to the number of tokens that the loss and the metrics are divided by: 1e-8 in NeMo-RL."""

    def __post_init__(self) -> None:
        if self.cliprange is not None and not 0 < self.cliprange < float("inf"):
            raise ValueError(f"cliprange is {self.cliprange!r}; expected a finite positive number, or None for no clip")
        for name in ("scale", "epsilon"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a finite number, 0 or larger")


def value_loss(
    *,
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
    options: ValueOptions,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The loss, differentiable in ``values``; ``old_values`` are unused without a clip.

    valid_tokens: N, the number of trained tokens, over every rank and microbatch.

    Metrics, each the sum over ranks of what they return, but for the two extremes: ``loss``; ``vf_clipfrac``, the share of
    tokens whose clipped error is the larger, those without gradient; ``returns_mean``, ``values_mean``; ``returns_sq_mean``, of
    R^2; ``residual_sq_mean``, of (R - v)^2: the moments from which ``explained_variance`` is computed once they are summed;
    ``values_min`` (min over ranks) and ``values_max`` (max), +inf and -inf without a trained token.
    """
    values, old_values, returns = (select(mask, x) for x in (values, old_values, returns))
    # The count in the values' dtype: an integer plus epsilon is a float32, in which 1e-8 vanishes.
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
    """``1 - Var(R - v) / Var(R)``, of the metrics of ``value_loss`` once they are summed over ranks and microbatches.

    1 where the values are the returns, 0 where they explain no more than a constant does; NaN where the returns don't
    vary. It is not linear: a mean of ranks' own is not it. NeMo-RL divides by at least 1e-8.
    """
    variance = moments["returns_sq_mean"] - moments["returns_mean"] ** 2
    residual_variance = moments["residual_sq_mean"] - (moments["returns_mean"] - moments["values_mean"]) ** 2
    return torch.where(variance > 0, 1 - residual_variance / variance, float("nan"))
