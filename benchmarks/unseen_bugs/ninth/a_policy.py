# SPDX-License-Identifier: Apache-2.0
"""Policy losses of reinforcement learning, right and wrong: actors, KL terms, clips and means."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import ClippedPgLogprobs, GrpoLogits, GrpoLogprobs
from lossgate.options import ClippedPgOptions, GrpoOptions

# An actor that computes log-probabilities from logits, on whole shards.

ACTOR: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"use_rho_correction": False, "beta": 0.0, "temperature": lossgate.ANY},
}


def _gather_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), ids, reduction="none")


def _actor_loss(inputs: GrpoLogits, options: GrpoOptions, bug: str | None = None) -> Tensor:
    logits = inputs.logits
    if bug != "temperature_ignored":
        logits = logits / options.temperature
    log_probs = _gather_log_probs(logits, inputs.labels)
    mask = inputs.mask
    ratio = torch.where(mask, log_probs - inputs.old_logprobs, 0.0).exp()
    advantages = torch.where(mask, inputs.advantages, 0.0)
    clipped = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
    pg_loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(mask, pg_loss, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("grpo", **ACTOR)
def actor_right(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """Divides the logits by the temperature of the rollout."""
    return _actor_loss(inputs, options)


# The actor's log-probabilities come from raw logits, while those of the rollout were made at its
# temperature. The author would divide the logits by the temperature before log_softmax.
# (slime)
@lossgate.candidate("grpo", **ACTOR)
def actor_at_temperature_one(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """Log-probabilities of the policy ignore the temperature."""
    return _actor_loss(inputs, options, bug="temperature_ignored")


# The loss of a GRPO trainer with a KL term and truncated importance sampling.

PENALISED: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"beta": lossgate.ANY, "kl_estimator": (1, 2), "use_rho_correction": lossgate.ANY},
}


def _kl_term(new: Tensor, reference: Tensor, estimator: int) -> Tensor:
    diff = (new - reference).clamp(-40.0, 40.0)
    return diff.square() / 2 if estimator == 1 else torch.expm1(-diff) + diff


def _penalised_loss(inputs: GrpoLogprobs, options: GrpoOptions, bug: str | None = None) -> Tensor:
    mask = inputs.mask
    new, old, reference, sampled, advantages = (
        torch.where(mask, values.float(), 0.0)
        for values in (
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.reference_logprobs,
            inputs.vllm_logprobs,
            inputs.advantages,
        )
    )
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if options.use_rho_correction:
        gap = torch.where(sampled.isnan(), 0.0, old - sampled).clamp(-10.0, 10.0)
        loss = loss * gap.exp().clamp(max=options.rho_clamp_upper_bound)
    if options.beta:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bug != "kl_without_grad"):
            kl = _kl_term(new, reference, options.kl_estimator)
        loss = loss + options.beta * kl
    return torch.where(mask, loss, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("grpo", **PENALISED)
def penalised_right(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """Adds a KL term that carries gradients."""
    return _penalised_loss(inputs, options)


# The KL estimates are made under no_grad together with the statistics that are logged, so the loss
# has the penalty but its gradient does not pull to the reference. The author would compute the
# estimate of the loss outside of that block. (open-instruct)
@lossgate.candidate("grpo", **PENALISED)
def kl_under_no_grad(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """The KL term has a value but no gradient."""
    return _penalised_loss(inputs, options, bug="kl_without_grad")


# GSPO: one ratio for each sequence, and a mean over sequences.

SEQUENCES: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "reference_policy_kl_penalty": 0.0,
        "ratio_clip_min": lossgate.ANY,
        "ratio_clip_max": lossgate.ANY,
    },
}


def _gspo_loss(inputs: ClippedPgLogprobs, options: ClippedPgOptions, bug: str | None = None) -> Tensor:
    action_mask = inputs.mask & inputs.sample_mask[inputs.sequence]
    sequences = len(inputs.sample_mask)
    zeros = torch.zeros(sequences, device=inputs.logprobs.device)
    counts = zeros.index_add(0, inputs.sequence, action_mask.float()).clamp(min=1)
    log_ratio = torch.where(action_mask, inputs.logprobs.float() - inputs.prev_logprobs, 0.0)
    sequence_log_ratio = zeros.index_add(0, inputs.sequence, log_ratio) / counts
    ratio = sequence_log_ratio.exp()[inputs.sequence]
    advantages = torch.where(action_mask, inputs.advantages, 0.0)
    surr1 = ratio * advantages
    surr2 = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max) * advantages
    loss = torch.where(action_mask, -torch.minimum(surr1, surr2), 0.0)
    if bug == "token_mean":
        return loss.sum() / inputs.valid_tokens.clamp(min=1)
    means = zeros.index_add(0, inputs.sequence, loss) / counts
    return means.sum() / inputs.valid_sequences.clamp(min=1)


@lossgate.candidate("clipped_pg", **SEQUENCES)
def gspo_right(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
    """Every sequence weighs the same."""
    return _gspo_loss(inputs, options)


# The ratios are those of sequences, but the loss is still the mean over all tokens, so long
# sequences weigh more. The author would switch the token-level loss off where the policy loss
# is GSPO. (OpenRLHF)
@lossgate.candidate("clipped_pg", **SEQUENCES)
def gspo_token_mean(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
    """Sequences weigh by their number of tokens."""
    return _gspo_loss(inputs, options, bug="token_mean")


# PPO with a clip that may differ on its two sides, and a dual clip.

CLIPPED: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {
        "reference_policy_kl_penalty": 0.0,
        "ratio_clip_min": lossgate.ANY,
        "ratio_clip_max": lossgate.ANY,
        "ratio_clip_c": lossgate.ANY,
    },
}


def _policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual: float | None
) -> Tensor:
    ratio = (logprobs - old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + eps_high))
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def _clipped_loss(inputs: ClippedPgLogprobs, options: ClippedPgOptions, bug: str | None = None) -> Tensor:
    mask = inputs.mask & inputs.sample_mask[inputs.sequence]
    new, old, advantages = (
        torch.where(mask, values, 0.0) for values in (inputs.logprobs, inputs.prev_logprobs, inputs.advantages)
    )
    clip = options.ratio_clip_min, options.ratio_clip_max
    eps_low, eps_high = reversed(clip) if bug == "clip_sides_swapped" else clip
    loss = _policy_loss(new, old, advantages, eps_low, eps_high, options.ratio_clip_c)
    return torch.where(mask, loss, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("clipped_pg", **CLIPPED)
def clipped_right(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
    """Clips from below and above, each with its own bound."""
    return _clipped_loss(inputs, options)


# The two bounds are passed in the wrong order, which shows only if they differ: ratios may fall by
# eps_high and rise by eps_low. The author would pass them by name.
# (of no one project)
@lossgate.candidate("clipped_pg", **CLIPPED)
def clip_bounds_in_wrong_order(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
    """The lower bound of the clip is the upper one's, and the other way round."""
    return _clipped_loss(inputs, options, bug="clip_sides_swapped")


