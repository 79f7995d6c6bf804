# SPDX-License-Identifier: Apache-2.0
"""Clipped policy gradient with a choice of aggregation, rollout correction and KL penalty."""

import torch
import torch.distributed as dist

import lossgate


def exp_finite(x):
    """exp(x), and 0 where that overflows."""
    return torch.where(x.exp().isfinite(), x, -torch.inf).exp()


class Batch:
    """The masks and counts that aggregation needs. Sequences may be split over the ranks of cp."""

    def __init__(self, inputs, mesh):
        self.trained = inputs.mask & inputs.sample_mask[inputs.sequence]
        self.sequence = inputs.sequence
        self.sequences = len(inputs.sample_mask)
        self.tokens_total = inputs.valid_tokens
        self.sequences_total = inputs.valid_sequences
        self.cp_group = mesh.get_group("cp")

    def keep(self, x):
        return torch.where(self.trained, x, 0.0)

    def per_sequence(self, x):
        return x.new_zeros(self.sequences).index_add(0, self.sequence, x)


def token_mean(losses, batch):
    return batch.keep(losses).sum() / batch.tokens_total.clamp(min=1)


def seq_mean_token_mean(losses, batch, clamp=True):
    sums = batch.per_sequence(batch.keep(losses))
    counts = batch.per_sequence(batch.trained.float())
    dist.all_reduce(counts, group=batch.cp_group)
    means = sums / (counts.clamp(min=1) if clamp else counts)
    return means.sum() / batch.sequences_total.clamp(min=1)


AGGREGATES = {"token-mean": token_mean, "seq-mean-token-mean": seq_mean_token_mean}


