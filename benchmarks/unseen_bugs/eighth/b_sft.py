# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning losses on logits: a chunked cross entropy, a step that reports, and a JSD."""

import torch

import lossgate

CHUNK = 4


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy of rows, with the gradient of the logits made in forward, chunk by chunk."""

    @staticmethod
    def forward(ctx, logits, labels, temperature, ignore_index, bug):
        total = torch.zeros((), dtype=torch.float32)
        grad = torch.zeros_like(logits, dtype=torch.float32)
        for start in range(0, logits.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            # The caller says which label is ignored. This compares with the usual -100 whatever
            # the caller says, so that rows with another ignored label are trained, on label 0.
            # To do: compare with the argument ignore_index.
            kept = labels[rows] != (-100 if bug == "ignore_index" else ignore_index)
            z = logits[rows].float() / temperature
            z = z.masked_fill(~kept[:, None], 0.0)
            target = labels[rows].clamp(min=0)[:, None]
            largest = z.amax(1, keepdim=True)
            exps = (z - largest).exp()
            denominator = exps.sum(1, keepdim=True)
            losses = denominator.log() - (z - largest).gather(1, target)
            total += losses[:, 0].masked_fill(~kept, 0.0).sum()
            dz = exps / denominator
            dz.scatter_add_(1, target, torch.full_like(target, -1, dtype=dz.dtype))
            grad[rows] = dz.masked_fill(~kept[:, None], 0.0) / temperature
        ctx.save_for_backward(grad)
        ctx.dtype = logits.dtype
        return total

    @staticmethod
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return (grad * upstream).to(ctx.dtype), None, None, None, None


def chunked_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        pad = -1
        labels = inputs.labels.masked_fill(~inputs.mask, pad)
        total = ChunkedCrossEntropy.apply(inputs.logits, labels, options.temperature, pad, bug)
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


chunked = chunked_of(None, "chunked")
ignored_label_not_compared = chunked_of("ignore_index", "ignored_label_not_compared")


def step_of(bug, name, dtype="float32"):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("dp", "cp"),
        dtypes=(dtype,),
        supports={"reduction": lossgate.ANY, "temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask, count = inputs.mask, inputs.valid_tokens.clamp(min=1)
        logits = inputs.logits.float().masked_fill(~mask[:, None], 0.0) / options.temperature
        losses = torch.nn.functional.cross_entropy(logits, inputs.labels, reduction="none")
        losses = losses.masked_fill(~mask, 0.0)
        # The running sum of the loss is in the dtype of a float16 model, where it rounds to 11
        # bits, and ends at 65504. To do: add up in float32.
        total = torch.zeros((), dtype=torch.float16 if bug == "half_sum" else torch.float32)
        for part in losses.split(CHUNK):
            total = total + part.sum().to(total.dtype)
        total = total.float()
        loss = total / count if options.reduction == "mean" else total
        reported = losses.detach()
        if bug == "max_scaled":
            # torchtitan: once losses were divided by the tokens of the whole batch, for their sum
            # over ranks to be the mean, the largest was taken of what had been divided. It is then
            # smaller than the mean. To do: divide for the mean alone.
            reported = reported / count
            largest, mean = reported.masked_fill(~mask, -torch.inf), reported.sum()
        else:
            largest, mean = reported.masked_fill(~mask, -torch.inf), reported.sum() / count
        largest = torch.cat([largest, largest.new_full((1,), -torch.inf)]).max()
        return lossgate.Outputs(loss=loss, metrics={"loss_avg": mean, "loss_max": largest})

    return kernel


step = step_of(None, "step")
half_step = step_of(None, "half_step", "float16")
largest_loss_divided_by_count = step_of("max_scaled", "largest_loss_divided_by_count")
running_sum_in_float16 = step_of("half_sum", "running_sum_in_float16", "float16")


def jsd_of_rows(student, teacher, beta=0.5):
    """The generalised Jensen-Shannon divergence of rows of log-probabilities."""
    weight = torch.tensor(beta, dtype=student.dtype)
    mixture = torch.logaddexp(weight.log() + teacher, (1 - weight).log() + student)
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(1)
    of_student = (student.exp() * (student - mixture)).sum(1)
    return weight * of_teacher + (1 - weight) * of_student


class FusedLinearJsd(torch.autograd.Function):
    """Head and divergence in chunks of tokens, with the gradients made in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher, mask, temperature, beta, bug):
        total = torch.zeros((), dtype=torch.float32)
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            kept = mask[rows]
            states = hidden[rows].masked_fill(~kept[:, None], 0.0)
            z = (states @ weight.T).detach().requires_grad_()
            with torch.enable_grad():
                student = torch.log_softmax(z / temperature, dim=1)
                given = teacher[rows].masked_fill(~kept[:, None], 0.0) / temperature
                # Liger: the fused loss takes beta, and does not hand it on to the divergence,
                # which computes with its default of 0.5. To do: pass beta.
                handed_on = {} if bug == "beta" else {"beta": beta}
                losses = jsd_of_rows(student, torch.log_softmax(given, dim=1), **handed_on)
                part = losses.masked_fill(~kept, 0.0).sum()
            total += part.detach()
            (dz,) = torch.autograd.grad(part, z)
            grad_hidden[rows] = dz @ weight
            grad_weight += dz.T @ states
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, upstream):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream, grad_weight * upstream, None, None, None, None, None


def jsd_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"divergence_type": "jsd", "beta": lossgate.ANY, "temperature": lossgate.ANY},
        precision=lossgate.Precision(grads_in_forward=True),
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        total = FusedLinearJsd.apply(
            inputs.hidden,
            inputs.weight,
            inputs.teacher_logits.float(),
            inputs.mask,
            options.temperature,
            options.beta,
            bug,
        )
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


jsd = jsd_of(None, "jsd")
beta_not_handed_on = jsd_of("beta", "beta_not_handed_on")

BUGS = {
    "largest_loss_divided_by_count": ("single", "dp=2"),
    "ignored_label_not_compared": ("single", "cp=2"),
    "beta_not_handed_on": ("single", "dp=2"),
    "running_sum_in_float16": ("single", "dp=2"),
}
RIGHT = {
    "chunked": ("single", "cp=2"),
    "step": ("single", "dp=2"),
    "half_step": ("single", "dp=2"),
    "jsd": ("single", "dp=2"),
}
