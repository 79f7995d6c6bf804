# SPDX-License-Identifier: Apache-2.0
"""GRPO from logits: TRL's log-probabilities, open-instruct's masked means, and a fused function
whose backward has the gradient of the logits, as in flash-linear-attention.
"""

import torch

import lossgate

ANY = lossgate.ANY
KL_BOUND = 40.0


def selective_log_softmax(logits, labels):
    return torch.log_softmax(logits, dim=-1).gather(-1, labels[:, None]).squeeze(-1)


def masked_mean(values, mask, count):
    return torch.where(mask, values, 0.0).sum() / count.clamp(min=1)


def trl_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "temperature": ANY,
            "clip_lower": ANY,
            "clip_higher": ANY,
            "beta": ANY,
            "use_rho_correction": False,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask
        logits = inputs.logits.masked_fill(~mask[:, None], 0.0)
        # Divide logits by sampling temperature.
        if bug != "train_without_temperature":
            logits = logits / options.temperature
        per_token_logps = selective_log_softmax(logits, inputs.labels)
        per_token_kl = torch.zeros_like(per_token_logps)
        if options.beta != 0.0:
            d = torch.clamp(per_token_logps - inputs.reference_logprobs, -KL_BOUND, KL_BOUND)
            per_token_kl = torch.expm1(-d) + d
        coef_1 = torch.where(mask, per_token_logps - inputs.old_logprobs, 0.0).exp()
        coef_2 = torch.clamp(coef_1, 1 - options.clip_lower, 1 + options.clip_higher)
        per_token_loss = -torch.min(coef_1 * inputs.advantages, coef_2 * inputs.advantages)
        if bug == "kl_mean_unmasked":
            loss = masked_mean(per_token_loss, mask, inputs.valid_tokens)
            if mask.numel():
                loss = loss + (options.beta * per_token_kl).mean() / mesh.size()
            return loss
        return masked_mean(per_token_loss + options.beta * per_token_kl, mask, inputs.valid_tokens)

    return kernel


trl = trl_of(None, "trl")

# Tokens are sampled, and their old log-probabilities computed, with the logits divided by the
# temperature, but the log-probabilities that are trained come from the plain logits. The author
# would have to divide them by the temperature here, too. (TRL)
train_without_temperature = trl_of("train_without_temperature", "train_without_temperature")

# The KL term stands outside of the masked mean: it is a plain mean over all tokens of the rank,
# prompts and padding too, which DDP then averages. The author would have to add beta * kl to the
# loss of each token before the masked mean. (open-instruct)
kl_mean_unmasked = trl_of("kl_mean_unmasked", "kl_mean_unmasked")

CHUNK = 8


class FusedGrpoLoss(torch.autograd.Function):
    """The loss of each token, from logits. Backward makes the gradient of the logits by rows."""

    @staticmethod
    def forward(ctx, logits, old, reference, advantages, labels, beta, eps_low, eps_high, temperature):
        lse = torch.empty_like(old)
        loss, dlogp = torch.empty_like(old), torch.empty_like(old)
        for rows in torch.arange(len(labels)).split(CHUNK):
            scaled = logits[rows].float() / temperature
            lse[rows] = scaled.logsumexp(-1)
            logp = scaled.gather(1, labels[rows, None])[:, 0] - lse[rows]
            ratio, gain = (logp - old[rows]).exp(), advantages[rows]
            free, clipped = ratio * gain, ratio.clamp(1 - eps_low, 1 + eps_high) * gain
            objective = torch.minimum(free, clipped)
            slope = torch.where(free <= clipped, free, 0.0)
            if beta != 0.0:
                distance = logp - reference[rows]
                d = distance.clamp(-KL_BOUND, KL_BOUND)
                objective = objective - beta * (torch.expm1(-d) + d)
                slope = slope + torch.where(distance.abs() <= KL_BOUND, beta * torch.expm1(-d), 0.0)
            loss[rows], dlogp[rows] = -objective, -slope
        ctx.save_for_backward(logits, lse, dlogp, labels)
        ctx.temperature = temperature
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, lse, dlogp, labels = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for rows in torch.arange(len(labels)).split(CHUNK):
            probs = (logits[rows].float() / ctx.temperature - lse[rows, None]).exp()
            probs.scatter_add_(1, labels[rows, None], torch.full_like(lse[rows, None], -1.0))
            dlogits[rows] = -probs * (dloss[rows] * dlogp[rows] / ctx.temperature)[:, None]
        return dlogits, None, None, None, None, None, None, None, None


def fla_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "temperature": ANY,
            "clip_lower": ANY,
            "clip_higher": ANY,
            "beta": ANY,
            "use_rho_correction": False,
        },
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask
        old, reference, advantages = (
            torch.where(mask, x, 0.0) for x in (inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages)
        )
        logits = inputs.logits.masked_fill(~mask[:, None], 0.0)
        loss = FusedGrpoLoss.apply(
            logits,
            old,
            reference,
            advantages,
            inputs.labels,
            options.beta,
            options.clip_lower,
            options.clip_higher,
            options.temperature,
        )
        if bug == "negated_twice":
            loss = -loss
        return masked_mean(loss, mask, inputs.valid_tokens)

    return kernel


fla = fla_of(None, "fla")

# The fused function returns the loss of each token, which is already minus the objective, and its
# caller negates it again as if it were the objective: training goes uphill. The author would have
# to drop one of the two minus signs. (flash-linear-attention)
negated_twice = fla_of("negated_twice", "negated_twice")

BUGS = {
    "train_without_temperature": ("single", "cp=2"),
    "kl_mean_unmasked": ("single", "dp=2"),
    "negated_twice": ("single", "dp=2"),
}
RIGHT = {"trl": ("single", "cp=2", "dp=2"), "fla": ("single", "dp=2")}
