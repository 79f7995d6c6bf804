# SPDX-License-Identifier: Apache-2.0
"""Distillation from a teacher's whole vocabulary, split over tp, and from its top-k."""

import torch
import torch.distributed as dist

import lossgate


class SumOver(torch.autograd.Function):
    """The sum over the group. Its gradient is summed, too, where ranks go on with their parts."""

    @staticmethod
    def forward(ctx, x, group, sum_backward):
        ctx.group, ctx.sum_backward = group, sum_backward
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.sum_backward:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def log_softmax(logits, group):
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits = logits - top
    return logits - SumOver.apply(logits.exp().sum(-1, keepdim=True), group, True).log()


def divergence(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"divergence_type": lossgate.ANY, "beta": lossgate.ANY, "temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        group, mask = mesh.get_group("tp"), inputs.mask[:, None]
        student = log_softmax(torch.where(mask, inputs.logits, 0.0) / options.temperature, group)
        teacher = torch.where(mask, inputs.teacher_logits, 0.0) / options.temperature
        teacher = torch.log_softmax(teacher, -1) if bug == "teacher_of_one_shard" else log_softmax(teacher, group)

        def kl(p, q):
            return (p.exp() * (p - q)).sum(-1)

        if options.divergence_type == "forward":
            terms = kl(student, teacher) if bug == "kl_arguments" else kl(teacher, student)
        elif options.divergence_type == "reverse":
            terms = kl(student, teacher)
        else:
            beta = options.beta
            w = 1 - beta if bug == "mixture_weights" else beta
            mixture = torch.logaddexp(teacher + torch.tensor(w).log(), student + torch.tensor(1 - w).log())
            terms = beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
        terms = SumOver.apply(terms, group, False)
        return torch.where(inputs.mask, terms, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


divergence_right = divergence(None, "divergence_right")

# The arguments of the forward KL are exchanged, as is easy with F.kl_div: it is the reverse KL.
kl_arguments = divergence("kl_arguments", "kl_arguments")

# The mixture of the JSD has the weights of teacher and student exchanged.
mixture_weights = divergence("mixture_weights", "mixture_weights")

# The teacher's softmax is normalised over this rank's columns of the vocabulary.
teacher_of_one_shard = divergence("teacher_of_one_shard", "teacher_of_one_shard")


def top_k(bug, name):
    @lossgate.candidate(
        "distill",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY, "kl_type": ("forward", "reverse")},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask[:, None]
        logits = torch.where(mask, inputs.hidden, 0.0) @ inputs.weight.T
        student = torch.log_softmax(logits.gather(1, inputs.teacher_indices) / options.temperature, -1)
        teacher = torch.where(mask, inputs.teacher_logits, 0.0)
        if not bug:
            teacher = teacher / options.temperature
        teacher = torch.log_softmax(teacher, -1)
        p, q = (teacher, student) if options.kl_type == "forward" else (student, teacher)
        losses = (p.exp() * (p - q)).sum(-1)
        return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


top_k_right = top_k(False, "top_k_right")

# The temperature divides the student's logits, but not the teacher's.
teacher_not_tempered = top_k(True, "teacher_not_tempered")

BUGS = {
    "kl_arguments": ("single",),
    "mixture_weights": ("single",),
    "teacher_of_one_shard": ("tp=2",),
    "teacher_not_tempered": ("single",),
}
RIGHT = ("divergence_right", "top_k_right")
