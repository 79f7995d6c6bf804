# SPDX-License-Identifier: Apache-2.0
"""Policy losses: GRPO as in open-instruct, and NeMo-RL's clipped policy gradient."""

import torch
import torch.distributed as dist

import lossgate


class SumOverRanks(torch.autograd.Function):
    """Adds up over a group; every rank uses the sum, so backward adds up as well."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream):
        total = upstream.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def summed(x, group):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def at_least_one(count):
    return count.float().clamp(min=1.0)


class VocabParallelLogprobs(torch.autograd.Function):
    """Log-probabilities of labels whose logits lie on the ranks of tp."""

    @staticmethod
    def forward(ctx, logits, labels, start, end, temperature, group, bug):
        ctx.width, ctx.temperature, ctx.bug = logits.shape[1], temperature, bug
        z = logits[:, : end - start].float() / temperature
        peak = z.amax(1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        z = z - peak[:, None]
        owned = (labels >= start) & (labels < end)
        local = torch.where(owned, labels - start, 0)
        picked = torch.where(owned, z.gather(1, local[:, None])[:, 0], 0.0)
        z = z.exp_()
        both = torch.stack((z.sum(1), picked))
        dist.all_reduce(both, group=group)
        ctx.save_for_backward(z / both[0][:, None], local, owned)
        return both[1] - both[0].log()

    @staticmethod
    def backward(ctx, upstream):
        softmax, local, owned = ctx.saved_tensors
        grad = softmax * -upstream[:, None]
        at_label = upstream if ctx.bug == "grpo_tp_label" else upstream * owned
        grad.scatter_add_(1, local[:, None], at_label[:, None])
        grad = grad / ctx.temperature
        return torch.nn.functional.pad(grad, (0, ctx.width - grad.shape[1])), None, None, None, None, None, None


# ---- GRPO


def grpo_tokens(c, inputs, o, bug):
    """Loss of each token; c is already 0 where nothing is trained."""
    mask = inputs.mask
    old, ref, vllm, adv = (
        torch.where(mask, x, 0.0)
        for x in (inputs.old_logprobs, inputs.reference_logprobs, inputs.vllm_logprobs, inputs.advantages)
    )
    ratio = (c - old).exp()
    high = 1 + o.clip_higher
    if o.loss_fn == "cispo":
        policy = -adv * ratio.detach().clamp(max=high) * c
    else:
        policy = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - o.clip_lower, high))
    if o.use_rho_correction:
        log_rho = torch.where(vllm.isnan(), 0.0, old - vllm).clamp(-10.0, 10.0)
        policy = policy * log_rho.exp().clamp(o.rho_clamp_lower_bound, o.rho_clamp_upper_bound or float("inf"))
    d = (c - ref).clamp(-40.0, 40.0)
    if o.kl_estimator == 0:
        kl = d
    elif o.kl_estimator == 1:
        kl = d.square() / 2
    elif o.kl_estimator == 2:
        kl = torch.expm1(-d) + d
    else:
        kl = (ratio.detach() if bug == "grpo_kl3_detached" else ratio) * d
    return torch.where(mask, policy + o.beta * kl, 0.0)


def grpo_divisor(inputs, o, mesh, bug):
    if o.loss_denominator != "token":
        return o.loss_denominator
    if bug == "grpo_count_over_dp":
        return at_least_one(summed(inputs.mask.sum(), mesh.get_group("dp")))
    count = summed(inputs.mask.sum(), mesh.get_group("dp"))
    return at_least_one(summed(count, mesh.get_group("cp")))


def grpo_of_logprobs(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        name=name,
        supports={
            "loss_fn": lossgate.ANY,
            "kl_estimator": lossgate.ANY,
            "beta": lossgate.ANY,
            "loss_denominator": lossgate.ANY,
            "loss_scale": lossgate.ANY,
        },
    )
    def kernel(inputs, options, mesh):
        c = torch.where(inputs.mask, inputs.logprobs.float(), 0.0)
        total = grpo_tokens(c, inputs, options, bug).sum()
        return options.loss_scale * total / grpo_divisor(inputs, options, mesh, bug)

    return kernel


def grpo_of_logits(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logits",
        axes=("dp", "tp"),
        dtypes=("float32",),
        name=name,
        supports={"temperature": lossgate.ANY, "use_rho_correction": lossgate.ANY, "clip_higher": lossgate.ANY},
    )
    def kernel(inputs, options, mesh):
        logits = torch.where(inputs.mask[:, None], inputs.logits, 0.0)
        c = VocabParallelLogprobs.apply(
            logits,
            inputs.labels,
            inputs.vocab_start,
            inputs.vocab_end,
            options.temperature,
            mesh.get_group("tp"),
            bug,
        )
        c = torch.where(inputs.mask, c, 0.0)
        return grpo_tokens(c, inputs, options, bug).sum() / at_least_one(inputs.valid_tokens)

    return kernel


# ---- clipped policy gradient


def pg_penalty(c, q, o):
    """KL estimates with the score term; a token beyond a clamp has no gradient."""
    d = q - c
    score = (c - c.detach()).exp()
    if o.kl_input_clamp_value is not None:
        bound = o.kl_input_clamp_value
        score = torch.where(d.abs() <= bound, score, 1.0)
        d = d.clamp(-bound, bound)
    k = {"k1": -d, "k2": d.square() / 2, "k3": torch.expm1(d) - d}[o.reference_policy_kl_type] * score
    return k if o.kl_output_clamp_value is None else k.clamp(-o.kl_output_clamp_value, o.kl_output_clamp_value)


def by_sequence(x, inputs):
    return x.new_zeros(inputs.sample_mask.shape[0]).index_add(0, inputs.sequence, x)


def pg_surrogate(ratio, adv, o):
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - o.ratio_clip_min, 1 + o.ratio_clip_max))
    if o.ratio_clip_c is not None:
        loss = torch.where(adv < 0, torch.minimum(loss, -adv * o.ratio_clip_c), loss)
    return loss


def pg_of_logprobs(bug, name, gspo):
    supports = {
        "ratio_clip_min": lossgate.ANY,
        "ratio_clip_max": lossgate.ANY,
        "reference_policy_kl_penalty": lossgate.ANY,
    }
    if gspo:
        supports |= {"sequence_level_importance_ratios": True, "token_level_loss": False}
    else:
        supports |= {
            "token_level_loss": lossgate.ANY,
            "ratio_clip_c": lossgate.ANY,
            "reference_policy_kl_type": lossgate.ANY,
        }

    @lossgate.candidate(
        "clipped_pg", head="logprobs", axes=("dp", "cp"), dtypes=("float32",), name=name, supports=supports
    )
    def kernel(inputs, options, mesh):
        cp = mesh.get_group("cp")
        trained = inputs.mask & inputs.sample_mask[inputs.sequence]
        c, p, q, adv = (
            torch.where(trained, x, 0.0)
            for x in (inputs.logprobs.float(), inputs.prev_logprobs, inputs.reference_logprobs, inputs.advantages)
        )
        own_lengths = by_sequence(trained.float(), inputs)
        lengths = summed(own_lengths, cp)
        log_ratio = c - p
        if options.sequence_level_importance_ratios:
            if bug == "gspo_mean_of_means":
                own_mean = by_sequence(log_ratio, inputs) / own_lengths.clamp(min=1.0)
                means = SumOverRanks.apply(own_mean, cp) / cp.size()
            else:
                means = SumOverRanks.apply(by_sequence(log_ratio, inputs), cp) / lengths.clamp(min=1.0)
            log_ratio = means[inputs.sequence]
        per_token = pg_surrogate(log_ratio.exp(), adv, options)
        if options.reference_policy_kl_penalty:
            per_token = per_token + options.reference_policy_kl_penalty * pg_penalty(c, q, options)
        per_token = torch.where(trained, per_token, 0.0)
        if options.token_level_loss:
            return per_token.sum() / at_least_one(inputs.valid_tokens)
        if bug == "pg_whole_length":
            lengths = inputs.cu_seqlens.diff().float()
        return (by_sequence(per_token, inputs) / lengths.clamp(min=1.0)).sum() / at_least_one(inputs.valid_sequences)

    return kernel


def pg_of_hidden(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="hidden",
        axes=("dp",),
        dtypes=("float32",),
        name=name,
        supports={
            "use_importance_sampling_correction": lossgate.ANY,
            "temperature": lossgate.ANY,
            "truncated_importance_sampling_type": (None, "tis", "icepop"),
            "truncated_importance_sampling_ratio": lossgate.ANY,
            "truncated_importance_sampling_ratio_min": lossgate.ANY,
        },
    )
    def kernel(inputs, options, mesh):
        o = options
        trained = inputs.mask & inputs.sample_mask[inputs.sequence]
        hidden = torch.where(trained[:, None], inputs.hidden, 0.0)
        parts = []
        for h, labels in zip(hidden.split(16), inputs.labels.split(16), strict=True):
            z = h.float() @ inputs.weight.float().T / o.temperature
            parts.append(z.gather(1, labels[:, None])[:, 0] - z.logsumexp(1))
        c = torch.cat(parts)
        c, p, g, q, adv = (
            torch.where(trained, x, 0.0)
            for x in (c, inputs.prev_logprobs, inputs.generation_logprobs, inputs.reference_logprobs, inputs.advantages)
        )
        per_token = pg_surrogate((c - p).exp(), adv, o)
        if o.use_importance_sampling_correction:
            w = ((c.detach() if bug == "pg_weight_of_current" else p) - g).exp()
            low, high = o.truncated_importance_sampling_ratio_min or 0.0, o.truncated_importance_sampling_ratio
            if o.truncated_importance_sampling_type == "tis":
                w = w.clamp(low, high)
            elif o.truncated_importance_sampling_type == "icepop":
                w = torch.where((w >= low) & (w <= high), w, 0.0)
            per_token = per_token * w
        per_token = per_token + o.reference_policy_kl_penalty * pg_penalty(c, q, o)
        return torch.where(trained, per_token, 0.0).sum() / at_least_one(inputs.valid_tokens)

    return kernel


grpo_logprobs = grpo_of_logprobs("", "grpo_logprobs")
grpo_logits = grpo_of_logits("", "grpo_logits")
pg_logprobs = pg_of_logprobs("", "pg_logprobs", gspo=False)
gspo_logprobs = pg_of_logprobs("", "gspo_logprobs", gspo=True)
pg_hidden = pg_of_hidden("", "pg_hidden")

# KL estimator 3 is r * d, but r is detached, as if it were a mere importance weight: the value is
# right, and the gradient lacks the term r * d * grad log p.
grpo_kl3_detached = grpo_of_logprobs("grpo_kl3_detached", "grpo_kl3_detached")

# The number of trained tokens is counted by the kernel and added up over dp alone, not over cp, so
# each cp rank divides by the tokens of its own part of the sequences.
grpo_count_over_dp = grpo_of_logprobs("grpo_count_over_dp", "grpo_count_over_dp")

# Backward of the vocab-parallel log-probabilities adds the label's term on every tp rank: where a
# rank does not own the label, its clamped local index 0 gets it (the ownership mask is missing).
grpo_tp_label = grpo_of_logits("grpo_tp_label", "grpo_tp_label")

# With token_level_loss=False a sequence's loss is divided by all of its tokens, prompt included,
# and not by its trained tokens.
pg_whole_length = pg_of_logprobs("pg_whole_length", "pg_whole_length", gspo=False)

# GSPO's mean log-ratio of a sequence is the mean over cp ranks of each rank's own mean, which
# weights ranks with few trained tokens too much.
gspo_mean_of_means = pg_of_logprobs("gspo_mean_of_means", "gspo_mean_of_means", gspo=True)

# The importance weight against the generating policy is taken from the current policy (detached),
# and not from the policy before the update, so that the ratio counts twice.
pg_weight_of_current = pg_of_hidden("pg_weight_of_current", "pg_weight_of_current")

BUGS = {
    "grpo_kl3_detached": ("single",),
    "grpo_count_over_dp": ("cp=2", "dp=2,cp=2"),
    "grpo_tp_label": ("tp=2", "dp=2,tp=2"),
    "pg_whole_length": ("single",),
    "gspo_mean_of_means": ("cp=2",),
    "pg_weight_of_current": ("single", "dp=2"),
}
RIGHT = ("grpo_logprobs", "grpo_logits", "pg_logprobs", "gspo_logprobs", "pg_hidden")
