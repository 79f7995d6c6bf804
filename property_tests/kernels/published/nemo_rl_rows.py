# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's clipped policy gradient on rows, made again from a description of what it computes.

The description is of its main branch of August 2026 (``nemo_rl/algorithms/loss/loss_functions.py``,
``loss/utils.py`` and ``algorithms/utils.py``). Nothing here is shared with kernels or references.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-8


def without_filtered(logprobs: Tensor) -> Tensor:
    """Makes 0 of -inf, for log-probabilities under the current and under the previous policy.

    NeMo-RL calls this masking out. It changes a mask, too, but does not return that.
    """
    return torch.where(logprobs.isinf(), torch.zeros_like(logprobs), logprobs)


def clipped_pg_on_rows(
    c: Tensor, data: Mapping[str, Tensor], tokens: float, sequences: float, config: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes loss and metrics, but for ``js_divergence_error``, of which ours is another.

    Args:
        c: ``[B, S - 1]``, the log-probabilities of next tokens.
        data: rows ``[B, S]`` of single tokens, whose first column counts for nothing; ``u``
            ``[B, S - 1]``, c without filters; ``sample_mask`` and ``rewards``, ``[B]``.
        tokens: the number of tokens of the batch.
        sequences: the number of sequences of the batch.
        config: what differs from NeMo-RL's defaults, by its names.
    """
    get = {**_DEFAULTS, **config}.__getitem__
    c = without_filtered(c)
    a, p, g, q, of_rows = (data[name][:, 1:] for name in (*_FIELDS, "token_mask"))
    p = c.detach() if get("force_on_policy_ratio") else without_filtered(p)
    sample_mask = data["sample_mask"]
    of_batch = of_rows * sample_mask[:, None]
    metrics = dict[str, Tensor]()

    def of_tokens(x: Tensor) -> Tensor:
        return (x * of_batch).sum() / (tokens + EPSILON)

    def of_each_row(x: Tensor) -> Tensor:
        return (x * of_rows).sum(1) / (of_rows.sum(1) + EPSILON)

    def of_all_rows(x: Tensor) -> Tensor:
        return (x * sample_mask).sum() / (sequences + EPSILON)

    def reduced(x: Tensor) -> Tensor:
        return of_tokens(x) if get("token_level_loss") else of_all_rows(of_each_row(x))

    # Ratios, and the policy loss
    gspo, disabled = get("sequence_level_importance_ratios"), get("disable_ppo_ratio")
    if get("force_on_policy_ratio"):
        ratio = clamped = (c - c.detach()).exp()
    elif disabled:
        ratio = clamped = c
    else:
        ratio = of_each_row(c - p).exp()[:, None].expand_as(c) if gspo else (c - p).exp()
        clamped = ratio.clamp(1 - get("ratio_clip_min"), 1 + get("ratio_clip_max"))
    policy = torch.maximum(-a * ratio, -a * clamped)
    if get("use_cispo"):
        policy = -a * clamped.detach() * c
    if get("ratio_clip_c"):
        policy = torch.where(a < 0, torch.minimum(policy, -a * get("ratio_clip_c")), policy)

    # Importance weights: [B, S - 1], or [B, 1] of sequences
    weight = ((p - g) * of_batch).sum(1, keepdim=True).exp() if gspo else (p - g).exp()
    weight = weight.detach().nan_to_num(0.0, 0.0, 0.0)
    low, high = get("truncated_importance_sampling_ratio_min") or 0.0, get("truncated_importance_sampling_ratio")
    match get("truncated_importance_sampling_type"):
        case "tis":
            metrics["is_oob_ratio"] = of_tokens(((weight < low) | (weight > high)).double())
            weight = weight.clamp(low, high)
        case "icepop":
            inside = (weight >= low) & (weight <= high)
            metrics["is_oob_ratio"] = of_tokens((~inside).double())
            weight = weight * inside
        case "seq-mask-tis":
            geometric = of_each_row(p - g).exp()
            inside = (geometric >= low) & (geometric <= high)
            metrics["is_oob_ratio"] = of_all_rows((~inside).double())
            weight = weight * inside[:, None]
        case _:
            pass
    loss = actor = reduced((weight if get("use_importance_sampling_correction") else 1.0) * policy)
    # [B, 1] times [B] is [B, B]: so a mean over sequences counts each of them once for every one.
    metrics["sampling_importance_ratio"] = of_all_rows(weight) if gspo else of_tokens(weight)

    # The KL penalty, of unfiltered log-probabilities
    u = data.get("u", c)
    score = (u - (g if get("use_on_policy_kl_approximation") else u.detach())).exp().nan_to_num(0.0, 0.0, 0.0)
    d = q - u
    inside = d.abs() <= get("kl_input_clamp_value")
    d = d.clamp(-get("kl_input_clamp_value"), get("kl_input_clamp_value"))
    kl = torch.where(inside, score, score.detach()) * _kl(d, get("reference_policy_kl_type"))
    kl = reduced(kl.clamp(-get("kl_output_clamp_value"), get("kl_output_clamp_value")))
    loss = loss + get("reference_policy_kl_penalty") * kl

    # The NLL of positive examples
    nll = torch.zeros_like(actor)
    if get("positive_example_nll_weight"):
        right = of_batch * (data["rewards"] > 0)[:, None]
        nll = (-c * right).sum() / (right.sum() + EPSILON)
        loss = loss + get("positive_example_nll_weight") * nll

    kind, chosen = get("reference_policy_kl_type"), of_batch.bool()
    metrics |= {
        "kl_penalty": kl,
        "positive_nll_loss": nll,
        "num_valid_samples": sample_mask.sum(),
        "probs_ratio": of_tokens(ratio),
        "probs_ratio_min": ratio[chosen].min(),
        "probs_ratio_max": ratio[chosen].max(),
        "probs_ratio_clamped": of_tokens(clamped),
        "probs_ratio_clamped_min": clamped[chosen].min(),
        "probs_ratio_clamped_max": clamped[chosen].max(),
        "token_mult_prob_error": of_tokens((g - p).abs().exp()),
        "gen_kl_error": of_tokens(_kl(p - g, kind)),
        "policy_kl_error": of_tokens(_kl(g - p, kind)),
        "approx_entropy": -of_tokens((c - g).exp() * c),
    }
    return loss, metrics


def normalisations(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns by which count NeMo-RL says that each metric is divided; its "none" is left out."""
    get = {**_DEFAULTS, **config}.__getitem__
    of_tokens = ("probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "gen_kl_error", "policy_kl_error")
    found = dict.fromkeys((*of_tokens, "js_divergence_error", "approx_entropy"), "tokens")
    found["kl_penalty"] = "tokens" if get("token_level_loss") else "sequences"
    found["sampling_importance_ratio"] = "sequences" if get("sequence_level_importance_ratios") else "tokens"
    if kind := get("truncated_importance_sampling_type"):
        found["is_oob_ratio"] = "sequences" if kind == "seq-mask-tis" else "tokens"
    return found


def _kl(d: Tensor, kind: str) -> Tensor:
    return {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[kind]


_FIELDS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
_DEFAULTS: dict[str, Any] = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
