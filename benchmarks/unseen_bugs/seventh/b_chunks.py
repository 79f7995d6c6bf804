# SPDX-License-Identifier: Apache-2.0
"""Chunked heads and distillation: NLL, soft-cap, divergences, and a loss of padded rows."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

import lossgate


def chunked_nll_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        tiles={"token": 16},
        supports={"bias": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        targets = inputs.labels.masked_fill(~inputs.mask, -100)
        hidden = inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0)
        loss = F.linear(hidden[:0], inputs.weight, inputs.bias).sum()
        for rows, labels in zip(hidden.split(16), targets.split(16), strict=True):
            logits = F.linear(rows, inputs.weight, inputs.bias)
            total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            if bug == "means":
                loss = loss + total / (labels != -100).sum().clamp(min=1)
            else:
                loss = loss + total / inputs.valid_tokens.clamp(min=1)
        return loss

    return kernel


def capped_nll_of(bug, name):
    @lossgate.candidate(
        "softcap",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        tiles={"token": 8},
        supports={"softcap": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        cap = options.softcap
        total = inputs.hidden[:0].sum() + inputs.weight[:0].sum()
        for at in range(0, inputs.labels.shape[0], 8):
            mask = inputs.mask[at : at + 8]
            x = torch.where(mask[:, None], inputs.hidden[at : at + 8], 0.0) @ inputs.weight.T
            x = x * torch.tanh(x / cap) if bug == "formula" else cap * torch.tanh(x / cap)
            nll = x.logsumexp(dim=1) - x.gather(1, inputs.labels[at : at + 8, None])[:, 0]
            total = total + torch.where(mask, nll, 0.0).sum()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


def kl_div(log_q, log_p):
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def distilled_of(bug, name, weight_hard_loss=0.5, weight_soft_loss=0.5):
    """Any of the divergences, from logits."""

    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"divergence_type": lossgate.ANY, "beta": lossgate.ANY, "temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask
        student = inputs.logits.masked_fill(~mask[:, None], 0.0)
        teacher = inputs.teacher_logits.masked_fill(~mask[:, None], 0.0)
        log_q = (student / options.temperature).log_softmax(dim=1)
        log_p = (teacher / options.temperature).log_softmax(dim=1)
        if options.divergence_type == "jsd":
            beta = torch.tensor(options.beta)
            log_r = torch.logaddexp(log_p + beta.log(), log_q + (1 - beta).log())
            soft = beta * kl_div(log_r, log_p) + (1 - beta) * kl_div(log_r, log_q)
        elif options.divergence_type == "reverse":
            soft = kl_div(log_p, log_q)
        else:
            soft = kl_div(log_q, log_p)
        if bug == "hard":
            hard = F.cross_entropy(student, inputs.labels, reduction="none")
            soft = weight_hard_loss * hard + weight_soft_loss * soft
        return torch.where(mask, soft, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


class FusedJsd(torch.autograd.Function):
    """Head and divergence a chunk of tokens at a time; gradients are made in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher, mask, count, beta, temperature, chunk, bug):
        loss = hidden.new_zeros(())
        dhidden, dweight = torch.zeros_like(hidden), torch.zeros_like(weight)
        log_beta, log_rest = torch.tensor(beta).log(), (1 - torch.tensor(beta)).log()
        for at in range(0, hidden.shape[0], chunk):
            part = slice(at, min(at + chunk, hidden.shape[0]))
            size = part.stop - part.start
            keep = (mask[:size] if bug == "labels" else mask[part])[:, None]
            rows = torch.where(keep, hidden[part], 0.0)
            log_q = ((rows @ weight.T) / temperature).log_softmax(dim=1)
            log_p = (torch.where(keep, teacher[part], 0.0) / temperature).log_softmax(dim=1)
            log_r = torch.logaddexp(log_p + log_beta, log_q + log_rest)
            q, excess = log_q.exp(), log_q - log_r
            kl_q = (q * excess).sum(dim=1, keepdim=True)
            kl_p = (log_p.exp() * (log_p - log_r)).sum(dim=1, keepdim=True)
            loss += torch.where(keep, beta * kl_p + (1 - beta) * kl_q, 0.0).sum() / count
            dlogits = torch.where(keep, (1 - beta) * q * (excess - kl_q), 0.0) / (temperature * count)
            dhidden[part] = dlogits @ weight
            dweight += dlogits.T @ rows
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dhidden, dweight = ctx.saved_tensors
        return (grad * dhidden, grad * dweight, *[None] * 7)


