# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy (negative log-likelihood, the loss of SFT) from hidden states or from logits."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fused_losses.arguments import (
    UNTRAINED,
    as_count,
    as_labels_of,
    as_mask,
    check_choice,
    check_integer,
    check_label_dtype,
    check_labels,
)
from fused_losses.linear_logprobs import linear_logprobs
from fused_losses.lm_head import (
    HeadGradients,
    LmHead,
    check_head,
    chunks_of,
    default_chunk,
    dtype_of_products,
    padded,
    ranks_of_tokens,
)
from fused_losses.names import named, named_options
from fused_losses.numerics import divisor
from fused_losses.operators import Form, operator
from fused_losses.passes import check_not_transformed, once_differentiable, without_autocast
from fused_losses.ranks import alone
from fused_losses.softmax import TokenSoftmax, add_at_labels_
from fused_losses.token_layouts import TokenLayout, flatten_like, flatten_tokens
from fused_losses.vocab_parallel import vocab_parallel_logprobs


@named
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    valid_tokens: Tensor | float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    layout: TokenLayout = "bsh",
    matmul_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Computes the cross-entropy of labels from hidden states and an lm-head.

    The ``[tokens, vocab]`` logits are never formed. A token counts if ``mask`` is true there;
    without a mask, if its label is not ``ignore_index``.

    If the whole vocabulary is on this rank, forward also computes the gradients that are needed.
    This takes three matrix products for each chunk instead of four. Backward multiplies them by the
    upstream gradient, rounds them and hands them on; a second backward (``retain_graph``) computes
    them again. Nothing is written to ``.grad``, so forward may run twice (activation
    checkpointing). If the vocabulary is split, this would take two all-reduces for each chunk, so
    the loss goes through ``linear_logprobs`` instead.

    Args:
        hidden: ``[tokens, hidden]``, or a batch as ``layout`` says; see ``linear_logprobs``, also
            for ``sequence_parallel``.
        weight: ``[local_vocab, hidden]``, this rank's rows of the lm-head.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids in the whole vocabulary.
        bias: ``[local_vocab]``, or None.
        mask: bool or 0 and 1, of the shape of the labels: the tokens that count; all by default.
            Labels of other tokens may be anything.
        valid_tokens: the divisor of ``"mean"``: the number of tokens that count in the whole batch,
            over every data- and context-parallel rank and microbatch. Losses and gradients of ranks
            and microbatches then add up. By default it is the number of tokens that count in this
            call.
        reduction: ``"mean"`` or ``"sum"``; with ``"sum"``, ``valid_tokens`` is refused.
        temperature: divides the logits; positive.
        softcap: the cap of the logits, positive; None for no soft-cap.
        ignore_index: the label of tokens that do not count. With a mask, no token that counts may
            have it.
        vocab_start: id in the whole vocabulary of this rank's first row; needed if ``tp_group`` has
            several ranks.
        vocab_rows: number of leading rows that belong to the vocabulary; all by default.
        tp_group: the ranks among which the vocabulary is split.
        sequence_parallel: whether each rank of ``tp_group`` holds only its part of the tokens.
        layout: order of the dims of hidden; see ``flatten_tokens``. ``"sbh"`` is Megatron's.
        matmul_dtype: dtype of matrix products; see ``linear_logprobs``.
        chunk: number of tokens whose logits exist at a time.

    Returns:
        A scalar in nats; 0 if no token counts.

    Raises:
        ValueError: A shape, dtype or option does not fit, or a label that counts is outside of the
            vocabulary; the message names it. The check of labels waits for the device;
            ``unchecked_values`` switches it off, and the loss is then NaN.

    Collectives:
        None with the whole vocabulary on this rank; else those of ``linear_logprobs``.

    Memory:
        If forward computes gradients: a float32 gradient of weight and a gradient of hidden, held
        from forward to backward, and ``[chunk, vocab]`` logits at a time. Else the same as
        ``linear_logprobs``.
    """
    check_not_transformed(hidden=hidden, weight=weight, labels=labels, bias=bias)
    ranks = ranks_of_tokens(sequence_parallel, tp_group)
    mask = None if mask is None else flatten_like("mask", as_mask("mask", mask, labels, "labels"), labels, layout)
    hidden, labels, _ = flatten_tokens(hidden, labels, layout, ranks)
    labels, counted = _counted(labels, mask, valid_tokens, reduction, ignore_index)
    if alone(tp_group):
        check_head(
            hidden,
            weight,
            labels,
            bias,
            temperature=temperature,
            softcap=softcap,
            vocab_start=vocab_start,
            vocab_rows=vocab_rows,
            tp_group=tp_group,
            matmul_dtype=matmul_dtype,
            chunk=chunk,
        )
        rows = weight.shape[0] if vocab_rows is None else vocab_rows
        leaves = (hidden, weight, bias)
        if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
            check_labels(labels, counted, rows)
            products = dtype_of_products(hidden, weight, matmul_dtype)
            call = _Call(rows, temperature, softcap, products, chunk or default_chunk(weight))
            dtype = torch.promote_types(weight.dtype, torch.float32)
            divides = _divisor(counted, valid_tokens, reduction, torch.empty((), dtype=dtype, device=hidden.device))
            return cast("Tensor", _LinearNLL.apply(*leaves, labels, counted, divides, call))
    logprobs = linear_logprobs(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        ignore_index=UNTRAINED,
        vocab_start=vocab_start,
        vocab_rows=vocab_rows,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        matmul_dtype=matmul_dtype,
        chunk=chunk,
    ).logprobs
    return _divided(-torch.where(counted, logprobs, 0.0).sum(), counted, valid_tokens, reduction)


@named_options
class LinearCrossEntropyLoss(nn.Module):
    """``linear_cross_entropy`` as a module that holds the options.

    It corresponds to ``torch.nn.CrossEntropyLoss`` and has no parameters.

    Args:
        reduction: ``"mean"`` or ``"sum"``; with ``"sum"``, ``valid_tokens`` is refused.
        ignore_index: the label of tokens that do not count.
        temperature: divides the logits; positive.
        softcap: the cap of the logits, positive; None for no soft-cap.
        vocab_start: id in the whole vocabulary of this rank's first row; needed if ``tp_group`` has
            several ranks.
        vocab_rows: number of leading rows that belong to the vocabulary; all by default.
        tp_group: the ranks among which the vocabulary is split.
        sequence_parallel: whether each rank of ``tp_group`` holds only its part of the tokens.
        layout: order of the dims of hidden; see ``flatten_tokens``. ``"sbh"`` is Megatron's.
        matmul_dtype: dtype of matrix products; see ``linear_logprobs``.
        chunk: number of tokens whose logits exist at a time.
    """

    def __init__(
        self,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        softcap: float | None = None,
        vocab_start: int | None = None,
        vocab_rows: int | None = None,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        layout: TokenLayout = "bsh",
        matmul_dtype: torch.dtype | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "temperature": temperature,
            "softcap": softcap,
            "vocab_start": vocab_start,
            "vocab_rows": vocab_rows,
            "tp_group": tp_group,
            "sequence_parallel": sequence_parallel,
            "layout": layout,
            "matmul_dtype": matmul_dtype,
            "chunk": chunk,
        }

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        valid_tokens: Tensor | float | None = None,
    ) -> Tensor:
        """Computes the loss.

        Args:
            hidden: ``[tokens, hidden]``, or a batch as ``layout`` says.
            weight: ``[local_vocab, hidden]``, the weight of the lm-head.
            labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids.
            bias: ``[local_vocab]``, or None.
            mask: of the shape of the labels, the tokens that count; all by default.
            valid_tokens: the divisor of ``"mean"``; by default the number of tokens that count.

        Returns:
            A scalar in nats.
        """
        given = {"bias": bias, "mask": mask, "valid_tokens": valid_tokens}
        return linear_cross_entropy(hidden, weight, labels, **given, **self.options)

    def extra_repr(self) -> str:
        """Returns the options for ``repr``."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


