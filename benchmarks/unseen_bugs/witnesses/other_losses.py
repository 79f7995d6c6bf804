# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of distillation, of preferences and of policies."""

import torch
import torch.nn.functional as F

import lossgate

CHUNK = 8  # tokens of a micro-batch


def mean(losses, inputs):
    """The sum over trained tokens, over the trained tokens of all ranks."""
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


# The temperature divides the student's logits, but not the teacher's.
@lossgate.candidate(
    "distill",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=("float32",),
    supports={"temperature": lossgate.ANY, "kl_type": ("forward", "reverse")},
)
def teacher_not_tempered(inputs, options, mesh):
    logits = torch.where(inputs.mask[:, None], inputs.hidden, 0.0) @ inputs.weight.T
    student = torch.log_softmax(logits.gather(1, inputs.teacher_indices) / options.temperature, -1)
    teacher = torch.log_softmax(torch.where(inputs.mask[:, None], inputs.teacher_logits, 0.0), -1)
    p, q = (teacher, student) if options.kl_type == "forward" else (student, teacher)
    return mean((p.exp() * (p - q)).sum(-1), inputs)


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def divergence(log_p, log_q, options):
    if options.divergence_type == "jsd":
        beta = torch.tensor(options.beta)
        log_r = torch.logaddexp(log_p + beta.log(), log_q + (1 - beta).log())
        return beta * kl(log_p, log_r) + (1 - beta) * kl(log_q, log_r)
    return kl(log_q, log_p) if options.divergence_type == "reverse" else kl(log_p, log_q)


# The fused path mixes half a cross entropy of the labels into the divergence, by defaults of 0.5
# for both weights that nobody set. Its author would have to pass weight_hard_loss=0 and
# weight_soft_loss=1.
@lossgate.candidate(
    "divergence",
    head="logits",
    axes=("dp", "cp"),
    dtypes=("float32",),
    supports={"divergence_type": lossgate.ANY, "beta": lossgate.ANY, "temperature": lossgate.ANY},
)
def hard_loss_mixed_in(inputs, options, mesh):
    student, teacher = (x.masked_fill(~inputs.mask[:, None], 0.0) for x in (inputs.logits, inputs.teacher_logits))
    log_q, log_p = ((x / options.temperature).log_softmax(-1) for x in (student, teacher))
    hard = F.cross_entropy(student, inputs.labels, reduction="none")
    return mean(0.5 * hard + 0.5 * divergence(log_p, log_q, options), inputs)


def by_sequence(values, inputs):
    return values.new_zeros(len(inputs.sample_mask)).index_add(0, inputs.sequence, values)


def pairs(inputs):
    return (inputs.valid_sequences.float() / 2).clamp(min=0.5)


# The first half of the batch is taken for the chosen responses and the second for the rejected
# ones, which come in turn.
@lossgate.candidate("preference", head="rewards", axes=("dp",), dtypes=("float32",))
def pairs_from_two_halves(inputs, options, mesh):
    count = len(inputs.rewards) // 2
    (chosen, rejected), gate = inputs.rewards.split(count), inputs.sample_mask[:count]
    loss = torch.where(gate, F.softplus(rejected - chosen), 0.0).sum() / pairs(inputs)
    return lossgate.Outputs(loss=loss, metrics={"accuracy": ((chosen > rejected) & gate).sum() / pairs(inputs)})


class BradleyTerry(torch.autograd.Function):
    """The loss of pairs. Backward multiplies by the gradient of the loss twice."""

    @staticmethod
    def forward(ctx, rewards, counted, pairs):
        margins = rewards[0::2] - rewards[1::2]
        ctx.save_for_backward(torch.where(counted, -torch.sigmoid(-margins), 0.0) / pairs)
        return torch.where(counted, -F.logsigmoid(margins), 0.0).sum() / pairs

    @staticmethod
    def backward(ctx, upstream):
        of_margins = ctx.saved_tensors[0] * upstream
        return torch.stack((of_margins, -of_margins), dim=1).flatten() * upstream, None, None


# The margins' gradient has the upstream gradient in it already, when the rewards' is made of it.
@lossgate.candidate("preference", head="rewards", axes=("dp",), dtypes=("float32",), supports={"epsilon": lossgate.ANY})
def upstream_gradient_squared(inputs, options, mesh):
    count = inputs.valid_sequences.float() / 2 + options.epsilon
    return BradleyTerry.apply(inputs.rewards, inputs.sample_mask[0::2], torch.where(count > 0, count, 1.0))


