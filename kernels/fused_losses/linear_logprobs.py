# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from hidden states and lm-head, without the ``[tokens, vocab]`` logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_losses.lm_head import (
    HeadGradients,
    LmHead,
    check_head,
    chunks_of,
    default_chunk,
    gather_tokens,
    padded,
    scatter_tokens,
    without_autocast,
)
from fused_losses.softmax import TokenLogprobs, TokenSoftmax, Upstream


@dataclass(frozen=True)
class _Call:
    """What is no tensor."""

    rows: int
    temperature: float
    softcap: float | None
    matmul_dtype: torch.dtype
    chunk: int
    entropy: bool
    logit_range: bool
    group: dist.ProcessGroup | None
    sequence_parallel: bool

    def head(self, weight: Tensor, bias: Tensor | None) -> LmHead:
        return LmHead(
            weight[: self.rows],
            None if bias is None else bias[: self.rows],
            self.temperature,
            self.softcap,
            self.matmul_dtype,
        )


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    logit_range: bool = False,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    matmul_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> TokenLogprobs:
    """``log p(label)`` and the entropy of ``p = softmax(softcap(hidden weight^T + bias) / temperature)``, token by token.

    hidden: ``[T, H]``, the same on every rank of ``tp_group``; with ``sequence_parallel`` ``[T / tp, H]``, this rank's part of
    the tokens, in the order of ranks. weight: ``[local vocab, H]``, bias ``[local vocab]``: this rank's rows of the lm-head, of
    which the first ``vocab_rows`` (default: all) belong to the vocabulary, from row ``vocab_start`` of it on; further ones are
    padding, and get a gradient of zero. labels: ``[T]`` integer ids in the whole vocabulary; a label outside of it, such as -100,
    is owned by no rank, and its value means nothing. softcap: ``softcap(x) = cap tanh(x / cap)``, or None.

    Returns logprobs ``[T]``, and if asked for (else None) entropy ``[T]`` in nats, and with ``logit_range`` the least and the greatest logit
    ``[T]``, before the temperature; all the same on every rank, in float32 (float64 for float64 inputs). Logprobs and entropy carry
    gradients, any upstream gradient is right, and a token whose upstream gradient is zero takes no part whatever its hidden state. The
    gradient of hidden is complete on every rank (with ``sequence_parallel``: for its own tokens); those of weight and bias are for
    the tokens of this call, for the caller to add up over data and context parallelism.

    Matrix products are in ``matmul_dtype``, by default the inputs'; float32 for half-precision inputs is slower and rounds
    less. All else is float32, also under ``torch.autocast``; the weight's gradient is added up in float32 over chunks, and rounded at the end.

    Memory: ``chunk`` tokens have logits at a time, ``chunk x local vocab`` of them, forward and backward; by default so many
    that they are small beside the weight. Backward holds a float32 gradient of weight, and T H numbers, 2 T H with
    ``sequence_parallel``; with a ``matmul_dtype`` other than the weight's both passes hold a copy of weight in it. Saved for backward: the
    inputs and T numbers, 2 T with entropy; nothing under ``torch.no_grad``. Collectives on ``tp_group``, whatever the chunks:
    forward one all-reduce MAX of T numbers (2 T with ``logit_range``) and one SUM of 2 T (3 T with entropy), backward one SUM of T H float32; with
    ``sequence_parallel`` an all-gather of hidden in forward and in backward, and a reduce-scatter in place of the last sum.

    Raises ``ValueError`` for shapes, dtypes and numbers that do not fit.
    """
    ranks = tp_group.size() if sequence_parallel and tp_group is not None else 1
    check_head(hidden, weight, labels, bias, temperature, softcap, vocab_rows, chunk, ranks)
    call = _Call(
        rows=weight.shape[0] if vocab_rows is None else vocab_rows,
        temperature=temperature,
        softcap=softcap,
        matmul_dtype=matmul_dtype or weight.dtype,
        chunk=chunk or default_chunk(weight),
        entropy=entropy,
        logit_range=logit_range,
        group=tp_group,
        sequence_parallel=ranks > 1,
    )
    return TokenLogprobs.of(
        *_LinearLogprobs.apply(hidden, weight, bias, labels - vocab_start, call), (entropy, logit_range)
    )  # type: ignore[misc]


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
    ) -> tuple[Tensor, ...]:
        softmax = token_softmax(hidden, labels, call.head(weight, bias), call)
        entropy, extremes = softmax.entropy, softmax.range(call.temperature)
        ctx.save_for_backward(hidden, weight, bias, labels, softmax.logsumexp, entropy)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*extremes)
        return softmax.logprobs, entropy, *extremes

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp, entropy = ctx.saved_tensors
        call: _Call = ctx.call
        head, (need_hidden, need_weight, need_bias) = call.head(weight, bias), ctx.needs_input_grad[:3]
        upstream = Upstream.of(
            of_logprobs, of_entropy if call.entropy else None, logsumexp, call.temperature, call.matmul_dtype
        )
        own = gather_tokens(hidden, call.group) if call.sequence_parallel and call.group is not None else hidden
        matrix = head.cast(head.weight)
        gradients = HeadGradients(head, need_weight, need_bias)
        grad_hidden = torch.zeros(own.shape, dtype=_held(call, head), device=own.device) if need_hidden else None
        for tokens in chunks_of(len(own), call.chunk):
            part = upstream.part(tokens)
            h = torch.where(part.live[:, None], head.cast(own[tokens]), 0.0)
            z = head.logits(h, matrix)
            capped = None if head.softcap is None else z.clone()
            dz = part.dlogits(
                z, labels[tokens], logsumexp[tokens], entropy[tokens] if part.of_entropy is not None else None
            )
            if capped is not None:
                head.uncap_(dz, capped)
            rounded = head.cast(dz)
            gradients.add(dz, h, rounded)
            if grad_hidden is not None:
                grad_hidden[tokens] = rounded @ matrix
        unit = (
            upstream.unit
        )  # of one dim below: CUDA rounds a number of none to a half-precision gradient's dtype first
        return (
            None if grad_hidden is None else _reduced(grad_hidden.mul_(unit.reshape(1)), call, hidden.dtype),
            None if gradients.weight is None else padded(gradients.weight.mul_(unit.reshape(1)), weight),
            None if gradients.bias is None or bias is None else padded(gradients.bias.mul_(unit.reshape(1)), bias),
            None,
            None,
        )


