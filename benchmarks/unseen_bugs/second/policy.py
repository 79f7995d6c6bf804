# SPDX-License-Identifier: Apache-2.0
"""Wrong policy losses from log-probabilities, recreated from public reports."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate

FLOAT32 = ("float32",)


class _SumOverCp(torch.autograd.Function):
    """Adds up parts of all context-parallel ranks, each of which uses the sum for its own loss."""

    @staticmethod
    def forward(ctx, part, group, whole_backward):
        ctx.group, ctx.whole_backward = group, whole_backward
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream):
        total = upstream.clone()
        if ctx.whole_backward:
            dist.all_reduce(total, group=ctx.group)
        return total, None, None


def _kl(log_ratio: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    return log_ratio.expm1() - log_ratio


def _clipped_pg(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    cp = mesh.get_group("cp")
    counted = inputs.mask & inputs.sample_mask[inputs.sequence]
    current, previous, sampled, reference, advantages = (
        torch.where(counted, x.float(), 0.0)
        for x in (
            inputs.logprobs,
            inputs.prev_logprobs,
            inputs.generation_logprobs,
            inputs.reference_logprobs,
            inputs.advantages,
        )
    )
    behaviour = previous
    if options.force_on_policy_ratio:
        previous = current.detach()
        behaviour = current if bug == "attached weight" else previous

    sequences = len(inputs.sample_mask)

    def per_sequence(x: Tensor) -> Tensor:
        local = x.new_zeros(sequences).index_add(0, inputs.sequence, torch.where(counted, x, 0.0))
        return _SumOverCp.apply(local, cp, bug != "own tokens alone")

    with torch.no_grad():
        lengths = per_sequence(counted.float()).clamp(min=1)

    # The ratio, of tokens or of sequences
    log_ratio = current - previous
    log_weight = behaviour - sampled
    if options.sequence_level_importance_ratios:
        if not options.force_on_policy_ratio:
            log_ratio = (per_sequence(log_ratio) / lengths)[inputs.sequence]
        with torch.no_grad():
            log_weight = per_sequence(log_weight)[inputs.sequence]
    ratio = torch.where(counted, log_ratio.exp(), 0.0)
    clamped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    policy = torch.maximum(-advantages * ratio, -advantages * clamped)
    if options.use_importance_sampling_correction:
        weight = log_weight.exp()
        weight = torch.where(weight.isfinite(), weight, 0.0)
        policy = policy * (weight if bug == "attached weight" else weight.detach())

    # The penalty, whose weight is 1 and adds the gradient of a score term
    to_reference = reference - current
    score = torch.ones_like(current) if bug == "weight of ones" else (current - current.detach()).exp()
    if options.kl_input_clamp_value is not None:
        score = torch.where(to_reference.abs() <= options.kl_input_clamp_value, score, 1.0)
        to_reference = to_reference.clamp(-options.kl_input_clamp_value, options.kl_input_clamp_value)
    kl = score * _kl(to_reference, options.reference_policy_kl_type)
    if options.kl_output_clamp_value is not None:
        kl = kl.clamp(-options.kl_output_clamp_value, options.kl_output_clamp_value)

    tokens = inputs.valid_tokens.clamp(min=1)
    if options.token_level_loss:
        share = counted / tokens
    else:
        share = counted / lengths[inputs.sequence] / inputs.valid_sequences.clamp(min=1)
    penalty = torch.where(counted, kl * share, 0.0).sum()
    loss = torch.where(counted, policy * share, 0.0).sum() + options.reference_policy_kl_penalty * penalty
    if options.positive_example_nll_weight:
        positive = counted & (inputs.rewards[inputs.sequence] > 0)
        total = -torch.where(positive, current, 0.0).sum()
        if bug == "own count":
            nll = total / positive.sum().clamp(min=1) / (mesh.get_group("dp").size() * cp.size())
        else:
            nll = total / inputs.positive_tokens.clamp(min=1)
        loss = loss + options.positive_example_nll_weight * nll

    return lossgate.Outputs(loss=loss, metrics=_extremes(ratio.detach(), clamped.detach(), counted, bug))


def _extremes(ratio: Tensor, clamped: Tensor, counted: Tensor, bug: str) -> dict[str, Tensor]:
    metrics = {}
    for name, x in (("probs_ratio", ratio), ("probs_ratio_clamped", clamped)):
        x = x[counted]
        if len(x):
            metrics |= {f"{name}_min": x.amin(), f"{name}_max": x.amax()}
        elif bug == "zero for nothing":
            metrics |= {f"{name}_min": x.new_zeros(()), f"{name}_max": x.new_zeros(())}
        else:
            metrics |= {f"{name}_min": x.new_tensor(torch.inf), f"{name}_max": x.new_tensor(-torch.inf)}
    return metrics


_PPO = dict.fromkeys(
    (
        "token_level_loss",
        "ratio_clip_min",
        "ratio_clip_max",
        "reference_policy_kl_penalty",
        "reference_policy_kl_type",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
        "sequence_level_importance_ratios",
        "use_importance_sampling_correction",
        "force_on_policy_ratio",
        "positive_example_nll_weight",
    ),
    lossgate.ANY,
)


@lossgate.candidate("clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_PPO)
def right_clipped_pg(inputs, options, mesh):
    """Computes PPO, GRPO and GSPO with a penalty, and all counts are those of the whole batch."""
    return _clipped_pg(inputs, options, mesh)


_ON_POLICY = _PPO | {"force_on_policy_ratio": True}


@lossgate.candidate("clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_ON_POLICY)
def right_on_policy_pg(inputs, options, mesh):
    """Takes the policy itself for the one before the update, detached in ratio and weight."""
    return _clipped_pg(inputs, options, mesh)


@lossgate.candidate("clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_ON_POLICY)
def sampler_weight_keeps_gradient(inputs, options, mesh):
    """Under a forced on-policy ratio the weight towards the sampler is not detached, and passes
    a gradient on.
    """
    return _clipped_pg(inputs, options, mesh, bug="attached weight")


@lossgate.candidate("clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_PPO)
def sequence_ratio_gradient_of_own_part(inputs, options, mesh):
    """The sum of a sequence's log-ratios is reduced over cp in forward alone, so gradients miss
    the others' losses.

    Along context parallelism and for GSPO.
    """
    return _clipped_pg(inputs, options, mesh, bug="own tokens alone")


@lossgate.candidate("clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_PPO)
def kl_without_score_term(inputs, options, mesh):
    """The KL penalty is weighted by a constant 1, where a ratio to itself should add the
    score's gradient.
    """
    return _clipped_pg(inputs, options, mesh, bug="weight of ones")


@lossgate.candidate("clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_PPO)
def positive_nll_by_own_count(inputs, options, mesh):
    """The NLL of positive examples is divided by each rank's own count, and averaged over the
    ranks.
    """
    return _clipped_pg(inputs, options, mesh, bug="own count")


@lossgate.candidate("clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_PPO)
def idle_rank_reports_ratio_zero(inputs, options, mesh):
    """A rank without trained tokens reports 0 as its smallest and largest ratio, which is then
    the smallest of all.
    """
    return _clipped_pg(inputs, options, mesh, bug="zero for nothing")


# DAPO with a backward of its own


class _Dapo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs, old, advantages, lower, higher, bug):
        ratio = (logprobs - old).exp()
        ctx.save_for_backward(ratio, advantages)
        ctx.bounds = (1 - higher, 1 + lower) if bug == "bounds swapped" else (1 - lower, 1 + higher)
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - lower, 1 + higher))

    @staticmethod
    def backward(ctx, upstream):
        ratio, advantages = ctx.saved_tensors
        low, high = ctx.bounds
        moves = torch.where(advantages > 0, ratio <= high, ratio >= low)
        return torch.where(moves, -advantages * ratio, 0.0) * upstream, *(None,) * 5


def _grpo(inputs: Any, options: Any, bug: str = "") -> Tensor:
    mask = inputs.mask
    logprobs, old, reference, advantages = (
        torch.where(mask, x.float(), 0.0)
        for x in (inputs.logprobs, inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages)
    )
    policy = _Dapo.apply(logprobs, old, advantages, options.clip_lower, options.clip_higher, bug)
    d = (logprobs - reference).clamp(-40, 40)
    total = torch.where(mask, policy + options.beta * (torch.expm1(-d) + d), 0.0).sum()
    return options.loss_scale * total / inputs.valid_tokens.clamp(min=1)


_DAPO = dict.fromkeys(("clip_lower", "clip_higher", "beta", "loss_scale"), lossgate.ANY)
_DAPO["use_rho_correction"] = False


@lossgate.candidate("grpo", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DAPO)
def right_dapo(inputs, options, mesh):
    """Clips at the same bounds in forward and in backward."""
    return _grpo(inputs, options)


@lossgate.candidate("grpo", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DAPO)
def clip_bounds_swapped_in_backward(inputs, options, mesh):
    """Backward takes the lower clip range for the higher one and the other way round, so other
    tokens are clipped.

    In backward alone.
    """
    return _grpo(inputs, options, bug="bounds swapped")


BUGS = {
    "sampler_weight_keeps_gradient": ("single", "dp=2"),
    "sequence_ratio_gradient_of_own_part": ("cp=2",),
    "kl_without_score_term": ("single", "cp=2"),
    "positive_nll_by_own_count": ("dp=2", "cp=2"),
    "idle_rank_reports_ratio_zero": ("dp=2", "cp=2"),
    "clip_bounds_swapped_in_backward": ("single", "cp=2"),
}
RIGHT = ("right_clipped_pg", "right_on_policy_pg", "right_dapo")
