# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy (negative log-likelihood, the loss of SFT) from hidden states or from logits."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fused_losses.linear_logprobs import linear_logprobs
from fused_losses.lm_head import HeadGradients, LmHead, check_head, chunks_of, default_chunk, padded, without_autocast
from fused_losses.softmax import TokenSoftmax, add_at_labels_
from fused_losses.vocab_parallel import vocab_parallel_logprobs


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    valid_tokens: Tensor | int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    matmul_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of labels given hidden states and lm-head, without the ``[tokens, vocab]`` logits; a scalar in nats.

    A token counts if ``mask`` (``[T]`` bool, default all) has it and its label is not ``ignore_index``.
    ``"mean"`` divides by ``valid_tokens``: give the number of counted tokens of the whole batch, over every data- and
    context-parallel rank and microbatch, and the ranks' losses and gradients add up; without it, those of this call.
    0 where no token counts. See ``linear_logprobs`` for the other arguments, dtypes and errors.

    Where the whole vocabulary is on this rank and a gradient is needed, it is made in forward, with three matrix products
    for each chunk in place of four: forward holds a float32 gradient of weight and a gradient of hidden until backward, which
    multiplies them by the upstream gradient, rounds them, and gives them away; a second backward (``retain_graph``) makes them again.
    Nothing is written to ``.grad``, and forward may run twice (activation checkpointing). Else memory and collectives are those
    of ``linear_logprobs``: over a split vocabulary it would take two all-reduces for each chunk to do the same.
    """
    counted = _counted(labels, mask, ignore_index)
    if tp_group is None or tp_group.size() == 1:
        check_head(hidden, weight, labels, bias, temperature, softcap, vocab_rows, chunk, ranks=1)
        rows = weight.shape[0] if vocab_rows is None else vocab_rows
        leaves = (hidden, weight, bias)
        if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
            head = LmHead(
                weight[:rows].detach(),
                None if bias is None else bias[:rows].detach(),
                temperature,
                softcap,
                matmul_dtype or weight.dtype,
            )
            total = _LinearNLL.apply(*leaves, labels - vocab_start, counted, head, chunk or default_chunk(weight))
            return _divided(total, counted, valid_tokens, reduction)  # type: ignore[arg-type]
    logprobs = linear_logprobs(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        vocab_start=vocab_start,
        vocab_rows=vocab_rows,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        matmul_dtype=matmul_dtype,
        chunk=chunk,
    ).logprobs
    return _divided(-torch.where(counted, logprobs, 0.0).sum(), counted, valid_tokens, reduction)


class LinearCrossEntropyLoss(nn.Module):
    """``linear_cross_entropy`` with its options held, as ``torch.nn.CrossEntropyLoss`` holds those of ``cross_entropy``. Has no parameters."""

    def __init__(
        self,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        softcap: float | None = None,
        matmul_dtype: torch.dtype | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "temperature": temperature,
            "softcap": softcap,
            "matmul_dtype": matmul_dtype,
            "chunk": chunk,
        }

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        valid_tokens: Tensor | int | None = None,
    ) -> Tensor:
        """hidden: ``[T, H]``; weight: ``[vocab, H]``, that of the lm-head; labels: ``[T]``. Returns a scalar."""
        return linear_cross_entropy(hidden, weight, labels, bias=bias, valid_tokens=valid_tokens, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    valid_tokens: Tensor | int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Cross-entropy of labels given logits whose vocabulary is split over ``tp_group``; a scalar in nats.

    See ``linear_cross_entropy`` for what counts, and ``vocab_parallel_logprobs`` for the other arguments.
    """
    given: dict[str, Any] = {
        "temperature": temperature,
        "vocab_start": vocab_start,
        "vocab_rows": vocab_rows,
        "tp_group": tp_group,
    }
    logprobs = vocab_parallel_logprobs(logits, labels, **given).logprobs
    counted = _counted(labels, mask, ignore_index)
    return _divided(-torch.where(counted, logprobs, 0.0).sum(), counted, valid_tokens, reduction)