def token_softmax(hidden: Tensor, labels: Tensor, head: LmHead, call: _Call) -> TokenSoftmax:
    """Of every token, over every rank's rows. ``labels`` count from this rank's first row."""
    whole = gather_tokens(hidden, call.group) if call.sequence_parallel and call.group is not None else hidden
    matrix = head.cast(head.weight)
    wanted = {"entropy": call.entropy, "lowest": call.logit_range}
    parts = [
        TokenSoftmax.of(head.logits(head.cast(whole[part]), matrix), labels[part], **wanted)
        for part in chunks_of(len(whole), call.chunk)
    ]
    softmax = (
        TokenSoftmax.cat(parts) if parts else TokenSoftmax.of(whole.new_zeros(0, 1, dtype=head.dtype), labels, **wanted)
    )
    softmax.reduce(call.group)
    return softmax


def _held(call: _Call, head: LmHead) -> torch.dtype:
    """Of the gradient of hidden until it is complete: as it comes from the matrix product if nothing is added to it."""
    return (
        head.dtype
        if call.group is not None and call.group.size() > 1
        else torch.promote_types(call.matmul_dtype, head.weight.dtype)
    )


def _reduced(grad_hidden: Tensor, call: _Call, dtype: torch.dtype) -> Tensor:
    if call.group is not None and call.group.size() > 1:
        if call.sequence_parallel:
            return scatter_tokens(grad_hidden, call.group).to(dtype)
        dist.all_reduce(grad_hidden, group=call.group)
    return grad_hidden.to(dtype)