# A trainer with rows of padded samples, and means over the tokens of each.

ROWS: dict[str, Any] = {
    "head": "logprobs",
    "tokens": "rows",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"token_level_loss": False, "reference_policy_kl_penalty": 0.0},
}


def _masked_normalize(tensor: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Divides each entry by the number of those that count along ``dim``."""
    return torch.where(mask, tensor, 0.0) / mask.sum(dim=dim, keepdim=True).clamp(min=1)


def _rows_loss(inputs: ClippedPgLogprobs, options: ClippedPgOptions, bug: str | None = None) -> Tensor:
    rows, width = inputs.input_ids.shape
    if rows == 0 or width < 2:
        return inputs.logprobs[:0].float().sum()
    lengths, padded = inputs.cu_seqlens.diff().tolist(), inputs.cu_seqlens_padded.diff().tolist()
    parts = inputs.logprobs.split(padded)
    shifted = [F.pad(part[:length], (0, width - length)) for part, length in zip(parts, lengths, strict=True)]
    new = torch.stack(shifted)[:, :-1]
    mask = inputs.mask[:, 1:] & inputs.sample_mask[:, None]
    new, old, advantages = (
        torch.where(mask, values, 0.0) for values in (new, inputs.prev_logprobs[:, 1:], inputs.advantages[:, 1:])
    )
    loss = _policy_loss(new, old, advantages, options.ratio_clip_min, options.ratio_clip_max, None)
    loss = _masked_normalize(loss, mask, dim=0 if bug == "rows_normalised_by_column" else 1)
    return loss.sum() / inputs.valid_sequences.clamp(min=1)


@lossgate.candidate("clipped_pg", **ROWS)
def rows_right(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
    """Divides the loss of a token by the tokens of its sample."""
    return _rows_loss(inputs, options)


# The normaliser counts along the batch, not along the tokens of a sample, so a token's loss is
# divided by the number of samples that have a token at its position. The author would count over
# the last axis, and keep it for the division. (OpenRLHF)
@lossgate.candidate("clipped_pg", **ROWS)
def normalised_along_batch(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
    """The mean is over samples at a position, in place of tokens of a sample."""
    return _rows_loss(inputs, options, bug="rows_normalised_by_column")


BUGS = {
    "actor_at_temperature_one": ("single",),
    "kl_under_no_grad": ("single",),
    "gspo_token_mean": ("single",),
    "clip_bounds_in_wrong_order": ("single",),
    "normalised_along_batch": ("single",),
}
RIGHT = ("actor_right", "penalised_right", "gspo_right", "clipped_right", "rows_right")