@named
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    valid_tokens: Tensor | float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    layout: TokenLayout = "bsh",
    chunk: int | None = None,
) -> Tensor:
    """Computes the cross-entropy of labels from logits whose vocabulary is split over ranks.

    A token counts if ``mask`` is true there; without a mask, if its label is not ``ignore_index``.

    Args:
        logits: ``[tokens, local_vocab]``, this rank's columns of the vocabulary, or a batch as
            ``layout`` says; see ``vocab_parallel_logprobs``.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids in the whole vocabulary.
        mask: bool or 0 and 1, of the shape of the labels: the tokens that count; all by default.
            Labels of other tokens may be anything.
        valid_tokens: the divisor of ``"mean"``; see ``linear_cross_entropy``.
        reduction: ``"mean"`` or ``"sum"``; with ``"sum"``, ``valid_tokens`` is refused.
        temperature: divides the logits; positive.
        ignore_index: the label of tokens that do not count. With a mask, no token that counts may
            have it.
        vocab_start: id in the whole vocabulary of this rank's first column; needed if ``tp_group``
            has several ranks.
        vocab_rows: number of leading columns that belong to the vocabulary; all by default.
        tp_group: the ranks among which the vocabulary is split.
        layout: order of the dims of logits; see ``flatten_tokens``. ``"sbh"`` is Megatron's.
        chunk: number of tokens whose logits exist in the compute dtype at a time.

    Returns:
        A scalar in nats, the same on every rank of ``tp_group``; 0 if no token counts.

    Raises:
        ValueError: A shape or option does not fit; the message names it.

    Collectives:
        Those of ``vocab_parallel_logprobs``.
    """
    check_not_transformed(logits=logits, labels=labels)
    mask = None if mask is None else flatten_like("mask", as_mask("mask", mask, labels, "labels"), labels, layout)
    logits, labels, _ = flatten_tokens(logits, labels, layout, name="logits")
    labels, counted = _counted(labels, mask, valid_tokens, reduction, ignore_index)
    given: dict[str, Any] = {
        "temperature": temperature,
        "ignore_index": UNTRAINED,
        "vocab_start": vocab_start,
        "vocab_rows": vocab_rows,
        "tp_group": tp_group,
        "chunk": chunk,
    }
    logprobs = vocab_parallel_logprobs(logits, labels, **given).logprobs
    return _divided(-torch.where(counted, logprobs, 0.0).sum(), counted, valid_tokens, reduction)