def _counted(labels: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    if mask is not None and mask.shape != labels.shape:
        raise ValueError(f"mask {list(mask.shape)} and labels {list(labels.shape)}: expected [T] both")
    counted = labels != ignore_index
    return counted if mask is None else counted & mask


def _divided(total: Tensor, counted: Tensor, valid_tokens: Tensor | int | None, reduction: str) -> Tensor:
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise ValueError(f"reduction {reduction!r}: expected 'mean' or 'sum'")
    count = counted.sum() if valid_tokens is None else torch.as_tensor(valid_tokens, device=total.device)
    return total / count.clamp(min=1)


@dataclass(frozen=True)
class _Made:
    """``-sum_t counted_t log p(label_t)``, and its gradients but for the factor 1 / temperature."""

    total: Tensor
    hidden: Tensor | None
    head: HeadGradients

    @classmethod
    def of(
        cls, hidden: Tensor, labels: Tensor, counted: Tensor, head: LmHead, chunk: int, needed: tuple[bool, bool, bool]
    ) -> "_Made":
        """needed: the gradients of hidden, weight and bias."""
        dtype = torch.promote_types(head.matmul_dtype, hidden.dtype)
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needed[0] else None
        made = cls(
            torch.zeros((), dtype=head.dtype, device=hidden.device),
            grad_hidden,
            HeadGradients(head, needed[1], needed[2]),
        )
        matrix = head.cast(head.weight)
        for tokens in chunks_of(len(hidden), chunk):
            made._add(hidden, labels, counted, head, matrix, tokens)
        return made

    def _add(
        self, hidden: Tensor, labels: Tensor, counted: Tensor, head: LmHead, matrix: Tensor, tokens: slice
    ) -> None:
        live = counted[tokens]
        h = torch.where(live[:, None], head.cast(hidden[tokens]), 0.0)
        z = head.logits(h, matrix)
        capped = None if head.softcap is None else z.clone()
        softmax = TokenSoftmax.of(
            z,
            labels[tokens],
        )  # z is exp(z - largest) now
        self.total.sub_(torch.where(live, softmax.logprobs, 0.0).sum())
        dz = z.mul_((live / softmax.total)[:, None])
        add_at_labels_(dz, labels[tokens], -live.to(dz.dtype))
        if capped is not None:
            head.uncap_(dz, capped)
        rounded = head.cast(dz)
        self.head.add(dz, h, rounded)
        if self.hidden is not None:
            self.hidden[tokens] = rounded @ matrix


class _LinearNLL(torch.autograd.Function):
    """``-sum_t counted_t log p(label_t)``, with its gradients made in forward."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        counted: Tensor,
        head: LmHead,
        chunk: int,
    ) -> Tensor:
        made = _Made.of(hidden, labels, counted, head, chunk, ctx.needs_input_grad[:3])
        # Not among the saved tensors: backward gives them away rather than copy them.
        ctx.made = made
        ctx.save_for_backward(hidden, weight, bias, labels, counted)
        ctx.head, ctx.chunk = head, chunk
        return made.total

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, counted = ctx.saved_tensors
        head: LmHead = ctx.head
        made, ctx.made = ctx.made, None
        if made is None:  # a second backward, with retain_graph: the first has given them away
            made = _Made.of(hidden, labels, counted, head, ctx.chunk, ctx.needs_input_grad[:3])
        scale = (
            upstream / head.temperature
        )  # of one dim below: CUDA rounds a number of none to a bfloat16 gradient's dtype first
        leaves = ((made.hidden, hidden), (made.head.weight, weight), (made.head.bias, bias))
        gradients = (
            None if grad is None or like is None else padded(grad.mul_(scale.reshape(1)), like) for grad, like in leaves
        )
        return (*gradients, None, None, None, None)
