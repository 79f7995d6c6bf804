# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from hidden states and an lm-head.

The ``[tokens, vocab]`` logits are never formed.
"""

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
    """The arguments of a call that are not tensors."""

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
    """Computes ``log p(label)`` of each token from hidden states.

    ``p = softmax(softcap(hidden weight^T + bias) / temperature)``, where
    ``softcap(x) = cap tanh(x / cap)`` (Gemma 2, arXiv:2408.00118). NeMo-RL computes the same, with
    neither bias, soft-cap nor temperature, as "linear CE fusion". The vocabulary is split as in
    Megatron-LM (arXiv:1909.08053).

    Any upstream gradient is supported. A token whose upstream gradient is zero does not contribute,
    even if its hidden state is NaN or infinite.

    Args:
        hidden: ``[tokens, hidden]``, the same on every rank of ``tp_group``. With
            ``sequence_parallel``: ``[tokens / tp, hidden]``, this rank's tokens, in rank order.
        weight: ``[local_vocab, hidden]``, this rank's rows of the lm-head, in the dtype of hidden.
        labels: ``[tokens]`` integer ids in the whole vocabulary. No rank owns a label outside of
            it, such as -100; the result for such a token is meaningless.
        bias: ``[local_vocab]``, or None.
        temperature: divides the logits; positive.
        softcap: the cap, positive; None for no soft-cap.
        entropy: whether to return the entropy of p.
        logit_range: whether to return the smallest and the largest logit.
        vocab_start: id in the whole vocabulary of this rank's first row.
        vocab_rows: number of leading rows that belong to the vocabulary; all by default. The
            remaining ones are padding and get a gradient of zero.
        tp_group: the ranks among which the vocabulary is split; None if it is whole here.
        sequence_parallel: whether each rank of ``tp_group`` holds only its part of the tokens.
        matmul_dtype: dtype of matrix products; that of the inputs by default. float32 for inputs in
            half precision rounds less. All else is float32 (float64 for float64 inputs), also under
            ``torch.autocast``.
        chunk: number of tokens whose logits exist at a time; by default few enough that their
            logits are small beside the weight.

    Returns:
        ``logprobs`` and, if asked for, ``entropy`` in nats, ``min_logits`` and ``max_logits``
        (before the temperature); else None. Each is ``[tokens]`` in float32 (float64 for float64
        inputs) and the same on every rank of ``tp_group``. Log-probabilities and entropies carry
        gradients. The gradient of hidden is complete on every rank (with ``sequence_parallel``: for
        the rank's own tokens). Those of weight and bias cover the tokens of this call; the caller
        adds them up over data and context parallelism.

    Raises:
        ValueError: A shape, dtype or number does not fit; the message names the argument.

    Collectives:
        All are on ``tp_group``, and their number does not depend on the chunks.
        Forward: one all-reduce MAX of ``[tokens]`` (``[2, tokens]`` with ``logit_range``) and one
        all-reduce SUM of ``[2, tokens]`` (``[3, tokens]`` with ``entropy``). Backward: one
        all-reduce SUM of ``[tokens, hidden]`` if hidden needs a gradient. All are in the compute
        dtype, float32 or float64.
        With ``sequence_parallel``: forward and backward each begin with an all-gather of hidden,
        and a reduce-scatter takes the place of backward's all-reduce.

    Memory:
        ``[chunk, local_vocab]`` logits at a time, in forward and in backward. Backward holds a
        float32 gradient of weight, which is rounded once at the end, and ``[tokens, hidden]``
        numbers (twice that with ``sequence_parallel``). With a ``matmul_dtype`` other than the
        weight's, both passes hold a copy of weight in it.
        Saved for backward: the inputs and one number for each token (two with ``entropy``); nothing
        under ``torch.no_grad``.
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
    found = _LinearLogprobs.apply(hidden, weight, bias, labels - vocab_start, call)
    return TokenLogprobs.of(*found, (entropy, logit_range))  # type: ignore[misc]


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
        # CUDA rounds a 0-dim factor to a half-precision gradient's dtype first, but no 1-dim one.
        unit = upstream.unit.reshape(1)
        return (
            None if grad_hidden is None else _reduced(grad_hidden.mul_(unit), call, hidden.dtype),
            None if gradients.weight is None else padded(gradients.weight.mul_(unit), weight),
            None if gradients.bias is None or bias is None else padded(gradients.bias.mul_(unit), bias),
            None,
            None,
        )


def token_softmax(hidden: Tensor, labels: Tensor, head: LmHead, call: _Call) -> TokenSoftmax:
    """Computes the softmax statistics of every token over all ranks' rows.

    ``labels`` are counted from this rank's first row.
    """
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
    """Returns the dtype that holds the gradient of hidden until it is complete.

    With several ranks, their parts are summed in the compute dtype. On one rank nothing is added to
    the results of the matrix products, so their dtype is enough.
    """
    return (
        head.dtype
        if call.group is not None and call.group.size() > 1
        else torch.promote_types(call.matmul_dtype, head.weight.dtype)
    )


def _reduced(grad_hidden: Tensor, call: _Call, dtype: torch.dtype) -> Tensor:
    """Sums the gradient of hidden over ``call.group`` and rounds it to ``dtype``."""
    if call.group is not None and call.group.size() > 1:
        if call.sequence_parallel:
            return scatter_tokens(grad_hidden, call.group).to(dtype)
        dist.all_reduce(grad_hidden, group=call.group)
    return grad_hidden.to(dtype)
