# SPDX-License-Identifier: Apache-2.0
"""Distillation: Liger's KLDiv function, torchtune's chunks, TRL's Jensen-Shannon divergence, and a
cross-entropy with soft targets, as in NeMo Automodel.
"""

import torch
import torch.nn.functional as F

import lossgate

ANY = lossgate.ANY


def two_logits(inputs, options, dtype=torch.float32):
    """The logits of student and teacher after the temperature, 0 where nothing is trained."""
    ignored = ~inputs.mask[:, None]
    student = inputs.logits.masked_fill(ignored, 0.0).to(dtype) / options.temperature
    teacher = inputs.teacher_logits.masked_fill(ignored, 0.0).to(dtype) / options.temperature
    return student, teacher


class KLDivLoss(torch.autograd.Function):
    """``F.kl_div(input, target, reduction="batchmean", log_target=True)`` over ``count`` rows."""

    @staticmethod
    def forward(ctx, log_q, log_p, count, bug):
        divisor = count
        if bug == "batchmean_by_elements":
            divisor = count * log_q.shape[1]
        ctx.save_for_backward(log_p, divisor)
        return (log_p.exp() * (log_p - log_q)).sum() / divisor

    @staticmethod
    def backward(ctx, grad_output):
        log_p, divisor = ctx.saved_tensors
        return -log_p.exp() * (grad_output / divisor), None, None, None


def liger_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        student, teacher = two_logits(inputs, options)
        count = inputs.valid_tokens.clamp(min=1)
        return KLDivLoss.apply(student.log_softmax(-1), teacher.log_softmax(-1), count, bug)

    return kernel


liger = liger_of(None, "liger")

# Reduction "batchmean" divides the divergence and its gradient by all entries, rows times columns
# of the vocabulary, as "mean" does. The author would have to divide by the number of rows alone.
# (Liger)
batchmean_by_elements = liger_of("batchmean_by_elements", "batchmean_by_elements")

CHUNK = 4


def forward_kl(student, teacher, mask, normalize=True, guard=True):
    """KL(teacher || student): the mean over trained tokens of a chunk, or the sum."""
    teacher_prob = F.softmax(teacher, dim=-1, dtype=torch.float32)
    teacher_logprobs = F.log_softmax(teacher, dim=-1, dtype=torch.float32)
    student_logprobs = F.log_softmax(student, dim=-1, dtype=torch.float32)
    token_kl = (teacher_prob * (teacher_logprobs - student_logprobs)).sum(-1)
    total = torch.where(mask, token_kl, 0.0).sum()
    if not normalize:
        return total
    count = mask.sum()
    return total / (count.clamp(min=1) if guard else count)


def tune_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": ANY},
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        student, teacher = two_logits(inputs, options)
        total = 0.0 * student.sum()
        chunks = zip(student.split(CHUNK), teacher.split(CHUNK), inputs.mask.split(CHUNK), strict=True)
        for student_chunk, teacher_chunk, mask in chunks:
            chunk_loss = forward_kl(student_chunk, teacher_chunk, mask, guard=bug != "masked_chunk_by_zero")
            total = total + chunk_loss * mask.sum()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


tune = tune_of(None, "tune")

# The mean over a chunk divides by the chunk's trained tokens, of which there may be none, and one
# such chunk makes everything NaN. The author would have to return 0 for a chunk without trained
# tokens. (torchtune)
masked_chunk_by_zero = tune_of("masked_chunk_by_zero", "masked_chunk_by_zero")


