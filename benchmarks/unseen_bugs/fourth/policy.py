# SPDX-License-Identifier: Apache-2.0
"""GRPO as in open-instruct; PPO and GSPO as in NeMo-RL."""

import torch
import torch.distributed as dist

import lossgate


class AllSum(torch.autograd.Function):
    """The sum over the group, used by all ranks in their shares: gradients are summed, too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sequence_mean(values, mask, sequence, number, group, *, differentiable=True):
    """The mean over the trained tokens of each sequence, and their number."""
    sums = torch.zeros(number, device=values.device).index_add(0, sequence, torch.where(mask, values, 0.0))
    counts = torch.zeros(number, device=values.device).index_add(0, sequence, mask.float())
    if group is not None:
        dist.all_reduce(counts, group=group)
        if differentiable:
            sums = AllSum.apply(sums, group)
        else:
            others = sums.detach().clone()
            dist.all_reduce(others, group=group)
            sums = sums + (others - sums.detach())
    return sums / counts.clamp(min=1), counts


def grpo(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={
            "clip_lower": lossgate.ANY,
            "clip_higher": lossgate.ANY,
            "beta": lossgate.ANY,
            "rho_mask_sequence_level": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask
        new = torch.where(mask, inputs.logprobs, 0.0)
        old = torch.where(mask, inputs.old_logprobs, 0.0)
        reference = torch.where(mask, inputs.reference_logprobs, 0.0)
        advantages = torch.where(mask, inputs.advantages, 0.0)
        low, high = options.clip_lower, options.clip_higher
        if bug == "clip_bounds_swapped":
            low, high = high, low
        ratio = (new - old).exp()
        policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
        x = (old - inputs.vllm_logprobs).clamp(-10, 10)
        x = torch.where(mask & ~x.isnan(), x, 0.0)
        if options.rho_mask_sequence_level:
            group = None if bug == "rho_of_one_rank" else mesh.get_group("cp")
            means, _ = sequence_mean(x, mask, inputs.sequence, len(inputs.cu_seqlens) - 1, group)
            x = means[inputs.sequence]
        weight = x.exp().clamp(max=options.rho_clamp_upper_bound)
        d = (new - reference).clamp(-40, 40)
        kl = torch.expm1(d) - d if bug == "kl_other_way" else torch.expm1(-d) + d
        total = torch.where(mask, weight * policy + options.beta * kl, 0.0).sum()
        if bug == "tokens_of_the_world":
            count = mask.sum()
            dist.all_reduce(count)
            return total / count.clamp(min=1)
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


grpo_right = grpo(None, "grpo_right")

# The lower and the upper clip range are exchanged.
clip_bounds_swapped = grpo("clip_bounds_swapped", "clip_bounds_swapped")

# k3 is taken of the log-ratio with the other sign: exp(d) - 1 - d, the KL of the other direction.
kl_other_way = grpo("kl_other_way", "kl_other_way")

# Sequence-level rho is the mean over this cp rank's tokens of the sequence, not over the sequence.
rho_of_one_rank = grpo("rho_of_one_rank", "rho_of_one_rank")

# The tokens are counted over all ranks, tp ranks too, which hold the same: tp times too many.
tokens_of_the_world = grpo("tokens_of_the_world", "tokens_of_the_world")


def policy_gradient(bug, name, supports):
    @lossgate.candidate(
        "clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=("float32",), supports=supports, name=name
    )
    def kernel(inputs, options, mesh):
        group, number = mesh.get_group("cp"), len(inputs.sample_mask)
        trained = inputs.mask & inputs.sample_mask[inputs.sequence]
        new = torch.where(inputs.mask, inputs.logprobs, 0.0)
        prev = torch.where(inputs.mask, inputs.prev_logprobs, 0.0)
        reference = torch.where(inputs.mask, inputs.reference_logprobs, 0.0)
        advantages = torch.where(inputs.mask, inputs.advantages, 0.0)

        def mean(values):
            values = torch.where(trained, values, 0.0)
            if options.token_level_loss:
                return values.sum() / inputs.valid_tokens.clamp(min=1)
            counts = torch.zeros(number, device=values.device).index_add(0, inputs.sequence, trained.float())
            dist.all_reduce(counts, group=group)
            return (values / counts.clamp(min=1)[inputs.sequence]).sum() / inputs.valid_sequences.clamp(min=1)

        log_ratio = new - prev
        if options.sequence_level_importance_ratios:
            means, _ = sequence_mean(
                log_ratio, trained, inputs.sequence, number, group, differentiable=bug != "ratio_without_others"
            )
            log_ratio = means[inputs.sequence]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
        loss = mean(torch.maximum(-advantages * ratio, -advantages * clipped))
        if options.reference_policy_kl_penalty:
            d = (reference - new).clamp(-options.kl_input_clamp_value, options.kl_input_clamp_value)
            score = (new - new.detach()).exp()
            bound = options.kl_output_clamp_value
            kl = (score * (torch.expm1(d) - d)).clamp(-bound, bound)
            kl = (kl.mean() if len(kl) else kl.sum()) if bug == "kl_over_all_tokens" else mean(kl)
            loss = loss + options.reference_policy_kl_penalty * kl
        return loss

    return kernel


PPO = {"reference_policy_kl_penalty": lossgate.ANY, "ratio_clip_min": lossgate.ANY, "ratio_clip_max": lossgate.ANY}
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}

ppo_right = policy_gradient(None, "ppo_right", PPO)
gspo_right = policy_gradient(None, "gspo_right", GSPO)

# The KL term is the plain mean over all tokens of the pack, not that over trained tokens.
kl_over_all_tokens = policy_gradient("kl_over_all_tokens", "kl_over_all_tokens", PPO)

# The sequence's log-ratio is summed over cp outside autograd: a token gets no gradient from the
# part of the loss that the other cp rank has.
ratio_without_others = policy_gradient("ratio_without_others", "ratio_without_others", GSPO)

BUGS = {
    "clip_bounds_swapped": ("single",),
    "kl_other_way": ("single",),
    "rho_of_one_rank": ("cp=2",),
    "tokens_of_the_world": ("dp=2,tp=2", "tp=2"),
    "kl_over_all_tokens": ("single",),
    "ratio_without_others": ("cp=2",),
}
RIGHT = ("grpo_right", "ppo_right", "gspo_right")