def fused_jsd_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        tiles={"token": 8},
        supports={"divergence_type": "jsd", "beta": lossgate.ANY, "temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        return FusedJsd.apply(
            inputs.hidden,
            inputs.weight,
            inputs.teacher_logits,
            inputs.mask,
            inputs.valid_tokens.clamp(min=1),
            options.beta,
            options.temperature,
            8,
            bug,
        )

    return kernel


def rows_of(bug, name):
    """Padded rows, read by flat offsets as a kernel with raw pointers reads them."""

    @lossgate.candidate(
        "nll",
        head="logits",
        tokens="rows",
        axes=("dp",),
        dtypes=("float32",),
        supports={"reduction": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        lengths = inputs.cu_seqlens_padded.diff().tolist()
        if not lengths:
            return inputs.logits[:0].sum()
        batch, width = inputs.input_ids.shape
        logits = pad_sequence(inputs.logits.split(lengths), batch_first=True)
        extra = width - 1 - logits.shape[1]
        logits = F.pad(logits, (0, 0, 0, extra)).flatten(0, 1)
        labels, mask = inputs.input_ids[:, 1:].contiguous(), inputs.mask[:, 1:]
        mask = mask if bug == "strided" else mask.contiguous()
        count = batch * (width - 1)
        flat = torch.as_strided(mask, (count,), (1,), mask.storage_offset())
        logits = torch.where(flat[:, None], logits, 0.0)
        nll = F.cross_entropy(logits, labels.view(-1), reduction="none")
        total = torch.where(flat, nll, 0.0).sum()
        return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)

    return kernel


chunked_nll = chunked_nll_of(None, "chunked_nll")
capped_nll = capped_nll_of(None, "capped_nll")
distilled = distilled_of(None, "distilled")
fused_jsd = fused_jsd_of(None, "fused_jsd")
flat_rows = rows_of(None, "flat_rows")

# The soft-cap is x tanh(x / cap), which bounds nothing. Its author would have to write cap tanh(x /
# cap).
softcap_multiplies_by_logit = capped_nll_of("formula", "softcap_multiplies_by_logit")

# The fused path mixes half a cross entropy of the labels into the divergence, by defaults of 0.5
# for both weights that nobody set. Its author would have to pass weight_hard_loss=0 and
# weight_soft_loss=1.
hard_loss_mixed_in = distilled_of("hard", "hard_loss_mixed_in")

# Each chunk's loss is the mean over its own trained tokens, and these means are added up. Its
# author would have to add up sums and divide by the trained tokens of the batch.
chunk_means_added_up = chunked_nll_of("means", "chunk_means_added_up")

# Every chunk is masked by the start of the whole mask, because labels are not sliced as the hidden
# states are. Its author would have to pass mask[start:end].
chunk_mask_not_sliced = fused_jsd_of("labels", "chunk_mask_not_sliced")

# The mask is a view without the first column, and is read by flat offsets as if its rows lay end to
# end. Its author would have to make it contiguous, as the labels are, or use its stride.
strided_mask_read_flat = rows_of("strided", "strided_mask_read_flat")

BUGS = {
    "softcap_multiplies_by_logit": ("single", "dp=2"),
    "hard_loss_mixed_in": ("single", "cp=2"),
    "chunk_means_added_up": ("single", "cp=2"),
    "chunk_mask_not_sliced": ("single", "cp=2"),
    "strided_mask_read_flat": ("single", "dp=2"),
}
RIGHT = {
    "chunked_nll": ("single", "cp=2"),
    "capped_nll": ("single", "dp=2"),
    "distilled": ("single", "cp=2"),
    "fused_jsd": ("single", "cp=2"),
    "flat_rows": ("single", "dp=2"),
}