# The log-probabilities of a sequence are summed over this cp rank's tokens only. The author would
# sum them over cp.
@lossgate.candidate(
    "dpo",
    head="logprobs",
    axes=("dp", "cp"),
    dtypes=("float32",),
    supports={"reference_policy_kl_penalty": lossgate.ANY, "sft_loss_weight": lossgate.ANY},
)
def sums_of_one_rank(inputs, options, mesh):
    logprobs, reference = (torch.where(inputs.mask, x, 0.0) for x in (inputs.logprobs, inputs.reference_logprobs))
    rewards, gate = by_sequence(logprobs - reference, inputs), inputs.sample_mask[0::2]
    losses = -F.logsigmoid(options.reference_policy_kl_penalty * (rewards[0::2] - rewards[1::2]))
    losses = losses - options.sft_loss_weight * by_sequence(logprobs, inputs)[0::2]
    return torch.where(gate, losses, 0.0).sum() / pairs(inputs) / mesh["cp"].size()


# With preference_average_log_probs only the policy's log-probabilities are averaged; the
# reference's are summed.
@lossgate.candidate(
    "dpo",
    head="logits",
    axes=("dp",),
    dtypes=("float32",),
    supports=dict.fromkeys(
        ("loss_type", "preference_average_log_probs", "sft_loss_weight", "temperature"), lossgate.ANY
    ),
)
def dpo_reference_not_averaged(inputs, options, mesh):
    gate, beta = inputs.sample_mask[0::2], options.reference_policy_kl_penalty
    trained = inputs.mask & gate.repeat_interleave(2)[inputs.sequence]
    logits = torch.where(trained[:, None], inputs.logits.float(), 0.0) / options.temperature
    logprobs = -F.cross_entropy(logits, inputs.labels, reduction="none")
    policy = by_sequence(torch.where(trained, logprobs, 0.0), inputs)
    nll = -policy[0::2]
    if options.preference_average_log_probs:
        policy = policy / by_sequence(trained.float(), inputs).clamp(min=1.0)
    reward = policy - by_sequence(torch.where(trained, inputs.reference_logprobs, 0.0), inputs)
    margin = reward[0::2] - reward[1::2]
    losses = (margin - 0.5 / beta).square() if options.loss_type == "ipo" else F.softplus(-beta * margin)
    return torch.where(gate, losses + options.sft_loss_weight * nll, 0.0).sum() / pairs(inputs)


# As in NeMo-RL #1818. The smallest and the largest ratio over micro-batches are divided by the
# number of micro-batches, as if they were sums to be averaged. The author would have to leave
# metrics that are minima and maxima out of that division.
@lossgate.candidate(
    "clipped_pg",
    head="logits",
    axes=("dp", "cp"),
    dtypes=("float32",),
    supports={"reference_policy_kl_penalty": 0.0, "ratio_clip_min": lossgate.ANY, "ratio_clip_max": lossgate.ANY},
    tiles={"token": CHUNK},
)
def extremes_divided_by_microbatches(inputs, options, mesh):
    mask = inputs.mask & inputs.sample_mask[inputs.sequence]
    log_p = inputs.logits.masked_fill(~mask[:, None], 0.0).log_softmax(-1)
    logprobs = log_p.gather(1, inputs.labels[:, None])[:, 0]
    ratio = torch.where(mask, logprobs - inputs.prev_logprobs, 0.0).exp()
    clamped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    advantages = torch.where(mask, inputs.advantages, 0.0)
    count = inputs.valid_tokens.clamp(min=1)
    micro_batches = max(len(mask.split(CHUNK)), 1)
    metrics = {}
    for name, values in (("probs_ratio", ratio.detach()), ("probs_ratio_clamped", clamped.detach())):
        metrics[name] = torch.where(mask, values, 0.0).sum() / count
        metrics[name + "_min"] = torch.cat([values[mask], torch.tensor([torch.inf])]).min() / micro_batches
        metrics[name + "_max"] = torch.cat([values[mask], torch.tensor([-torch.inf])]).max() / micro_batches
    losses = torch.maximum(-advantages * ratio, -advantages * clamped)
    return lossgate.Outputs(loss=torch.where(mask, losses, 0.0).sum() / count, metrics=metrics)


BUGS = {
    "teacher_not_tempered": ("single",),
    "hard_loss_mixed_in": ("single",),
    "pairs_from_two_halves": ("dp=2",),
    "upstream_gradient_squared": ("dp=2",),
    "sums_of_one_rank": ("cp=2",),
    "dpo_reference_not_averaged": ("single",),
    "extremes_divided_by_microbatches": ("cp=2",),
}
