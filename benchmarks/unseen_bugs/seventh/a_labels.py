# SPDX-License-Identifier: Apache-2.0
"""Losses from logits: chunks, packs, smoothed labels, distillation; and bugs of them."""

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lossgate

CHUNK = 8


def cross_entropy_rows(logits, labels, n_non_ignore, upstream):
    """Losses of a chunk of rows over a count; the logits become their gradient, as in TE."""
    ignored = labels == -100
    safe = labels.masked_fill(ignored, 0)
    largest = logits.amax(dim=1, keepdim=True)
    z = logits - largest
    exponentials = z.exp()
    total = exponentials.sum(dim=1, keepdim=True)
    losses = (total.log() - z.gather(1, safe[:, None]))[:, 0]
    grads = exponentials / total
    grads.scatter_add_(1, safe[:, None], torch.full_like(total, -1.0))
    grads = grads.masked_fill(ignored[:, None], 0.0) * (upstream / n_non_ignore)
    return losses.masked_fill(ignored, 0.0).sum() / n_non_ignore, grads


class RowChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, count, bug):
        loss, grads = logits.new_zeros(()), torch.empty_like(logits)
        for start in range(0, len(logits), CHUNK):
            rows = slice(start, start + CHUNK)
            n_non_ignore = count
            if bug == "chunk count":
                n_non_ignore = (labels[rows] != -100).sum().clamp(min=1)
            part, grads[rows] = cross_entropy_rows(logits[rows], labels[rows], n_non_ignore, 1.0)
            loss += part
        ctx.save_for_backward(grads)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        (grads,) = ctx.saved_tensors
        return grads * upstream, None, None, None


def row_chunks_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        precision=lossgate.Precision(grads_in_forward=True),
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        labels = inputs.labels.masked_fill(~inputs.mask, -100)
        return RowChunks.apply(inputs.logits, labels, inputs.valid_tokens.clamp(min=1), bug)

    return kernel


row_chunks = row_chunks_of(None, "row_chunks")

# Each chunk of rows divides its losses and gradients by its own number of labels that are not
# ignored, so the sum over chunks is a sum of means. The author must pass the number of the whole
# batch to every chunk.
every_chunk_own_count = row_chunks_of("chunk count", "every_chunk_own_count")


def zigzag(packed, starts, ranks, rank):
    """Takes a rank's tokens of a padded pack: pieces r and 2 cp - 1 - r of each sequence."""
    if ranks == 1:
        return packed
    parts = []
    for first, last in pairwise(starts):
        pieces = packed[first:last].chunk(2 * ranks) if last > first else ()
        if pieces:
            parts += [pieces[rank], pieces[2 * ranks - 1 - rank]]
    return torch.cat(parts) if parts else packed[:0]


def packed_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        tokens="packed",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        group = mesh.get_group("cp")
        starts = inputs.cu_seqlens_padded.tolist()
        ids, mask = inputs.input_ids[0], inputs.mask[0].clone()
        mask[[start for start in starts[:-1] if start < len(mask)]] = False
        mask = mask.roll(-1)
        labels = ids if bug == "no roll" and group.size() > 1 else ids.roll(-1)
        ranks, rank = group.size(), dist.get_rank(group)
        labels, mask = (zigzag(x, starts, ranks, rank) for x in (labels, mask))
        logits = inputs.logits / options.temperature
        losses = F.cross_entropy(logits, labels.masked_fill(~mask, -100), reduction="sum", ignore_index=-100)
        return losses / inputs.valid_tokens.clamp(min=1)

    return kernel


packed = packed_of(None, "packed")

# With context parallelism, a branch that splits the pack rolls the mask but not the labels, so each
# token is trained to predict itself. The author must roll the labels before the split, too.
labels_unrolled_under_cp = packed_of("no roll", "labels_unrolled_under_cp")


