# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels of supervised fine-tuning on whole vocabularies, recreated from public reports."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate

CHUNK = 8
FLOAT32 = ("float32",)
IGNORED = -100

# A packed stream, which the collator shifts and splits in a zigzag


def _zigzag(stream: Tensor, starts: list[int], rank: int, ranks: int) -> Tensor:
    """Returns this rank's two chunks of each padded sequence of a pack."""
    parts = [stream[:0]]
    for start, end in itertools.pairwise(starts):
        if ranks == 1:
            parts.append(stream[start:end])
            continue
        chunks = stream[start:end].chunk(2 * ranks)
        parts += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return torch.cat(parts)


def _packed_sft(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    cp = mesh.get_group("cp")
    starts = inputs.cu_seqlens_padded.tolist()
    targets = inputs.input_ids[0].masked_fill(~inputs.mask[0], IGNORED)
    first = [start for start, end in itertools.pairwise(starts) if start < end]
    targets[first] = IGNORED  # Nothing predicts the first token of a sequence.
    targets = _zigzag(targets.roll(-1), starts, cp.rank(), cp.size())
    if bug == "shift in the model" and cp.size() > 1:
        targets = F.pad(targets[1:], (0, min(1, len(targets))), value=IGNORED)
    total = F.cross_entropy(inputs.logits.float() / options.temperature, targets, reduction="sum")
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate(
    "nll",
    head="logits",
    tokens="packed",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"reduction": lossgate.ANY, "temperature": lossgate.ANY},
)
def right_packed_sft(inputs, options, mesh):
    """Shifts the pack, splits it, and adds up the losses of this rank."""
    return _packed_sft(inputs, options, mesh)


@lossgate.candidate(
    "nll",
    head="logits",
    tokens="packed",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"reduction": lossgate.ANY, "temperature": lossgate.ANY},
)
def sharded_double_shift(inputs, options, mesh):
    """The collator has shifted the labels already, and with context parallelism the model
    shifts them once more.
    """
    return _packed_sft(inputs, options, mesh, bug="shift in the model")


# A dense lm-head that reports an entropy


def _dense_sft(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    logits = (inputs.hidden @ inputs.weight.T).float()
    if inputs.bias is not None:
        logits = logits + inputs.bias.float()
    log_p = F.log_softmax(logits / options.temperature, dim=-1)
    logprobs = log_p.gather(-1, inputs.labels[:, None])[:, 0]
    loss = -logprobs[inputs.mask].sum() / inputs.valid_tokens.clamp(min=1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)[inputs.mask].sum()
        if bug == "mean of means":
            ranks = mesh.get_group("dp").size() * mesh.get_group("cp").size()
            entropy = entropy / inputs.mask.sum().clamp(min=1) / ranks
        else:
            entropy = entropy / inputs.valid_tokens.clamp(min=1)
    return lossgate.Outputs(loss=loss, metrics={"entropy": entropy})


@lossgate.candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"temperature": lossgate.ANY, "bias": lossgate.ANY},
)
def right_dense_sft(inputs, options, mesh):
    """Divides the loss and the entropy by the trained tokens of the whole batch."""
    return _dense_sft(inputs, options, mesh)


@lossgate.candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"temperature": lossgate.ANY, "bias": lossgate.ANY},
)
def entropy_mean_of_rank_means(inputs, options, mesh):
    """The reported entropy is the mean over ranks of each rank's own mean, whatever their
    numbers of tokens.
    """
    return _dense_sft(inputs, options, mesh, bug="mean of means")


# A linear cross-entropy in chunks of tokens, which computes logits again in backward


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, bug):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.bug = bug
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = F.linear(rows, weight, bias).float()
            total += F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        return total

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, bias, targets = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(hidden), CHUNK):
            rows, wanted = hidden[start : start + CHUNK], targets[start : start + CHUNK]
            kept = wanted != IGNORED
            dlogits = F.linear(rows, weight, bias).float().softmax(-1)
            dlogits[torch.arange(len(rows)), wanted.clamp(min=0)] -= 1
            dlogits = torch.where(kept[:, None], dlogits, 0) * upstream
            grad_hidden[start : start + CHUNK] = dlogits @ weight.float()
            grad_weight += dlogits.T @ rows.float()
            if grad_bias is not None:
                if ctx.bug == "bias assigned":
                    grad_bias = dlogits.sum(0)
                else:
                    grad_bias += dlogits.sum(0)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None


def _chunked_sft(inputs: Any, options: Any, bug: str = "") -> Tensor:
    targets = inputs.labels.masked_fill(~inputs.mask, IGNORED)
    total = _ChunkedLinearCrossEntropy.apply(inputs.hidden, inputs.weight, inputs.bias, targets, bug)
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"reduction": lossgate.ANY, "bias": lossgate.ANY},
    tiles={"token": CHUNK},
)
def right_chunked_sft(inputs, options, mesh):
    """Adds up all gradients over the chunks."""
    return _chunked_sft(inputs, options)


@lossgate.candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"reduction": lossgate.ANY, "bias": lossgate.ANY},
    tiles={"token": CHUNK},
)
def bias_gradient_of_last_chunk(inputs, options, mesh):
    """Backward assigns the gradient of the bias in every chunk, so only that of the last chunk
    is left.
    """
    return _chunked_sft(inputs, options, bug="bias assigned")


# Log-probabilities and entropies, each by a kernel that is given pointers


