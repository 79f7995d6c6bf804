# SPDX-License-Identifier: Apache-2.0
"""Policy losses on log-probabilities: a dual clip, a KL term in the loss, and micro-batches.

They are written as trainers write them: slime's clipped loss, NeMo-RL's penalty, verl's actor.
"""

import torch
import torch.distributed as dist

import lossgate

ANY = lossgate.ANY


def trained(inputs):
    return inputs.mask & inputs.sample_mask[inputs.sequence]


def compute_policy_loss(ratio, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
    """The clipped loss of each token, bounded by ``eps_clip_c`` where the advantage is negative."""
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    if eps_clip_c is None:
        return clip_pg_losses1
    clip_pg_losses2 = torch.minimum(-eps_clip_c * advantages, clip_pg_losses1)
    return torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1)


def slime_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "ratio_clip_min": ANY,
            "ratio_clip_max": ANY,
            "ratio_clip_c": ANY,
            "reference_policy_kl_penalty": 0.0,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = trained(inputs)
        ratio = torch.where(mask, inputs.logprobs - inputs.prev_logprobs, 0.0).exp()
        advantages = torch.where(mask, inputs.advantages, 0.0)
        if bug == "dual_clip_not_forwarded":
            losses = compute_policy_loss(ratio, advantages, options.ratio_clip_min, options.ratio_clip_max)
        else:
            losses = compute_policy_loss(
                ratio, advantages, options.ratio_clip_min, options.ratio_clip_max, options.ratio_clip_c
            )
        return torch.where(mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


slime = slime_of(None, "slime")

# The loss function takes the bound of the dual clip, but its caller does not pass it, so its
# default of None holds and no loss of a negative advantage is bounded. The author would have to
# forward eps_clip_c. (slime)
dual_clip_not_forwarded = slime_of("dual_clip_not_forwarded", "dual_clip_not_forwarded")


def calculate_kl(logprobs, reference, weights, options):
    d = reference - logprobs
    if options.kl_input_clamp_value is not None:
        bound = options.kl_input_clamp_value
        weights = torch.where(d.abs() <= bound, weights, weights.detach())
        d = d.clamp(-bound, bound)
    if options.reference_policy_kl_type == "k1":
        kl = -d
    elif options.reference_policy_kl_type == "k2":
        kl = d.square() / 2
    else:
        kl = torch.expm1(d) - d
    kl = weights * kl
    bound = options.kl_output_clamp_value
    return kl if bound is None else kl.clamp(-bound, bound)


def nemo_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "ratio_clip_min": ANY,
            "ratio_clip_max": ANY,
            "reference_policy_kl_penalty": ANY,
            "reference_policy_kl_type": ANY,
            "kl_input_clamp_value": ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = trained(inputs)
        logprobs = torch.where(mask, inputs.logprobs, 0.0)
        prev, reference, advantages = (
            torch.where(mask, x, 0.0) for x in (inputs.prev_logprobs, inputs.reference_logprobs, inputs.advantages)
        )
        ratio = (logprobs - prev).exp()
        actor = compute_policy_loss(ratio, advantages, options.ratio_clip_min, options.ratio_clip_max)
        kl = torch.zeros_like(logprobs)
        if options.reference_policy_kl_penalty != 0:
            if bug == "kl_without_score_term":
                weights = torch.ones_like(logprobs)
            else:
                weights = (logprobs - logprobs.detach()).exp()
            kl = options.reference_policy_kl_penalty * calculate_kl(logprobs, reference, weights, options)
        return torch.where(mask, actor + kl, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


nemo = nemo_of(None, "nemo")

# The KL estimate is weighted by ones. Its value is right, but the tokens are samples of the policy
# itself, and the gradient through their probabilities (the score term) is missing. The author
# would have to weight by exp(x - x.detach()), whose value is 1. (NeMo-RL)
kl_weighed_by_ones = nemo_of("kl_without_score_term", "kl_weighed_by_ones")

MICRO_BATCH = 2  # sequences


def verl_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp",),
        dtypes=("float32",),
        supports={"clip_lower": ANY, "clip_higher": ANY, "use_rho_correction": False, "beta": 0.0},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask
        ratio = torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0).exp()
        advantages = torch.where(mask, inputs.advantages, 0.0)
        rows = torch.tensor(inputs.cu_seqlens.numel() - 1)
        mini_batch_size = rows.clone()
        dist.all_reduce(mini_batch_size, group=mesh.get_group("dp"))
        policy_loss = 0.0 * ratio.sum()
        for first in range(0, int(rows), MICRO_BATCH):
            micro = (inputs.sequence >= first) & (inputs.sequence < first + MICRO_BATCH)
            losses = compute_policy_loss(ratio[micro], advantages[micro], options.clip_lower, options.clip_higher)
            response_mask = mask[micro]
            tokens = response_mask.sum()
            token_mean = torch.where(response_mask, losses, 0.0).sum() / tokens.clamp(min=1)
            if bug == "token_mean_by_samples":
                loss_scale_factor = min(MICRO_BATCH, int(rows) - first) / mini_batch_size
            else:
                loss_scale_factor = tokens / inputs.valid_tokens.clamp(min=1)
            policy_loss = policy_loss + token_mean * loss_scale_factor
        return policy_loss

    return kernel


verl = verl_of(None, "verl")

# The mean over the tokens of a micro-batch is scaled by the micro-batch's share of the samples,
# so tokens of micro-batches with long responses count less than others. The author would have to
# scale a mean over tokens by the share of the trained tokens. (verl)
token_mean_by_samples = verl_of("token_mean_by_samples", "token_mean_by_samples")

BUGS = {
    "dual_clip_not_forwarded": ("single", "cp=2"),
    "kl_weighed_by_ones": ("single", "dp=2"),
    "token_mean_by_samples": ("single", "dp=2"),
}
RIGHT = {"slime": ("single", "cp=2"), "nemo": ("single", "dp=2"), "verl": ("single", "dp=2")}
