# SPDX-License-Identifier: Apache-2.0
"""Policy gradients: specs ``clipped_pg`` and ``grpo``, with the options that most trainers use."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_bank.right.formats import COARSE_LOGITS, COARSE_LOSS, DOUBLE, LOW_LOSS, TRAINED
from kernel_bank.right.kernel import Batch, of_tokens, of_values, scaled_sum, selected_sum, sum_of_sequences, through
from kernel_bank.right.logprobs import (
    cross_entropy,
    label_less_logsumexp,
    log_softmax,
    online,
    parallel_shifted,
    row_by_row,
)
from kernel_bank.right.loops import IN_FORWARD, RECOMPUTED
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY

Surrogate = Callable[[Tensor, Tensor, float, float], Tensor]
"""``(ratio, advantages, lowest, highest ratio) -> the clipped loss of each token``."""


def by_maximum(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(low, high))


def by_minimum(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, torch.clamp(ratio, min=low, max=high) * advantages)


def by_where(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """A token has a gradient unless its ratio is clipped on the side that its advantage pushes."""
    bounded = torch.where(ratio > high, high, torch.where(ratio < low, low, ratio.detach()))
    clipped = torch.where(advantages > 0, ratio > high, ratio < low)
    return -torch.where(clipped, bounded * advantages, ratio * advantages)


def by_hinge(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The edge that counts is chosen by the sign of the advantage."""
    gains = torch.where(advantages >= 0, ratio.clamp(max=high), ratio.clamp(min=low))
    return -gains * advantages


# NeMo-RL's clipped policy gradient


def k3_by_expm1(d: Tensor) -> Tensor:
    return torch.expm1(d) - d


def k3_by_exp(d: Tensor) -> Tensor:
    """As most trainers write it. Near 0 it loses digits."""
    return torch.exp(d) - 1 - d


def _bounded(value: Tensor, bound: float | None) -> Tensor:
    return value if bound is None else value.clamp(-bound, bound)