def _flat(gradient: Tensor, bug: str) -> Tensor:
    """Returns the entries of a gradient as a kernel finds them."""
    if bug == "unit stride":
        return gradient.as_strided(gradient.shape, (1,), gradient.storage_offset())
    return gradient.contiguous()


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, bug):
        log_p = (logits.float() / temperature).log_softmax(-1)
        ctx.save_for_backward(log_p, labels)
        ctx.temperature, ctx.bug = temperature, bug
        return log_p.gather(-1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        log_p, labels = ctx.saved_tensors
        grad = -log_p.exp()
        grad[torch.arange(len(labels)), labels] += 1
        return grad * (_flat(upstream, ctx.bug) / ctx.temperature)[:, None], None, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature):
        log_p = (logits.float() / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(log_p, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    def backward(ctx, upstream):
        log_p, entropy = ctx.saved_tensors
        grad = -log_p.exp() * (log_p + entropy[:, None])
        return grad * (upstream / ctx.temperature)[:, None], None


def _logprobs_and_entropy(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    logprobs = _LabelLogprobs.apply(inputs.logits, inputs.labels, options.temperature, bug)
    table = torch.stack([logprobs, _Entropy.apply(inputs.logits, options.temperature)], dim=-1)
    return lossgate.Outputs(logprobs=table[:, 0], token_entropy=table[:, 1])


@lossgate.candidate(
    "token_logprobs",
    head="logits",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"temperature": lossgate.ANY},
    differentiable=("logprobs", "token_entropy"),
)
def right_strided_logprobs(inputs, options, mesh):
    """Makes the gradient of the log-probabilities contiguous before it is read."""
    return _logprobs_and_entropy(inputs, options)


@lossgate.candidate(
    "token_logprobs",
    head="logits",
    axes=("dp", "cp"),
    dtypes=FLOAT32,
    supports={"temperature": lossgate.ANY},
    differentiable=("logprobs", "token_entropy"),
)
def strided_upstream_read_densely(inputs, options, mesh):
    """Backward reads the upstream gradient of log-probabilities as if it had no stride, though
    it is a column.
    """
    return _logprobs_and_entropy(inputs, options, bug="unit stride")


# A z-loss that only rides along, as auxiliary losses of routers do


class _AttachAuxiliary(torch.autograd.Function):
    """Returns the main loss, and gives the auxiliary loss the same upstream gradient."""

    @staticmethod
    def forward(ctx, main, auxiliary):
        return main.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream, upstream


def _z_loss(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    logits = inputs.logits.float()
    lse = logits.logsumexp(-1)
    logprobs = logits.gather(-1, inputs.labels[:, None])[:, 0] - lse
    tokens = inputs.mask.sum()
    main = -logprobs[inputs.mask].sum()
    squares = (lse[inputs.mask] ** 2).sum()
    auxiliary = options.z_loss_weight * squares / tokens.clamp(min=1)
    if bug != "mean attached":
        auxiliary = auxiliary * tokens  # The main loss is a sum until it is divided by all tokens.
    loss = _AttachAuxiliary.apply(main, auxiliary) + options.z_loss_weight * squares.detach()
    count = inputs.valid_tokens.clamp(min=1)
    return lossgate.Outputs(loss=loss / count, metrics={"z_loss": squares.detach() / count})


@lossgate.candidate(
    "z_loss", head="logits", axes=("dp", "cp"), dtypes=FLOAT32, supports={"z_loss_weight": lossgate.ANY}
)
def right_attached_z_loss(inputs, options, mesh):
    """Attaches the sum of the z-losses to the sum of the main losses."""
    return _z_loss(inputs, options)


@lossgate.candidate(
    "z_loss", head="logits", axes=("dp", "cp"), dtypes=FLOAT32, supports={"z_loss_weight": lossgate.ANY}
)
def attached_z_loss_without_tokens(inputs, options, mesh):
    """The z-loss that is attached for backward is a mean, where it must be multiplied by the
    rank's tokens.
    """
    return _z_loss(inputs, options, bug="mean attached")


# A soft-cap with a hand-written backward


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, cap, bug):
        capped = cap * torch.tanh(logits / cap)
        ctx.save_for_backward(capped)
        ctx.cap, ctx.bug = cap, bug
        return capped

    @staticmethod
    def backward(ctx, upstream):
        (capped,) = ctx.saved_tensors
        share = capped / ctx.cap
        if ctx.bug == "tanh again":
            share = torch.tanh(share)
        return upstream * (1 - share**2), None, None


def _softcap(inputs: Any, options: Any, bug: str = "") -> Tensor:
    logits = (inputs.hidden @ inputs.weight.T).float()
    targets = inputs.labels.masked_fill(~inputs.mask, IGNORED)
    total = F.cross_entropy(_SoftCap.apply(logits, options.softcap, bug), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("softcap", head="hidden", axes=("dp", "cp"), dtypes=FLOAT32, supports={"softcap": lossgate.ANY})
def right_softcap(inputs, options, mesh):
    """Takes the slope of the soft-cap from the capped logits."""
    return _softcap(inputs, options)


@lossgate.candidate("softcap", head="hidden", axes=("dp", "cp"), dtypes=FLOAT32, supports={"softcap": lossgate.ANY})
def softcap_slope_of_capped(inputs, options, mesh):
    """Backward takes the tanh of logits that are capped already, so its slope of the soft-cap
    is too steep.
    """
    return _softcap(inputs, options, bug="tanh again")


BUGS = {
    "sharded_double_shift": ("cp=2",),
    "entropy_mean_of_rank_means": ("dp=2", "cp=2"),
    "bias_gradient_of_last_chunk": ("single",),
    "strided_upstream_read_densely": ("single",),
    "attached_z_loss_without_tokens": ("single",),
    "softcap_slope_of_capped": ("single",),
}
RIGHT = (
    "right_packed_sft",
    "right_dense_sft",
    "right_chunked_sft",
    "right_strided_logprobs",
    "right_attached_z_loss",
    "right_softcap",
)
