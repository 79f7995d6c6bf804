# SPDX-License-Identifier: Apache-2.0
"""Losses of policies and critics, and bugs of them."""

import torch

import lossgate

CHUNK = 16


def estimates(logprobs, reference, ratio):
    d = (logprobs - reference).clamp(-40, 40)
    return d, d**2 / 2, torch.expm1(-d) + d, ratio * d


def tiled_policy_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "use_rho_correction": False,
            "clip_lower": lossgate.ANY,
            "clip_higher": lossgate.ANY,
            "beta": lossgate.ANY,
            "kl_estimator": lossgate.ANY,
            "temperature": lossgate.ANY,
        },
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        total = inputs.logits[:0].sum()
        for rows in torch.arange(len(inputs.labels)).split(CHUNK):
            mask = inputs.mask[rows]
            logits = inputs.logits[rows].masked_fill(~mask[:, None], 0.0) / options.temperature
            new = torch.log_softmax(logits, dim=1).gather(1, inputs.labels[rows, None])[:, 0]
            new = new.masked_fill(~mask, 0.0)
            old = inputs.old_logprobs[rows].masked_fill(~mask, 0.0)
            reference = inputs.reference_logprobs[rows].masked_fill(~mask, 0.0)
            advantages = inputs.advantages[rows].masked_fill(~mask, 0.0)
            ratio = torch.exp(new - old)
            bounded = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
            policy_loss = torch.maximum(-advantages * ratio, -advantages * bounded)
            kl = estimates(new, reference, ratio)[options.kl_estimator]
            losses = policy_loss - options.beta * kl if bug == "minus" else policy_loss + options.beta * kl
            total = total + losses.masked_fill(~mask, 0.0).sum()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


tiled_policy = tiled_policy_of(None, "tiled_policy")

# The KL penalty is subtracted from the loss that is minimised, as if it were the objective that is
# maximised, so the policy is pushed away from the reference. The author must add it.
penalty_subtracted_from_loss = tiled_policy_of("minus", "penalty_subtracted_from_loss")


class DapoTerms(torch.autograd.Function):
    """The policy loss and KL estimate 2 at each token, with their slopes by hand."""

    @staticmethod
    def forward(ctx, logprobs, old, reference, advantages, low, high):
        ratio = torch.exp(logprobs - old)
        free, bounded = -advantages * ratio, -advantages * ratio.clamp(low, high)
        d = logprobs - reference
        inside = d.abs() <= 40
        d = d.clamp(-40, 40)
        active = (ratio >= low) & (ratio <= high)
        slope = torch.where(active | (free > bounded), free, 0.0)
        ctx.save_for_backward(slope, torch.where(inside, -torch.expm1(-d), 0.0))
        return torch.maximum(free, bounded), torch.expm1(-d) + d

    @staticmethod
    def backward(ctx, d_policy, d_kl):
        slope, kl_slope = ctx.saved_tensors
        return d_policy * slope + d_kl * kl_slope, None, None, None, None, None


def logged_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"use_rho_correction": False, "beta": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        fields = inputs.logprobs, inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages
        fields = [x.masked_fill(~inputs.mask, 0.0) for x in fields]
        policy, kl = DapoTerms.apply(*fields, 1 - options.clip_lower, 1 + options.clip_higher)
        count = inputs.valid_tokens.clamp(min=1)
        policy, kl = (x.masked_fill(~inputs.mask, 0.0).sum() / count for x in (policy, kl))
        components = torch.stack([policy, kl])
        weights = torch.tensor([1.0, options.beta])
        logged = components.detach()
        weighted = logged * weights
        metrics = {
            "kl2": logged[1],
            "policy_avg": weighted[0],
            "kl_avg": weighted[1],
            "total_avg": logged.sum() if bug == "unweighted" else weighted.sum(),
        }
        return lossgate.Outputs(loss=(components * weights).sum(), metrics=metrics)

    return kernel


logged = logged_of(None, "logged")

# The report was of a logged sum of rewards that left out the weights of the rewards; here the
# logged total is the sum of the policy loss and the KL without the weight of the KL, while the loss
# has it. The author must sum the weighted components for the log, too.
logged_total_without_weights = logged_of("unweighted", "logged_total_without_weights")


class ClippedSquare(torch.autograd.Function):
    """The sum of clipped squared errors, times a factor; forward makes the gradient."""

    @staticmethod
    def forward(ctx, values, old, returns, mask, clip, factor):
        error = (values - returns).masked_fill(~mask, 0.0)
        losses, slope = error**2, error
        if clip is not None:
            bounded = torch.minimum(torch.maximum(values, old - clip), old + clip)
            other = (bounded - returns).masked_fill(~mask, 0.0) ** 2
            slope = torch.where(other > losses, 0.0, slope)
            losses = torch.maximum(losses, other)
        ctx.save_for_backward(slope * factor)
        return losses.sum() * factor / 2

    @staticmethod
    def backward(ctx, upstream):
        (slope,) = ctx.saved_tensors
        return slope * upstream, None, None, None, None, None


def critic_of(bug, name):
    average = {"dp": "avg"}

    @lossgate.candidate(
        "value",
        head="values",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"cliprange": lossgate.ANY, "scale": lossgate.ANY},
        contract=lossgate.Contract(loss=average, grads={"values": average}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        factor = options.scale / inputs.valid_tokens.clamp(min=1)
        if bug != "no dp":
            factor = factor * mesh.get_group("dp").size()
        fields = inputs.old_values, inputs.returns, inputs.mask
        return ClippedSquare.apply(inputs.values, *fields, options.cliprange, factor)

    return kernel


critic = critic_of(None, "critic")

# The trainer averages over the data-parallel ranks, as the contract says, and the loss is divided
# by the tokens of all of them but not multiplied by their number, so that it is dp times too small.
# The author must multiply by the size of dp.
global_count_without_dp_factor = critic_of("no dp", "global_count_without_dp_factor")

BUGS = {
    "penalty_subtracted_from_loss": ("single", "cp=2"),
    "logged_total_without_weights": ("single", "dp=2,cp=2"),
    "global_count_without_dp_factor": ("dp=2", "dp=2,cp=2"),
}
RIGHT = {
    "tiled_policy": ("single", "cp=2"),
    "logged": ("single", "dp=2,cp=2"),
    "critic": ("dp=2", "dp=2,cp=2"),
}
