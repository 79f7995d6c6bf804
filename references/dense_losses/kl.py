# SPDX-License-Identifier: Apache-2.0
"""Estimates of the Kullback-Leibler divergence, token by token, from the sampled tokens' log-probs.

With d = log q(y) - log p(y), where y was sampled from the policy p and q is the reference:

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d

Values: E k1 = E k3 = KL(p || q), while E k2 only approximates it.
Gradients, with the sampled tokens held fixed: E grad k1 = 0, E grad k2 = grad KL(p || q), but
E grad k3 = grad KL(q || p). A weight w = exp(log p - sg(log p)), whose value is 1, adds the score
term that is missing: E grad (w k1) = E grad (w k3) = grad KL(p || q). sg stops the gradient.

Sources: Schulman, "Approximating KL divergence" (2020), for the estimators; NeMo-RL
``calculate_kl`` for the clamps; Tang and Munos 2025 (arXiv 2506.09477) for the weight.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(
    *,
    logprobs: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"],
    kl_type: KLType = "k3",
    weights: Float[Tensor, " tokens"] | None = None,
    input_clamp_value: float | None = None,
    output_clamp_value: float | None = None,
) -> Float[Tensor, " tokens"]:
    """Computes ``clamp(w * k(clamp(d)))`` for each token.

    Args:
        logprobs: log p ``[tokens]``, in nats, of the policy.
        reference_logprobs: log q ``[tokens]``, in nats, of the reference.
        kl_type: The estimator k.
        weights: w ``[tokens]``; None for 1.
        input_clamp_value: Clamps d to plus or minus this many nats. A token beyond the bound has no
            gradient at all, neither through d nor through its weight. None: no clamp.
        output_clamp_value: Clamps the weighted estimate to plus or minus this many nats. None: no
            clamp.

    Returns:
        The estimates ``[tokens]``, in nats.
    """
    d = reference_logprobs - logprobs
    if input_clamp_value is not None:
        if weights is not None:
            weights = torch.where(d.abs() <= input_clamp_value, weights, weights.detach())
        d = d.clamp(-input_clamp_value, input_clamp_value)
    k = -d if kl_type == "k1" else d**2 / 2 if kl_type == "k2" else torch.expm1(d) - d
    if weights is not None:
        k = weights * k
    return k if output_clamp_value is None else k.clamp(-output_clamp_value, output_clamp_value)


def js_estimate(p: Float[Tensor, " tokens"], g: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Computes ``k3(p || m) / 2 + k3(g || m) / 2``, with ``m = log(exp(p) / 2 + exp(g) / 2)``.

    NeMo-RL uses the other sign here, d = p - m and d = g - m, against its own ``calculate_kl`` and
    its comment. That is k3(m || p), and over tokens sampled from g its half for g does not have the
    expectation KL(g || m). Both signs agree to second order in p - g.

    Args:
        p: Log-probs ``[tokens]``, in nats, of the policy before the update.
        g: Log-probs ``[tokens]``, in nats, of the policy that generated.

    Returns:
        Estimates of the Jensen-Shannon divergence ``[tokens]``, in nats.
    """
    m = torch.logaddexp(p, g) - math.log(2)
    return (
        kl_estimate(logprobs=p, reference_logprobs=m, kl_type="k3") / 2
        + kl_estimate(logprobs=g, reference_logprobs=m, kl_type="k3") / 2
    )