def _penalty(logprobs: Tensor, batch: Batch, options: Any, k3: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the KL penalty of each token, whose score has a gradient, too."""
    if options.reference_policy_kl_penalty == 0:
        return torch.zeros_like(logprobs)
    distance, bound = batch["reference_logprobs"] - logprobs, options.kl_input_clamp_value
    score = (logprobs - logprobs.detach()).exp()
    if bound is not None:
        score = torch.where(distance.abs() <= bound, score, 1.0)
    estimate = _bounded(score * k3(_bounded(distance, bound)), options.kl_output_clamp_value)
    return options.reference_policy_kl_penalty * estimate


def _clipped_pg(surrogate: Surrogate, k3: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Batch, Any], Tensor]:
    def loss(logprobs: Tensor, batch: Batch, options: Any) -> Tensor:
        batch, logprobs, trained = _trained(logprobs, batch, batch["mask"] & batch["sample_mask"][batch["sequence"]])
        advantages, ratio = batch["advantages"], (logprobs - batch["prev_logprobs"]).exp()
        policy = surrogate(ratio, advantages, 1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
        if options.ratio_clip_c is not None:
            bounded = torch.min(policy, -advantages * options.ratio_clip_c)
            policy = torch.where(advantages < 0, bounded, policy)
        if options.use_importance_sampling_correction:
            weight = (batch["prev_logprobs"] - batch["generation_logprobs"]).exp()
            policy = policy * torch.where(weight.isfinite(), weight, 0.0)
        return _back(policy + _penalty(logprobs, batch, options, k3), trained)

    return loss


_PER_TOKEN = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs", "old_logprobs")


def _trained(logprobs: Tensor, batch: Batch, trained: Tensor) -> tuple[Mapping[str, Any], Tensor, Tensor]:
    """Returns the fields and log-probabilities of trained tokens alone, and which these are."""
    own = {name: batch[name][trained] for name in _PER_TOKEN if name in batch}
    return {**batch, **own}, logprobs[trained], trained


def _back(losses: Tensor, trained: Tensor) -> Tensor:
    """Returns losses of trained tokens at their places among all tokens."""
    return losses.new_zeros(len(trained)).masked_scatter(trained, losses)


_CLIPPED: dict[str, Any] = {
    "supports": dict.fromkeys(
        (
            "ratio_clip_min",
            "ratio_clip_max",
            "ratio_clip_c",
            "reference_policy_kl_penalty",
            "kl_input_clamp_value",
            "kl_output_clamp_value",
            "use_importance_sampling_correction",
        ),
        ANY,
    )
}


# open-instruct's GRPO


def _grpo(surrogate: Surrogate, *, by_exp: bool = False) -> Callable[[Tensor, Batch, Any], Tensor]:
    def loss(logprobs: Tensor, batch: Batch, options: Any) -> Tensor:
        batch, logprobs, trained = _trained(logprobs, batch, batch["mask"])
        ratio = (logprobs - batch["old_logprobs"]).exp()
        if options.loss_fn == "cispo":
            policy = -batch["advantages"] * ratio.detach().clamp(max=1 + options.clip_higher) * logprobs
        else:
            policy = surrogate(ratio, batch["advantages"], 1 - options.clip_lower, 1 + options.clip_higher)
        d = (logprobs - batch["reference_logprobs"]).clamp(-40.0, 40.0)
        if options.kl_estimator == 2:
            kl = k3_by_exp(-d) if by_exp else k3_by_expm1(-d)
        else:
            kl = (d, 0.5 * d.square(), None, ratio * d)[options.kl_estimator]
        return _back(policy + options.beta * kl, trained)

    return loss


_GRPO: dict[str, Any] = {
    "supports": {
        **dict.fromkeys(("clip_lower", "clip_higher", "beta", "kl_estimator", "loss_fn"), ANY),
        "use_rho_correction": False,
    }
}


def _of(spec: str, losses: Mapping[str, Callable[[Tensor, Batch, Any], Tensor]], given: Any) -> Iterator[Candidate]:
    """Yields kernels of a spec for each way to write its loss, and each head."""
    first, second, third, fourth = losses.values()
    names = tuple(losses)
    yield of_tokens(names[0], spec, "hidden", through(log_softmax, first), formats=TRAINED, **given)
    yield of_tokens(names[1], spec, "hidden", through(cross_entropy, second), total=scaled_sum, **given)
    yield of_tokens(names[2], spec, "hidden", through(row_by_row, third), formats=TRAINED, loop=RECOMPUTED, **given)
    yield of_tokens(names[3], spec, "hidden", through(online, fourth), loop=IN_FORWARD, **given)
    yield of_tokens(names[1], spec, "hidden", through(log_softmax, second), formats=COARSE_LOGITS, **given)
    yield of_tokens(names[2], spec, "logits", through(cross_entropy, third), formats=COARSE_LOGITS, **given)
    yield of_tokens(names[0], spec, "hidden", through(online, first), formats=COARSE_LOSS, **given)
    parallel = through(parallel_shifted, second)
    yield of_tokens("parallel", spec, "hidden", parallel, parallel=True, formats=TRAINED, **given)
    yield of_tokens("parallel", spec, "logits", parallel, parallel=True, **given)
    yield of_tokens(names[0], spec, "logits", through(label_less_logsumexp, first), **given)
    yield of_tokens(names[3], spec, "logits", through(log_softmax, fourth), formats=LOW_LOSS, **given)
    yield of_tokens(names[0], spec, "logprobs", of_values(first), total=selected_sum, **given)
    yield of_tokens(names[1], spec, "logprobs", of_values(second), total=sum_of_sequences, **given)
    yield of_tokens(names[2], spec, "logprobs", of_values(third), formats=DOUBLE, **given)
    yield of_tokens(names[3], spec, "logprobs", of_values(fourth), formats=LOW_LOSS, **given)
    yield of_tokens(names[0], spec, "logprobs", of_values(first), formats=COARSE_LOSS, **given)


KERNELS = (
    *_of(
        "clipped_pg",
        {
            "maximum": _clipped_pg(by_maximum, k3_by_expm1),
            "minimum": _clipped_pg(by_minimum, k3_by_exp),
            "where": _clipped_pg(by_where, k3_by_expm1),
            "hinge": _clipped_pg(by_hinge, k3_by_exp),
        },
        _CLIPPED,
    ),
    *_of(
        "grpo",
        {
            "maximum": _grpo(by_maximum),
            "minimum": _grpo(by_minimum, by_exp=True),
            "where": _grpo(by_where),
            "hinge": _grpo(by_hinge, by_exp=True),
        },
        _GRPO,
    ),
)