def gkd_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"divergence_type": "jsd", "beta": ANY, "temperature": ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        student, teacher = two_logits(inputs, options, torch.float64)
        student_log_probs, teacher_log_probs = student.log_softmax(-1), teacher.log_softmax(-1)
        beta = torch.tensor(options.beta, dtype=student_log_probs.dtype)
        if bug == "mixture_weights_swapped":
            parts = [student_log_probs + beta.log(), teacher_log_probs + (1 - beta).log()]
        else:
            parts = [student_log_probs + (1 - beta).log(), teacher_log_probs + beta.log()]
        mixture_log_probs = torch.logsumexp(torch.stack(parts), dim=0)
        kl_teacher = F.kl_div(mixture_log_probs, teacher_log_probs, reduction="none", log_target=True)
        kl_student = F.kl_div(mixture_log_probs, student_log_probs, reduction="none", log_target=True)
        jsd = (beta * kl_teacher + (1 - beta) * kl_student).sum(-1)
        return torch.where(inputs.mask, jsd, 0.0).sum().float() / inputs.valid_tokens.clamp(min=1)

    return kernel


gkd = gkd_of(None, "gkd")

# In the mixture the student has weight beta and the teacher 1 - beta, while the two divergences
# are weighted the other way round; at 0.5 nothing shows. The author would have to swap the
# logarithms of the weights in the mixture. (TRL)
mixture_weights_swapped = gkd_of("mixture_weights_swapped", "mixture_weights_swapped")


class SoftCrossEntropy(torch.autograd.Function):
    """``-sum_v targets_v log softmax(logits)_v`` of each row, for targets of any total weight."""

    @staticmethod
    def forward(ctx, logits, targets, bug):
        shifted = logits - logits.amax(-1, keepdim=True)
        log_normaliser = shifted.logsumexp(-1, keepdim=True)
        sum_p = targets.sum(-1, keepdim=True)
        ctx.save_for_backward((shifted - log_normaliser).exp(), targets, sum_p)
        ctx.bug = bug
        return (sum_p * log_normaliser).squeeze(-1) - (targets * shifted).sum(-1)

    @staticmethod
    def backward(ctx, grad_output):
        softmax, targets, sum_p = ctx.saved_tensors
        if ctx.bug != "targets_assumed_normalised":
            softmax = softmax * sum_p
        grad = softmax - targets
        return grad * grad_output[:, None], None, None


def automodel_of(bug, name):
    @lossgate.candidate(
        "distill",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"kl_type": ANY, "mixed_kl_weight": ANY, "temperature": ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        student, teacher = two_logits(inputs, options, torch.float64)
        student = student.gather(1, inputs.teacher_indices)
        log_p = teacher.log_softmax(-1)
        weight = {"forward": 1.0, "reverse": 0.0, "mixed": options.mixed_kl_weight}[options.kl_type]
        token_kl = torch.zeros_like(student[:, 0])
        if weight > 0:
            # The weight is folded into the targets, whose sum is then no longer 1.
            targets = weight * log_p.exp()
            token_kl = token_kl + SoftCrossEntropy.apply(student, targets, bug) + (targets * log_p).sum(-1)
        if weight < 1:
            log_q = student.log_softmax(-1)
            token_kl = token_kl + (1 - weight) * (log_q.exp() * (log_q - log_p)).sum(-1)
        return torch.where(inputs.mask, token_kl, 0.0).sum().float() / inputs.valid_tokens.clamp(min=1)

    return kernel


automodel = automodel_of(None, "automodel")

# Forward multiplies the normaliser of the softmax by the sum of the targets, but backward takes
# that sum for 1, so the gradient is wrong where targets carry a weight. The author would have to
# multiply the softmax by sum(p) in backward, too. (NeMo Automodel)
targets_assumed_normalised = automodel_of("targets_assumed_normalised", "targets_assumed_normalised")

BUGS = {
    "batchmean_by_elements": ("single", "dp=2"),
    "masked_chunk_by_zero": ("single", "cp=2"),
    "mixture_weights_swapped": ("single", "cp=2"),
    "targets_assumed_normalised": ("single", "dp=2"),
}
RIGHT = {
    "liger": ("single", "dp=2"),
    "tune": ("single", "cp=2"),
    "gkd": ("single", "cp=2"),
    "automodel": ("single", "dp=2"),
}
