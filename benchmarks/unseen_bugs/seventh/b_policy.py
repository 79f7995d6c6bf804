# SPDX-License-Identifier: Apache-2.0
"""Policy losses: PPO with VAPO's NLL, and GRPO in three forms."""

import torch

import lossgate


def vapo_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "reference_policy_kl_penalty": 0.0,
            "positive_example_nll_weight": lossgate.ANY,
            "ratio_clip_min": lossgate.ANY,
            "ratio_clip_max": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        trained = inputs.mask & inputs.sample_mask[inputs.sequence]
        logprobs = torch.where(trained, inputs.logprobs, 0.0)
        previous = torch.where(trained, inputs.prev_logprobs, 0.0)
        advantages = torch.where(trained, inputs.advantages, 0.0)
        ratio = (logprobs - previous).exp()
        clamped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
        actor = torch.maximum(-advantages * ratio, -advantages * clamped)
        loss = torch.where(trained, actor, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
        if options.positive_example_nll_weight > 0:
            positive = trained & (inputs.rewards > 0)[inputs.sequence]
            count = positive.sum() if bug == "local" else inputs.positive_tokens
            nll = -torch.where(positive, logprobs, 0.0).sum() / count.clamp(min=1)
            loss = loss + options.positive_example_nll_weight * nll
        return loss

    return kernel


def dapo(logprobs, old_logprobs, advantages, options):
    """The ratio, and the clipped loss of each token."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
    return ratio, torch.maximum(-advantages * ratio, -advantages * clipped)


def estimate(d, ratio, which):
    """Estimate number `which` of the divergence from the reference."""
    d = d.clamp(-40.0, 40.0)
    if which == 0:
        return d
    if which == 1:
        return d * d / 2
    return torch.expm1(-d) + d if which == 2 else ratio * d


def grpo_logits_of(bug, name):
    """From logits, a block of rows at a time."""

    @lossgate.candidate(
        "grpo",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        tiles={"token": 16},
        supports={
            "use_rho_correction": False,
            "temperature": lossgate.ANY,
            "beta": lossgate.ANY,
            "kl_estimator": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        total = inputs.logits[:0].sum()
        for at in range(0, inputs.labels.shape[0], 16):
            block = slice(at, at + 16)
            mask = inputs.mask[block]
            logits = inputs.logits[block].masked_fill(~mask[:, None], 0.0) / options.temperature
            logprobs = logits.log_softmax(dim=1).gather(1, inputs.labels[block, None])[:, 0]
            old, reference, advantages = (
                torch.where(mask, x[block], 0.0)
                for x in (inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages)
            )
            ratio, policy = dapo(logprobs, old, advantages, options)
            rounded = torch.bfloat16 if bug == "bf16" else torch.float32
            d = (logprobs.to(rounded) - reference.to(rounded)).float()
            per_token = policy + options.beta * estimate(d, ratio, options.kl_estimator)
            total = total + torch.where(mask, per_token, 0.0).sum()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


AVERAGE = {"dp": "avg"}


def grpo_accumulated_of(bug, name):
    """A microbatch for each sequence; data-parallel ranks are averaged by the trainer."""

    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp",),
        dtypes=("float32",),
        contract=lossgate.Contract(loss=AVERAGE, grads={"logprobs": AVERAGE}),
        supports={"use_rho_correction": False, "beta": lossgate.ANY, "clip_higher": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        world = mesh["dp"].size()
        lengths = inputs.cu_seqlens_padded.diff().tolist()
        accumulation_steps = len(lengths)
        parts = zip(
            inputs.logprobs.split(lengths),
            inputs.old_logprobs.split(lengths),
            inputs.reference_logprobs.split(lengths),
            inputs.advantages.split(lengths),
            inputs.mask.split(lengths),
            strict=True,
        )
        loss = inputs.logprobs[:0].sum()
        for logprobs, *rest, mask in parts if lengths else ():
            logprobs, old, reference, advantages = (torch.where(mask, x, 0.0) for x in (logprobs, *rest))
            ratio, policy = dapo(logprobs, old, advantages, options)
            per_token = policy + options.beta * estimate(logprobs - reference, ratio, 2)
            total = torch.where(mask, per_token, 0.0).sum()
            if bug == "samples":
                loss = loss + total / mask.sum().clamp(min=1) / accumulation_steps
            else:
                loss = loss + total * world / inputs.valid_tokens.clamp(min=1)
        return loss

    return kernel


def grpo_reported_of(bug, name):
    """With metrics, as a trainer logs them."""

    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"use_rho_correction": False, "beta": lossgate.ANY, "clip_lower": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask, tokens = inputs.mask, inputs.valid_tokens.clamp(min=1)
        logprobs, old, reference, advantages = (
            torch.where(mask, x, 0.0)
            for x in (inputs.logprobs, inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages)
        )

        def masked_mean(x):
            return torch.where(mask, x, 0.0).sum() / tokens

        ratio, policy = dapo(logprobs, old, advantages, options)
        penalty = options.beta * estimate(logprobs - reference, ratio, 2)
        with torch.no_grad():
            log_ratio = (reference - logprobs).clamp(-40.0, 40.0)
            kl = masked_mean(-log_ratio.exp() if bug == "exp" else -log_ratio)
            metrics = {
                "kl0": kl,
                "kl_avg": masked_mean(penalty),
                "policy_avg": masked_mean(policy),
                "ratio_mean": masked_mean(ratio),
            }
        return lossgate.Outputs(loss=masked_mean(policy + penalty), metrics=metrics)

    return kernel


vapo = vapo_of(None, "vapo")
grpo_blocks = grpo_logits_of(None, "grpo_blocks")
grpo_accumulated = grpo_accumulated_of(None, "grpo_accumulated")
grpo_reported = grpo_reported_of(None, "grpo_reported")

# The NLL of positive examples is divided by the number of such tokens in this call, while the
# actor's loss has the count of the batch. Its author would have to divide by the positive tokens of
# the whole batch.
positive_nll_count_local = vapo_of("local", "positive_nll_count_local")

# The log-ratio of policy and reference is the difference of two log-probabilities that were cast to
# bfloat16. Its author would have to subtract them in float32.
kl_difference_in_bfloat16 = grpo_logits_of("bf16", "kl_difference_in_bfloat16")

# Each microbatch is divided by its own trained tokens and then by the number of microbatches, so
# that a token of a short one counts more. Its author would have to divide sums by the trained
# tokens of the whole batch.
microbatch_means_are_averaged = grpo_accumulated_of("samples", "microbatch_means_are_averaged")

# The logged KL is the mean of minus the ratio, not of minus its logarithm (moved from ppo_kl to the
# metric kl0, of policy and reference). Its author would have to take out the exponential.
kl_metric_of_ratio = grpo_reported_of("exp", "kl_metric_of_ratio")

BUGS = {
    "positive_nll_count_local": ("dp=2", "dp=2,cp=2"),
    "kl_difference_in_bfloat16": ("single", "cp=2"),
    "microbatch_means_are_averaged": ("single", "dp=2"),
    "kl_metric_of_ratio": ("single", "cp=2"),
}
RIGHT = {
    "vapo": ("dp=2", "dp=2,cp=2"),
    "grpo_blocks": ("single", "cp=2"),
    "grpo_accumulated": ("single", "dp=2"),
    "grpo_reported": ("single", "cp=2"),
}