def _counted(
    labels: Tensor, mask: Tensor | None, valid_tokens: Tensor | float | None, reduction: str, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Checks arguments that both losses share.

    Returns:
        The labels, ``UNTRAINED`` at tokens that do not count, and the mask of those that do.
    """
    check_label_dtype(labels)
    check_choice("reduction", reduction, ("mean", "sum"))
    if reduction == "sum" and valid_tokens is not None:
        raise ValueError(
            "valid_tokens: expected none with reduction='sum', which divides by nothing; leave it out, or take "
            "reduction='mean', which divides the sum by it"
        )
    check_integer("ignore_index", ignore_index, least=UNTRAINED)
    if mask is not None:
        return as_labels_of(mask, labels, ignore_index), mask
    counted = labels != ignore_index
    return torch.where(counted, labels.long(), UNTRAINED), counted


def _divided(total: Tensor, counted: Tensor, valid_tokens: Tensor | float | None, reduction: str) -> Tensor:
    return total / _divisor(counted, valid_tokens, reduction, total)


def _divisor(counted: Tensor, valid_tokens: Tensor | float | None, reduction: str, like: Tensor) -> Tensor:
    """Returns what a sum over tokens is divided by, in the dtype of ``like``."""
    if reduction == "sum":
        return torch.ones_like(like)
    own = counted.sum()
    return divisor(own.to(like.dtype) if valid_tokens is None else as_count("valid_tokens", valid_tokens, like, own))


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are not tensors."""

    rows: int
    temperature: float
    softcap: float | None
    matmul_dtype: torch.dtype
    chunk: int

    OPTIONS = "SymInt rows, float temperature, float? softcap, ScalarType matmul_dtype, SymInt chunk"
    """``options`` for ``operator``."""

    @property
    def options(self) -> tuple[Any, ...]:
        """The fields."""
        return self.rows, self.temperature, self.softcap, self.matmul_dtype, self.chunk

    def head(self, weight: Tensor, bias: Tensor | None) -> LmHead:
        bias = None if bias is None else bias[: self.rows]
        return LmHead(weight[: self.rows], bias, self.temperature, self.softcap, self.matmul_dtype)


@dataclass(frozen=True)
class _LossAndGradients:
    """The loss ``-sum_t counted_t log p(label_t)`` and its gradients.

    The gradients are those of ``factor`` times the loss, and lack the factor 1 / temperature.
    """

    total: Tensor
    hidden: Tensor | None
    head: HeadGradients

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        labels: Tensor,
        counted: Tensor,
        factor: Tensor,
        head: LmHead,
        chunk: int,
        needed: list[bool],
    ) -> "_LossAndGradients":
        """Computes the loss and the gradients chunk by chunk.

        ``needed`` says whether the gradients of hidden, weight and bias are needed.
        """
        dtype = torch.promote_types(head.matmul_dtype, hidden.dtype)
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needed[0] else None
        computed = cls(
            torch.zeros((), dtype=head.dtype, device=hidden.device),
            grad_hidden,
            HeadGradients(head, needed[1], needed[2]),
        )
        matrix = head.cast(head.weight)
        for tokens in chunks_of(len(hidden), chunk):
            computed._add(hidden, labels, counted, factor, head, matrix, tokens)
        return computed

    def _add(
        self,
        hidden: Tensor,
        labels: Tensor,
        counted: Tensor,
        factor: Tensor,
        head: LmHead,
        matrix: Tensor,
        tokens: slice,
    ) -> None:
        live = counted[tokens]
        h = torch.where(live[:, None], head.cast(hidden[tokens]), 0.0)
        z = head.logits(h, matrix)
        capped = None if head.softcap is None else z.clone()
        softmax = TokenSoftmax.of(z, labels[tokens])  # This overwrites z by exp(z - largest).
        owned = softmax.owners == 1  # If labels are not checked, a label outside of the vocabulary gives NaN.
        self.total.sub_(torch.where(live, torch.where(owned, softmax.logprobs, torch.nan), 0.0).sum())
        upstream = live * factor
        dz = z.mul_((upstream / torch.where(owned | ~live, softmax.total, torch.nan))[:, None])
        add_at_labels_(dz, labels[tokens], -upstream)
        if capped is not None:
            head.uncap_(dz, capped)
        rounded = head.cast(dz)
        self.head.add(dz, h, rounded)
        if self.hidden is not None:
            self.hidden[tokens] = rounded @ matrix