class Smoothed(torch.autograd.Function):
    """Label smoothing over a vocabulary that tensor parallelism may split."""

    @staticmethod
    def forward(ctx, logits, labels, mask, smoothing, start, vocab, group, bug):
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        z = logits - largest[:, None]
        here = (labels >= start) & (labels < start + z.shape[1])
        local = (labels - start).clamp(0, z.shape[1] - 1)
        predicted = z.gather(1, local[:, None])[:, 0].masked_fill(~here, 0.0)
        sums = torch.stack([z.exp().sum(dim=1), predicted, z.sum(dim=1)])
        dist.all_reduce(sums, group=group)
        normaliser = sums[0].log()
        nll = (normaliser - sums[1]).masked_fill(~mask, 0.0)
        smooth = normaliser - sums[2] / vocab
        if bug != "unmasked":
            smooth = smooth.masked_fill(~mask, 0.0)
        ctx.save_for_backward(z, sums[0], here, local, mask)
        ctx.smoothing, ctx.vocab = smoothing, vocab
        return (1 - smoothing) * nll + smoothing * smooth

    @staticmethod
    def backward(ctx, upstream):
        z, total, here, local, mask = ctx.saved_tensors
        grad = z.exp() / total[:, None] - ctx.smoothing / ctx.vocab
        grad.scatter_add_(1, local[:, None], (ctx.smoothing - 1) * here[:, None].to(grad.dtype))
        grad = grad.masked_fill(~mask[:, None], 0.0)
        return grad * upstream[:, None], None, None, None, None, None, None, None


def smoothed_of(bug, name):
    @lossgate.candidate(
        "label_smoothing",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"smoothing": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        where = inputs.vocab_start, inputs.vocab_size, mesh.get_group("tp")
        losses = Smoothed.apply(inputs.logits, inputs.labels, inputs.mask, options.smoothing, *where, bug)
        return losses.sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


smoothed = smoothed_of(None, "smoothed")

# The smoothing term of ignored rows is added to the loss: the mask is applied to the term of the
# label alone. The gradient of ignored rows is 0, as it must be. The author must mask both.
smoothing_of_ignored_rows_added = smoothed_of("unmasked", "smoothing_of_ignored_rows_added")


def generalised_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"divergence_type": "jsd", "beta": lossgate.ANY, "temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        ignored, beta = ~inputs.mask[:, None], torch.tensor(options.beta, dtype=torch.float64)
        student, teacher = (
            torch.log_softmax(x.double().masked_fill(ignored, 0.0) / options.temperature, dim=1)
            for x in (inputs.logits, inputs.teacher_logits)
        )
        mixture = torch.logsumexp(torch.stack([teacher + beta.log(), student + torch.log1p(-beta)]), dim=0)
        if bug == "arguments":
            of_teacher = F.kl_div(teacher, mixture, reduction="none", log_target=True)
            of_student = F.kl_div(student, mixture, reduction="none", log_target=True)
        else:
            of_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
            of_student = F.kl_div(mixture, student, reduction="none", log_target=True)
        jsd = (beta * of_teacher + (1 - beta) * of_student).sum(dim=1)
        jsd = jsd.masked_fill(~inputs.mask, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
        return jsd.to(inputs.logits.dtype)

    return kernel


generalised = generalised_of(None, "generalised")

# The arguments of F.kl_div are in the wrong order: it takes the logarithm of the approximation
# first and the target second, so both terms are divergences of the mixture from the models and not
# of the models from the mixture. The author must swap the two arguments.
kl_div_arguments_swapped = generalised_of("arguments", "kl_div_arguments_swapped")

BUGS = {
    "every_chunk_own_count": ("single", "cp=2"),
    "labels_unrolled_under_cp": ("cp=2", "dp=2,cp=2"),
    "smoothing_of_ignored_rows_added": ("single", "tp=2"),
    "kl_div_arguments_swapped": ("single", "cp=2"),
}
RIGHT = {
    "row_chunks": ("single", "cp=2"),
    "packed": ("cp=2", "dp=2,cp=2"),
    "smoothed": ("single", "tp=2"),
    "generalised": ("single", "cp=2"),
}
