# SPDX-License-Identifier: Apache-2.0
"""Chunked cross entropy and entropy, a divergence of split vocabularies, and a value loss of
batches sorted by length.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lossgate


def cross_entropy(logits, labels):
    ignored = labels == -100
    return F.cross_entropy(logits.masked_fill(ignored[:, None], 0.0).float(), labels, reduction="none")


def entropy(logits, labels):
    logprobs = torch.log_softmax(logits.masked_fill((labels == -100)[:, None], 0.0).float(), 1)
    return -(logprobs.exp() * logprobs).sum(1)


class Chunked(torch.autograd.Function):
    """A number for each token, such as its cross entropy; backward computes a chunk again."""

    @staticmethod
    def forward(ctx, logits, labels, of_chunk, size, bug):
        ctx.logits, ctx.labels, ctx.of_chunk, ctx.size, ctx.bug = logits, labels, of_chunk, size, bug
        found = torch.empty(len(labels), dtype=torch.float32)
        for i in range(0, len(labels), size):
            found[i : i + size] = of_chunk(logits[i : i + size], labels[i : i + size])
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        grad = ctx.logits if ctx.bug == "overwrite" else torch.empty_like(ctx.logits)
        for i in range(0, len(ctx.labels), ctx.size):
            part = slice(i, i + ctx.size)
            with torch.enable_grad():
                chunk = ctx.logits[part].detach().requires_grad_()
                found = ctx.of_chunk(chunk, ctx.labels[part])
                (grad_chunk,) = torch.autograd.grad(found, chunk, upstream[part])
            grad[part] = grad_chunk
        return grad, None, None, None, None


def chunked_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        differentiable=("logprobs", "token_entropy"),
        tiles={"token": 4},
        name=name,
    )
    def kernel(inputs, options, mesh):
        labels = inputs.labels.masked_fill(~inputs.mask, -100)
        return lossgate.Outputs(
            logprobs=-Chunked.apply(inputs.logits, labels, cross_entropy, 4, bug),
            token_entropy=Chunked.apply(inputs.logits, labels, entropy, 4, bug),
        )

    return kernel


class SplitDivergence(torch.autograd.Function):
    """The divergence of each token. The gradient of the student's logits is made in forward."""

    @staticmethod
    def forward(ctx, student, teacher, kind, beta, temperature, group):
        log_q = split_log_softmax(student / temperature, group)
        log_p = split_log_softmax(teacher / temperature, group)
        p, q = log_p.exp(), log_q.exp()
        if kind == "forward":
            kl = over_vocabulary((p * (log_p - log_q)).sum(1), group)
            grad = q - p
        elif kind == "reverse":
            kl = over_vocabulary((q * (log_q - log_p)).sum(1), group)
            grad = q * (log_q - log_p - kl[:, None])
        else:
            weight = torch.tensor(beta)
            log_r = torch.logaddexp(log_p + weight.log(), log_q + (1 - weight).log())
            parts = torch.stack([(p * (log_p - log_r)).sum(1), (q * (log_q - log_r)).sum(1)])
            of_teacher, of_student = over_vocabulary(parts, group)
            kl = beta * of_teacher + (1 - beta) * of_student
            grad = (1 - beta) * q * (log_q - log_r - of_student[:, None])
        ctx.save_for_backward(grad / temperature)
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return grad * upstream[:, None], *(None,) * 5


def split_log_softmax(z, group):
    top = z.amax(1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    return z - top - over_vocabulary((z - top).exp().sum(1, keepdim=True), group).log()


def over_vocabulary(x, group):
    dist.all_reduce(x, group=group)
    return x


def distilled_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"divergence_type": lossgate.ANY, "beta": lossgate.ANY, "temperature": lossgate.ANY},
        precision=lossgate.Precision(grads_in_forward=True),
        name=name,
    )
    def kernel(inputs, options, mesh):
        columns = inputs.vocab_end - inputs.vocab_start
        student, teacher = inputs.logits[:, :columns], inputs.teacher_logits[:, :columns]
        if bug != "unmasked":
            student = student.masked_fill(~inputs.mask[:, None], 0.0)
            teacher = teacher.masked_fill(~inputs.mask[:, None], 0.0)
        kl = SplitDivergence.apply(
            student, teacher, options.divergence_type, options.beta, options.temperature, mesh.get_group("tp")
        )
        if bug != "unmasked":
            kl = torch.where(inputs.mask, kl, 0.0)
        return kl.sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


def dynamic_batches(lengths, most):
    """Sequences in order of length, in micro-batches of so many: the indices of their tokens."""
    starts = (lengths.cumsum(0) - lengths).tolist()
    order = lengths.argsort(descending=True, stable=True).tolist()
    tokens = [torch.arange(starts[i], starts[i] + int(lengths[i])) for i in order]
    return [torch.cat(tokens[i : i + most]) for i in range(0, len(tokens), most)]


def sorted_of(bug, name):
    @lossgate.candidate(
        "value",
        head="values",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"cliprange": lossgate.ANY, "scale": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        lengths = inputs.cu_seqlens_padded.diff() // mesh["cp"].size()
        batches = dynamic_batches(lengths, 2)
        if not batches:
            return inputs.values.sum() * 0
        values = torch.cat([inputs.values[batch] for batch in batches])
        inverse = torch.cat(batches).argsort()
        if bug == "early":
            values = torch.where(inputs.mask, values, 0.0)[inverse]
        else:
            values = torch.where(inputs.mask, values[inverse], 0.0)
        old_values, returns = (torch.where(inputs.mask, x, 0.0) for x in (inputs.old_values, inputs.returns))
        errors = (values - returns).square()
        if options.cliprange is not None:
            clipped = old_values + (values - old_values).clamp(-options.cliprange, options.cliprange)
            errors = torch.maximum(errors, (clipped - returns).square())
        total = torch.where(inputs.mask, errors, 0.0).sum() / 2
        return options.scale * total / inputs.valid_tokens.clamp(min=1)

    return kernel


chunked = chunked_of(None, "chunked")
distilled = distilled_of(None, "distilled")
batched = sorted_of(None, "batched")

# Backward writes the gradient of each chunk over the logits that it saved, which are the caller's
# own, and returns them: the backward of another output, such as of an auxiliary loss, and a second
# backward find gradients there. Its author would have to write to a new tensor.
backward_overwrites_saved_logits = chunked_of("overwrite", "backward_overwrites_saved_logits")

# The divergence is summed over all tokens, those of the prompt and padding too, since the mask of
# the labels is not applied to it. Its author would have to select the trained tokens before the
# sum.
divergence_ignores_mask = distilled_of("unmasked", "divergence_ignores_mask")

# Values come back in the order of micro-batches, longest sequences first, and the mask, in the
# order of the batch, is applied before they are put back in order, so that it clears the values of
# other tokens. Its author would have to mask after the inverse permutation.
mask_before_inverse_permutation = sorted_of("early", "mask_before_inverse_permutation")

BUGS = {
    "backward_overwrites_saved_logits": ("single", "cp=2"),
    "divergence_ignores_mask": ("tp=2", "tp=3"),
    "mask_before_inverse_permutation": ("single", "cp=2"),
}
RIGHT = {
    "chunked": ("single", "cp=2"),
    "distilled": ("tp=2", "tp=3"),
    "batched": ("single", "cp=2"),
}