def _forms(
    call: _Call, hidden: Tensor, weight: Tensor, bias: Any, labels: Any, counted: Any, factor: Any, needs: list[bool]
) -> list[Form | None]:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    forms: list[Form] = [
        (hidden.shape, torch.promote_types(call.matmul_dtype, hidden.dtype)),
        ((call.rows, weight.shape[1]), dtype),
        ((call.rows,), dtype),
    ]
    return [((), dtype), *(form if needed else None for form, needed in zip(forms, needs, strict=True))]


@operator(
    "linear_cross_entropy",
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor counted, Tensor factor, bool[] needs",
    _Call.OPTIONS,
    _Call,
    _forms,
)
def _loss_and_gradients(
    call: _Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    factor: Tensor,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """Computes the loss, and the gradients of ``factor`` times it for hidden, weight and bias,
    those that are needed.
    """
    found = _LossAndGradients.of(hidden, labels, counted, factor, call.head(weight, bias), call.chunk, needs)
    return found.total, found.hidden, found.head.weight, found.head.bias


class _LinearNLL(torch.autograd.Function):
    """The loss ``-sum_t counted_t log p(label_t) / divisor``, whose gradients are computed in
    forward.
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        counted: Tensor,
        divides: Tensor,
        call: _Call,
    ) -> Tensor:
        # The gradient of hidden is rounded as a product. With all factors in it but the upstream
        # gradient, which is most often 1 or a power of two, it is not rounded again. In float16
        # small entries would become 0.
        whole = 1 / (divides * call.temperature)
        factor = torch.ones_like(whole) if call.matmul_dtype == torch.float16 else whole
        inputs = hidden, weight, bias, labels, counted, factor
        total, *ctx.gradients = _loss_and_gradients(call, *inputs, list(ctx.needs_input_grad[:3]))
        # The gradients are not saved tensors: backward hands them on without a copy.
        ctx.save_for_backward(*inputs, whole / factor)
        ctx.call = call
        return cast("Tensor", total) / divides

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, left = ctx.saved_tensors
        call = ctx.call
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # With retain_graph, the first backward has handed the gradients on.
            gradients = _loss_and_gradients(call, *inputs, list(ctx.needs_input_grad[:3]))[1:]
        # CUDA would round a 0-dim factor to the dtype of a half-precision gradient first.
        scale = (upstream * left).reshape(1)
        leaves = zip(gradients, inputs[:3], strict=True)
        return *(None if grad is None else padded(grad.mul_(scale), like) for grad, like in leaves), *(None,) * 4
