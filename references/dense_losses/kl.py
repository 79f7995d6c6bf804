# SPDX-License-Identifier: Apache-2.0
"""Estimates, token by token, of the Kullback-Leibler divergence of a policy from a reference, from the sampled tokens' log-probs.

With d = log q(y) - log p(y), where y was sampled from the policy p and q is the reference:

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d

Values: E k1 = E k3 = KL(p || q), while E k2 is only near it. Gradients: E grad k1 = 0 and E grad k2 = grad KL, but
E grad k3 = grad KL(q || p), since the tokens' own distribution is held fixed. A weight w = exp(log p - sg(log p)), of value 1, adds
the missing score term: E grad (w k1) = E grad (w k3) = grad KL.

Sources: Schulman, "Approximating KL divergence" (2020); NeMo-RL ``calculate_kl``; arXiv 2506.09477 for the weight.
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
    """``clamp(w * k(clamp(d)))`` in nats, for each token; of the policy ``logprobs`` from the reference.

    ``input_clamp_value`` bounds d to +- that many nats; a token whose d it changes has no gradient at all, neither through d nor through
    its weight. ``output_clamp_value`` bounds the weighted estimate. None: no bound.
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
    """``k3(p || m) / 2 + k3(g || m) / 2`` in nats, with m the mixture ``log(exp(p) / 2 + exp(g) / 2)``, for each token.

    NeMo-RL has d = p - m and g - m here, the other sign, against its own ``calculate_kl`` and comment: that is k3(m || p), and its half for g
    does not have the expectation KL(g || m) over tokens sampled from g. Both signs agree to second order in p - g.
    """
    m = torch.logaddexp(p, g) - math.log(2)
    return (
        kl_estimate(logprobs=p, reference_logprobs=m, kl_type="k3") / 2
        + kl_estimate(logprobs=g, reference_logprobs=m, kl_type="k3") / 2
    )
