# SPDX-License-Identifier: Apache-2.0
"""Policy losses on log-probabilities: GRPO in two styles, and sequence-level clipped losses."""

import torch
import torch.distributed as dist

import lossgate


def of_sequences(values, sequence, sequences):
    """Sums the values of tokens over each sequence."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def masked_sum(values, mask):
    """Sums values times mask; values without weight are selected away."""
    return (values.masked_fill(mask == 0, 0.0) * mask).sum()


def policy_losses(logprobs, old_logprobs, advantages, options):
    """The losses of tokens, clipped on both sides as by DAPO."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def aggregated(logprobs, old_logprobs, advantages, response_mask, count, options):
    """The clipped loss over the response, divided by a count of tokens."""
    losses = policy_losses(logprobs, old_logprobs, advantages, options)
    return masked_sum(losses, response_mask) / count


SUPPORTS = {
    "use_rho_correction": False,
    "clip_lower": lossgate.ANY,
    "clip_higher": lossgate.ANY,
}


def actor_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={**SUPPORTS, "beta": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask
        logprobs = inputs.logprobs.float().masked_fill(~mask, 0.0)
        old = inputs.old_logprobs.masked_fill(~mask, 0.0)
        advantages = inputs.advantages.masked_fill(~mask, 0.0)
        reference = inputs.reference_logprobs.masked_fill(~mask, 0.0)
        # verl: masked_mean divided by the number of tokens as it is. It is 0 where nothing is
        # trained in the whole batch, and 0 / 0 is NaN. To do: divide by at least 1.
        count = inputs.valid_tokens if bug == "unclamped" else inputs.valid_tokens.clamp(min=1)
        response = mask.float()
        if bug == "arguments":
            # verl: the arguments are positional, and advantages are given where the function has
            # its response mask, and the mask where it has advantages. Tokens are then weighed by
            # their advantages, once more outside of the clip. To do: give them in their order.
            policy = aggregated(logprobs, old, response, advantages, count, options)
        else:
            policy = aggregated(logprobs, old, advantages, response, count, options)
        d = (logprobs - reference).clamp(-40, 40)
        kl = torch.expm1(-d) + d
        # slime: the estimate of the KL is logged, and the coefficient is multiplied into the same
        # tensor first. What is logged then has the coefficient in it. To do: multiply out of place.
        logged = kl.detach()
        weighed = kl.mul_(options.beta) if bug == "in_place" else kl * options.beta
        loss = policy + masked_sum(weighed, response) / count
        metrics = {"kl2": masked_sum(logged, response) / count, "policy_avg": policy.detach()}
        return lossgate.Outputs(loss=loss, metrics=metrics)

    return kernel


actor = actor_of(None, "actor")
advantages_and_mask_swapped = actor_of("arguments", "advantages_and_mask_swapped")
count_of_nothing_not_clamped = actor_of("unclamped", "count_of_nothing_not_clamped")
penalty_multiplied_in_place = actor_of("in_place", "penalty_multiplied_in_place")


def by_sequences_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logprobs",
        axes=("dp",),
        dtypes=("float32",),
        supports={**SUPPORTS, "beta": 0.0},
        name=name,
    )
    def kernel(inputs, options, mesh):
        sequences = len(inputs.cu_seqlens) - 1
        with_tokens = torch.zeros(sequences)
        loss = inputs.logprobs.float()[:0].sum()
        for i in range(sequences):
            own = (inputs.sequence == i) & inputs.mask
            with_tokens[i] = own.any()
            losses = policy_losses(
                inputs.logprobs[own].float(), inputs.old_logprobs[own], inputs.advantages[own], options
            )
            # Liger: each sequence of a chunk has its mean over tokens, and the loss is the mean of
            # those, where the trainer's own loss is over the tokens of the batch. The tests
            # compared with the same formula. To do: add up tokens, and divide by their number.
            length = max(len(losses), 1) if bug == "sequence_means" else 1
            loss = loss + losses.sum() / length
        if bug == "sequence_means":
            number = with_tokens.sum()
            dist.all_reduce(number, group=mesh.get_group("dp"))
            return loss / number.clamp(min=1)
        return loss / inputs.valid_tokens.clamp(min=1)

    return kernel