def policy_losses(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.2):
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def compute_policy_loss(logprobs, old_logprobs, advantages, batch, clip_low, clip_high, loss_agg_mode="token-mean"):
    losses = policy_losses(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return AGGREGATES[loss_agg_mode](losses, batch)


def label_logprobs(inputs, group):
    """log p(label) of logits whose vocabulary is split over a group."""
    z = inputs.logits[:, : inputs.vocab_end - inputs.vocab_start].masked_fill(~inputs.mask[:, None], 0.0)
    local = inputs.labels - inputs.vocab_start
    owned = (local >= 0) & (local < z.shape[1])
    return VocabParallel.apply(z, local.clamp(0, z.shape[1] - 1), owned, group)


class VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, local, owned, group):
        top = z.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        e = (z - top[:, None]).exp()
        sums = torch.stack([e.sum(1), torch.where(owned, z.gather(1, local[:, None])[:, 0], 0.0)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(e / sums[0, :, None], local, owned)
        return sums[1] - sums[0].log() - top

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        softmax, local, owned = ctx.saved_tensors
        grad = softmax * -upstream[:, None]
        grad.scatter_add_(1, local[:, None], torch.where(owned, upstream, 0.0)[:, None])
        return grad, None, None, None


def aggregated_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={
            "token_level_loss": lossgate.ANY,
            "ratio_clip_min": lossgate.ANY,
            "ratio_clip_max": lossgate.ANY,
            "reference_policy_kl_penalty": 0.0,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        batch = Batch(inputs, mesh)
        mode = "token-mean" if options.token_level_loss else "seq-mean-token-mean"
        given = {} if bug == "mode" else {"loss_agg_mode": mode}
        return compute_policy_loss(
            batch.keep(label_logprobs(inputs, mesh.get_group("tp"))),
            batch.keep(inputs.prev_logprobs),
            batch.keep(inputs.advantages),
            batch,
            options.ratio_clip_min,
            options.ratio_clip_max,
            **given,
        )

    return kernel


def per_sequence_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"token_level_loss": False, "reference_policy_kl_penalty": 0.0},
        name=name,
    )
    def kernel(inputs, options, mesh):
        batch = Batch(inputs, mesh)
        losses = policy_losses(
            batch.keep(inputs.logprobs), batch.keep(inputs.prev_logprobs), batch.keep(inputs.advantages)
        )
        return seq_mean_token_mean(losses, batch, clamp=bug != "clamp")

    return kernel


def corrected_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "force_on_policy_ratio": lossgate.ANY,
            "use_importance_sampling_correction": lossgate.ANY,
            "reference_policy_kl_penalty": 0.0,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        batch = Batch(inputs, mesh)
        logprobs, rollout = batch.keep(inputs.logprobs), batch.keep(inputs.generation_logprobs)
        advantages = batch.keep(inputs.advantages)
        if options.force_on_policy_ratio:  # the policy before the update is the one that is trained
            before = logprobs
            losses = -advantages * (logprobs - logprobs.detach()).exp()
        else:
            before = batch.keep(inputs.prev_logprobs)
            losses = policy_losses(logprobs, before, advantages)
        if options.use_importance_sampling_correction:
            weights = exp_finite(before - rollout)
            losses = losses * (weights if bug == "detach" else weights.detach())
        return token_mean(losses, batch)

    return kernel


def kl_of(logprobs, reference, rollout, options, bug):
    distance = reference - logprobs
    weights = exp_finite(logprobs - (rollout if options.use_on_policy_kl_approximation else logprobs.detach()))
    bound = options.kl_input_clamp_value
    if bound is not None:
        if bug != "clamp":
            weights = torch.where(distance.abs() > bound, weights.detach(), weights)
        distance = distance.clamp(-bound, bound)
    if options.reference_policy_kl_type == "k1":
        kl = -distance
    elif options.reference_policy_kl_type == "k2":
        kl = distance.square() / 2
    else:
        kl = torch.expm1(distance) - distance
    kl = weights * kl
    bound = options.kl_output_clamp_value
    return kl if bound is None else kl.clamp(-bound, bound)


def penalised_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "reference_policy_kl_penalty": lossgate.ANY,
            "reference_policy_kl_type": lossgate.ANY,
            "kl_input_clamp_value": lossgate.ANY,
            "kl_output_clamp_value": lossgate.ANY,
            "use_on_policy_kl_approximation": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        batch = Batch(inputs, mesh)
        logprobs = batch.keep(inputs.logprobs)
        losses = policy_losses(logprobs, batch.keep(inputs.prev_logprobs), batch.keep(inputs.advantages))
        kl = kl_of(
            logprobs,
            batch.keep(inputs.reference_logprobs),
            batch.keep(inputs.generation_logprobs),
            options,
            bug,
        )
        if options.reference_policy_kl_penalty:
            losses = losses + options.reference_policy_kl_penalty * kl
        return token_mean(losses, batch)

    return kernel


aggregated = aggregated_of(None, "aggregated")
per_sequence = per_sequence_of(None, "per_sequence")
corrected = corrected_of(None, "corrected")
penalised = penalised_of(None, "penalised")

# The mode of aggregation that the user chose is not handed on to compute_policy_loss, whose default
# is the mean over tokens. Its author would have to pass loss_agg_mode on.
aggregation_mode_not_forwarded = aggregated_of("mode", "aggregation_mode_not_forwarded")

# The weight that corrects for the rollout policy is computed of the log-probabilities that are
# being trained and stays in the graph, so that it carries a gradient. Its author would have to
# detach it. (verl's weight depends on the current policy where the old log-probabilities are taken
# to be its own, as force_on_policy_ratio does.)
rollout_weight_not_detached = corrected_of("detach", "rollout_weight_not_detached")

# Where the log-ratio of reference and policy is clamped the estimate is a constant, but the
# importance weight before it still has its gradient. Its author would have to detach the weight at
# clamped tokens.
clamped_kl_keeps_gradient = penalised_of("clamp", "clamped_kl_keeps_gradient")

# The mean over each sequence divides by the sum of its mask without a lower bound, so that a
# sequence without a trained token is 0/0. Its author would have to clamp the count to at least 1.
empty_sequence_zero_division = per_sequence_of("clamp", "empty_sequence_zero_division")

BUGS = {
    "aggregation_mode_not_forwarded": ("tp=2", "dp=2"),
    "rollout_weight_not_detached": ("single", "dp=2"),
    "clamped_kl_keeps_gradient": ("single", "cp=2"),
    "empty_sequence_zero_division": ("single", "dp=2,cp=2"),
}
RIGHT = {
    "aggregated": ("tp=2", "dp=2"),
    "corrected": ("single", "dp=2"),
    "penalised": ("single", "cp=2"),
    "per_sequence": ("single", "dp=2,cp=2"),
}
