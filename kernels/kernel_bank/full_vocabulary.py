# SPDX-License-Identifier: Apache-2.0
"""Kernels that are known to be right for losses over the whole vocabulary: z-loss, label smoothing,
soft-cap and divergences.

Each is written once, per token, over a rank's columns of the logits. It runs dense, in chunks of
tokens, or parallel over the vocabulary, from hidden states or from logits. ``wrong`` has the same
with one line changed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kernel_bank.columns import Columns
from lossgate.declaration.candidate import Candidate, candidate
from lossgate.declaration.contract import Contract
from lossgate.declaration.supports import ANY
from lossgate.losses import find_spec

CHUNK = 7
"""Tokens per step of a chunked kernel."""

Style = Literal["dense", "chunked", "vocab-parallel"]
STYLES: tuple[Style, ...] = ("dense", "chunked", "vocab-parallel")


PerToken = Callable[[Tensor, Columns, Mapping[str, Tensor], Any], Tensor]
"""``(logits [tokens, columns], columns, fields of the tokens, options) -> [tokens]``."""


def z_loss(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    lse = vocab.logsumexp(logits)
    return lse - vocab.pick(logits, batch["labels"]) + options.z_loss_weight * lse.square()


def label_smoothing(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    smooth = (1 - options.smoothing) * vocab.pick(logits, batch["labels"]) + options.smoothing * vocab.mean(logits)
    return vocab.logsumexp(logits) - smooth


def softcap(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    capped = options.softcap * (logits / options.softcap).tanh()
    return vocab.logsumexp(capped) - vocab.pick(capped, batch["labels"])


def divergence(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    student, teacher = logits / options.temperature, batch["teacher_logits"] / options.temperature
    log_q, log_p = vocab.log_softmax(student), vocab.log_softmax(teacher)
    return _divergence(log_p, log_q, vocab, options.divergence_type, options.beta)


def _divergence(log_p: Tensor, log_q: Tensor, vocab: Columns, kind: str, beta: float) -> Tensor:
    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return vocab.sum(log_a.exp() * (log_a - log_b))

    if kind == "forward":
        return kl(log_p, log_q)
    if kind == "reverse":
        return kl(log_q, log_p)
    weights = torch.tensor([beta, 1 - beta], dtype=log_p.dtype).log()
    log_r = torch.logaddexp(log_p + weights[0], log_q + weights[1])
    return beta * kl(log_p, log_r) + (1 - beta) * kl(log_q, log_r)


LOSSES: Mapping[str, PerToken] = {
    "z_loss": z_loss,
    "label_smoothing": label_smoothing,
    "softcap": softcap,
    "divergence": divergence,
}
"""By the name of their spec."""


# One line wrong


def _unsquared_gradient(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    lse = vocab.logsumexp(logits)
    return lse - vocab.pick(logits, batch["labels"]) + options.z_loss_weight * lse * lse.detach()


def _mean_without_label(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    label = vocab.pick(logits, batch["labels"])
    others = (vocab.sum(logits) - label) / max(vocab.vocab - 1, 1)
    return vocab.logsumexp(logits) - (1 - options.smoothing) * label - options.smoothing * others


def _capped_without_slope(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    capped = logits + (options.softcap * (logits / options.softcap).tanh() - logits).detach()
    return vocab.logsumexp(capped) - vocab.pick(capped, batch["labels"])


def _teacher_not_tempered(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    student, teacher = logits / options.temperature, batch["teacher_logits"]
    log_q, log_p = vocab.log_softmax(student), vocab.log_softmax(teacher)
    return _divergence(log_p, log_q, vocab, options.divergence_type, options.beta)


def _swapped_weights(logits: Tensor, vocab: Columns, batch: Mapping[str, Tensor], options: Any) -> Tensor:
    student, teacher = logits / options.temperature, batch["teacher_logits"] / options.temperature
    log_q, log_p = vocab.log_softmax(student), vocab.log_softmax(teacher)
    return _divergence(log_p, log_q, vocab, options.divergence_type, 1 - options.beta)


WRONG: Mapping[str, Mapping[str, PerToken]] = {
    "z_loss": {"half the gradient of the square": _unsquared_gradient},
    "label_smoothing": {"the label has no share of the smoothing": _mean_without_label},
    "softcap": {"the slope of the cap is missing in backward": _capped_without_slope},
    "divergence": {
        "the teacher is not tempered": _teacher_not_tempered,
        "beta and 1 - beta are swapped": _swapped_weights,
    },
}
"""The same with one line wrong, by the name of their spec and what is wrong."""


# Kernels


def make(spec: str, head: str, style: Style, per_token: PerToken | None = None) -> Candidate:
    """Returns a candidate.

    Args:
        spec: the name of its spec.
        head: "hidden" or "logits".
        style: how it computes.
        per_token: the loss of each token; by default the right one.
    """
    own, parallel = find_spec(spec), style == "vocab-parallel"
    supports: dict[str, Any] = {option.name: ANY for option in own.options}
    supports |= {"bias": ANY} if head == "hidden" else {}
    declare = candidate(
        own,
        head=head,
        axes=("dp", "cp", "tp") if parallel else ("dp", "cp"),
        supports={**supports, "vocab_split": ANY} if parallel else supports,
        contract=Contract(grads={"hidden": {"tp": "sum"}}) if parallel and head == "hidden" else None,
        tiles={"token": CHUNK} if style == "chunked" else None,
        name=f"{spec}_{head}_{style}".replace("-", "_"),
    )
    return declare(_kernel(per_token or LOSSES[spec], tuple(own.fields), head, style))


def _kernel(per_token: PerToken, added: tuple[str, ...], head: str, style: Style) -> Callable[..., Tensor]:
    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
        columns = inputs.vocab_end - inputs.vocab_start
        group = mesh.get_group("tp") if style == "vocab-parallel" else None
        vocab = Columns(inputs.vocab_start, inputs.vocab_end, inputs.vocab_size, group)
        fields: dict[str, Tensor] = {name: getattr(inputs, name) for name in ("labels", "mask", *added)}
        fields |= {name: fields[name][:, :columns] for name in added}

        def loss(tokens: slice, rows: Tensor, *lm_head: Tensor) -> Tensor:
            logits = _logits(rows, *lm_head)[:, :columns]
            batch = {name: value[tokens] for name, value in fields.items()}
            losses = per_token(logits, vocab, batch, options)
            return torch.where(batch["mask"], losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

        if head == "logits":
            leaves = (inputs.logits,)
        else:
            leaves = (inputs.hidden, inputs.weight) + (() if inputs.bias is None else (inputs.bias,))
        if style != "chunked":
            return loss(slice(None), *leaves)
        return _Chunked.apply(loss, *leaves)  # pyright: ignore[reportReturnType]

    return kernel


def _logits(rows: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    if weight is None:
        return rows.float()
    logits = rows.float() @ weight.float().T
    return logits if bias is None else logits + bias.float()


class _Chunked(torch.autograd.Function):
    """Computes loss and gradients in forward, chunk by chunk of tokens."""

    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Tensor], rows: Tensor, *lm_head: Tensor) -> Tensor:
        total = torch.zeros((), device=rows.device)
        grad_rows = torch.zeros_like(rows, dtype=torch.float32)
        grads = [torch.zeros_like(part, dtype=torch.float32) for part in lm_head]
        for start in range(0, len(rows), CHUNK):
            chunk = slice(start, start + CHUNK)
            with torch.enable_grad():
                leaves = [part.detach().float().requires_grad_() for part in (rows[chunk], *lm_head)]
                part = loss(chunk, *leaves)
            own, *others = torch.autograd.grad(part, leaves)
            total, grad_rows[chunk] = total + part.detach(), own
            for grad, other in zip(grads, others, strict=True):
                grad += other
        ctx.save_for_backward(grad_rows, *grads)
        ctx.dtypes = [part.dtype for part in (rows, *lm_head)]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *((gradient * grad).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