by_sequences = by_sequences_of(None, "by_sequences")
means_of_sequences_averaged = by_sequences_of("sequence_means", "means_of_sequences_averaged")


def gspo_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp",),
        dtypes=("float32",),
        supports={
            "token_level_loss": False,
            "sequence_level_importance_ratios": True,
            "ratio_clip_min": lossgate.ANY,
            "ratio_clip_max": lossgate.ANY,
            "reference_policy_kl_penalty": 0.0,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        sequence, sequences = inputs.sequence, len(inputs.sample_mask)
        mask = inputs.mask & inputs.sample_mask[sequence]
        moved = (inputs.logprobs.float() - inputs.prev_logprobs).masked_fill(~mask, 0.0)
        tokens = of_sequences(mask.float(), sequence, sequences)
        length = tokens.clamp(min=1)
        ratio = (of_sequences(moved, sequence, sequences) / length).exp()
        clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
        # AReaL: a sequence has one ratio, and the advantages of its tokens are added up for it.
        # The prompt and padding have advantages as well, and this sum takes them along.
        # To do: multiply by the mask in the sum.
        advantages = inputs.advantages
        if bug != "sums_all":
            advantages = advantages.masked_fill(~mask, 0.0)
        gains = of_sequences(advantages.clamp(min=0), sequence, sequences) / length
        costs = of_sequences(advantages.clamp(max=0), sequence, sequences) / length
        losses = -gains * torch.minimum(ratio, clipped) - costs * torch.maximum(ratio, clipped)
        return losses[tokens > 0].sum() / inputs.valid_sequences.clamp(min=1)

    return kernel


gspo = gspo_of(None, "gspo")
advantages_summed_with_masked = gspo_of("sums_all", "advantages_summed_with_masked")


def microbatches_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp",),
        dtypes=("float32",),
        supports={
            "token_level_loss": False,
            "ratio_clip_min": lossgate.ANY,
            "ratio_clip_max": lossgate.ANY,
            "reference_policy_kl_penalty": 0.0,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        total = inputs.logprobs.float()[:0].sum()
        number = torch.zeros(())
        for i in range(len(inputs.sample_mask)):  # a micro-batch is one sequence
            # NeMo-RL: the losses of micro-batches are averaged over their number, and those whose
            # samples are all masked are counted, too, though they have no loss. To do: count those
            # that have samples.
            if bug == "counts_all" or bool(inputs.sample_mask[i]):
                number += 1
            own = (inputs.sequence == i) & inputs.mask & inputs.sample_mask[i]
            ratio = (inputs.logprobs[own].float() - inputs.prev_logprobs[own]).exp()
            clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
            losses = torch.maximum(-inputs.advantages[own] * ratio, -inputs.advantages[own] * clipped)
            total = total + losses.sum() / max(len(losses), 1)
        dist.all_reduce(number, group=mesh.get_group("dp"))
        return total / number.clamp(min=1)

    return kernel


microbatches = microbatches_of(None, "microbatches")
empty_micro_batches_counted = microbatches_of("counts_all", "empty_micro_batches_counted")

BUGS = {
    "advantages_and_mask_swapped": ("single", "cp=2"),
    "means_of_sequences_averaged": ("single", "dp=2"),
    "advantages_summed_with_masked": ("single", "dp=2"),
    "empty_micro_batches_counted": ("single", "dp=2"),
    "count_of_nothing_not_clamped": ("single", "dp=2"),
    "penalty_multiplied_in_place": ("single", "dp=2,cp=2"),
}
RIGHT = {
    "actor": ("single", "dp=2,cp=2"),
    "by_sequences": ("single", "dp=2"),
    "gspo": ("single", "dp=2"),
    "microbatches": ("single", "dp=2"),
}
