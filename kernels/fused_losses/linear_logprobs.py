# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from hidden states and an lm-head.

The ``[tokens, vocab]`` logits are never formed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.filtering import LogitFilter
from fused_losses.lm_head import (
    HeadGradients,
    LmHead,
    check_head,
    chunks_of,
    default_chunk,
    dtype_of_products,
    gather_tokens,
    padded,
    ranks_of_tokens,
    scatter_tokens,
)
from fused_losses.names import named
from fused_losses.operators import Form, operator
from fused_losses.passes import check_not_transformed, once_differentiable, without_autocast
from fused_losses.ranks import alone
from fused_losses.softmax import TokenLogprobs
from fused_losses.token_layouts import TokenLayout, flatten_tokens
from fused_losses.token_stage import Saved, TokenStage, Upstream, own_labels


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are not tensors."""

    stage: TokenStage
    rows: int
    softcap: float | None
    matmul_dtype: torch.dtype
    chunk: int
    sequence_parallel: bool

    OPTIONS = f"SymInt rows, float? softcap, ScalarType matmul_dtype, SymInt chunk, bool parallel, {TokenStage.OPTIONS}"
    """``options`` for ``operator``."""

    @property
    def options(self) -> tuple[Any, ...]:
        """The fields as numbers and texts."""
        own = self.rows, self.softcap, self.matmul_dtype, self.chunk, self.sequence_parallel
        return *own, *self.stage.options

    @classmethod
    def of(cls, *options: Any) -> "_Call":
        """Makes a call from ``options``."""
        return cls(TokenStage.of(*options[5:]), *options[:5])

    def head(self, weight: Tensor, bias: Tensor | None) -> LmHead:
        return LmHead(
            weight[: self.rows],
            None if bias is None else bias[: self.rows],
            self.stage.temperature,
            self.softcap,
            self.matmul_dtype,
        )

    def all_tokens(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states of all ranks' tokens with sequence parallelism."""
        group = self.stage.group
        return gather_tokens(hidden, group) if self.sequence_parallel and group is not None else hidden


@named
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
    top_k: int | None = None,
    top_p: float = 1.0,
    unfiltered: bool = False,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    layout: TokenLayout = "bsh",
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
        hidden: ``[tokens, hidden]``, or a batch, ``[B, S, hidden]`` or ``[S, B, hidden]`` as
            ``layout`` says, the same on every rank of ``tp_group``. With ``sequence_parallel``:
            this rank's part of the tokens, in rank order, ``[tokens / tp, hidden]``.
        weight: ``[local_vocab, hidden]``, this rank's rows of the lm-head, in the dtype of hidden;
            under ``torch.autocast`` in any.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids in the whole vocabulary, or
            ``ignore_index``.
        bias: ``[local_vocab]``, or None.
        temperature: divides the logits; positive.
        softcap: the cap, positive; None for no soft-cap.
        entropy: whether to return the entropy of p.
        logit_range: whether to return the smallest and the largest logit.
        top_k: only the k largest logits of a token stay in its softmax, and logits that tie with
            the last of them; None for all. NeMo-RL filters so during training, as generation does.
        top_p: of these, only the most probable stay, until their probabilities sum to this number;
            1 for all.
        unfiltered: whether to return log-probabilities without this filter too, as a KL penalty
            needs them.
        ignore_index: the label of tokens that do not count: their log-probability is 0, without a
            gradient.
        vocab_start: id in the whole vocabulary of this rank's first row; needed if ``tp_group`` has
            several ranks.
        vocab_rows: number of leading rows that belong to the vocabulary; all by default. The
            remaining ones are padding and get a gradient of zero.
        tp_group: the ranks among which the vocabulary is split; None if it is whole here.
        sequence_parallel: whether each rank of ``tp_group`` holds only its part of the tokens.
        layout: order of the dims of hidden; see ``flatten_tokens``. ``"sbh"`` is Megatron's.
        matmul_dtype: dtype of matrix products; by default that of ``torch.autocast``, or else of
            the inputs. float32 for inputs in half precision rounds less. All else is float32
            (float64 for float64 inputs).
        chunk: number of tokens whose logits exist at a time; by default an eighth of the hidden
            size, and at least 32.

    Returns:
        ``logprobs`` and, if asked for, ``entropy`` in nats, ``min_logits`` and ``max_logits``
        (before temperature and filter), and ``unfiltered_logprobs``; else None. Each has the shape
        of the labels, is in float32 (float64 for float64 inputs) and the same on every rank of
        ``tp_group``. Log-probabilities and entropies carry gradients. A label that is filtered out
        has -inf, without a gradient; the entropy is that of the logits that stay.
        The gradient of hidden is complete on every rank (with ``sequence_parallel``: for the rank's
        own tokens). The gradients of weight and bias cover the tokens of this call; the caller adds
        them up over data and context parallelism.

    Raises:
        ValueError: A shape, dtype or number does not fit; a label belongs to no rank, or to two; or
            ``vocab_start`` is missing. The message names the argument. The check of labels waits
            for the device; ``unchecked_values`` switches it off, and such a label then has NaN.

    Collectives:
        All are on ``tp_group``, and without a filter their number does not depend on the chunks.
        Forward: one all-reduce MAX of ``[tokens]`` (``[2, tokens]`` with ``logit_range``) and one
        all-reduce SUM of ``[3, tokens]`` (``[4, tokens]`` with ``entropy``). Backward: one
        all-reduce SUM of ``[tokens, hidden]`` if hidden needs a gradient. All are in the compute
        dtype, float32 or float64.
        With ``sequence_parallel``: forward and backward each begin with an all-gather of hidden,
        and a reduce-scatter takes the place of backward's all-reduce.
        With a filter: forward also has the collectives of ``LogitFilter.bound`` for each chunk, and
        with ``unfiltered`` or ``logit_range`` the two all-reduces twice.

    Memory:
        Forward and backward hold ``[chunk, local_vocab]`` logits at a time in the compute dtype;
        see "Memory" in kernels.md for how many. Backward holds a gradient of weight in the
        compute dtype, which is rounded once at the end, and ``[tokens, hidden]`` numbers (twice
        that with ``sequence_parallel``). With a ``matmul_dtype`` other than the weight's, both
        passes hold a copy of weight in it.
        Saved for backward: the inputs, an int64 label and one number for each token (one more with
        ``entropy``; with a filter one more and a bool, and with ``unfiltered`` yet another);
        nothing under ``torch.no_grad``.
    """
    check_not_transformed(hidden=hidden, weight=weight, labels=labels, bias=bias)
    hidden, labels, restore = flatten_tokens(hidden, labels, layout, ranks_of_tokens(sequence_parallel, tp_group))
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
    stage = TokenStage(temperature, entropy, logit_range, LogitFilter(top_k, top_p), unfiltered, tp_group)
    call = _Call(
        stage,
        rows=weight.shape[0] if vocab_rows is None else vocab_rows,
        softcap=softcap,
        matmul_dtype=dtype_of_products(hidden, weight, matmul_dtype),
        chunk=chunk or default_chunk(weight),
        sequence_parallel=sequence_parallel and not alone(tp_group),
    )
    own = own_labels(labels, ignore_index, vocab_start or 0)
    return stage.results(_LinearLogprobs.apply(hidden, weight, bias, own, call), restore)  # type: ignore[arg-type]


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
    ) -> tuple[Tensor, ...]:
        found = _forward(call, hidden, weight, bias, labels)
        outputs: Any = tuple(found[:5])
        ctx.save_for_backward(hidden, weight, bias, labels, *found[5:])
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:4])
        return outputs

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *upstream_of: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *kept = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        return *_backward(ctx.call, hidden, weight, bias, kept, list(upstream_of), needs), None, None


def _forms(call: _Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> list[Form | None]:
    return call.stage.forms(labels.shape[0], torch.promote_types(weight.dtype, torch.float32))


@operator(
    "linear_logprobs", "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels", _Call.OPTIONS, _Call.of, _forms
)
def _forward(
    call: _Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor | None, ...]:
    """Computes the outputs, and then what is saved for backward."""
    head, hidden = call.head(weight, bias), call.all_tokens(hidden)
    matrix = head.cast(head.weight)
    found = call.stage.statistics(
        lambda tokens: head.logits(head.cast(hidden[tokens]), matrix),
        labels,
        chunks_of(len(hidden), call.chunk),
        hidden.new_zeros(0, len(matrix), dtype=head.dtype),
    )
    return *found.outputs(labels, call.stage.temperature), *found.saved()


def _forms_of_gradients(
    call: _Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: Any, upstream: Any, needs: list[bool]
) -> list[Form | None]:
    leaves = zip(needs, (hidden, weight, bias), strict=True)
    return [(leaf.shape, leaf.dtype) if needed and leaf is not None else None for needed, leaf in leaves]


@operator(
    "linear_logprobs_gradients",
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor?[] kept, Tensor?[] upstream, bool[] needs",
    _Call.OPTIONS,
    _Call.of,
    _forms_of_gradients,
)
def _backward(
    call: _Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: list[Any],
    upstream_of: list[Tensor | None],
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of hidden, weight and bias, those that are needed."""
    saved, head, (need_hidden, need_weight, need_bias) = Saved(*kept), call.head(weight, bias), needs
    upstream = Upstream.of(upstream_of, saved, call.stage.temperature, call.matmul_dtype)
    own = call.all_tokens(hidden)
    matrix = head.cast(head.weight)
    gradients = HeadGradients(head, need_weight, need_bias)
    held = _held(call, hidden, head)
    grad_hidden = torch.zeros(own.shape, dtype=held, device=own.device) if need_hidden else None

    def add(tokens: slice) -> None:  # a function, so that no chunk outlives its turn
        part = upstream.part(tokens)
        h = torch.where(part.live[:, None], head.cast(own[tokens]), 0.0)
        z = head.logits(h, matrix)
        capped = None if head.softcap is None else z.clone()
        dz = part.dlogits(z, saved.part(tokens))
        if capped is not None:
            head.uncap_(dz, capped)
        rounded = head.cast(dz)
        gradients.add(dz, h, rounded)
        if grad_hidden is not None:
            grad_hidden[tokens] = rounded @ matrix

    for tokens in chunks_of(len(own), call.chunk):
        add(tokens)
    # CUDA would round a 0-dim factor to the dtype of a half-precision gradient first.
    unit = upstream.unit.reshape(1)
    return (
        None if grad_hidden is None else _reduced(grad_hidden.mul_(unit), call, hidden.dtype),
        None if gradients.weight is None else padded(gradients.weight.mul_(unit), weight),
        None if gradients.bias is None or bias is None else padded(gradients.bias.mul_(unit), bias),
    )


def _held(call: _Call, hidden: Tensor, head: LmHead) -> torch.dtype:
    """Returns the dtype that holds the gradient of hidden until it is complete.

    With several ranks, their parts are summed in the compute dtype. On one rank nothing is added to
    the results of the matrix products, so their dtype is enough.
    """
    return head.dtype if not alone(call.stage.group) else torch.promote_types(call.matmul_dtype, hidden.dtype)


def _reduced(grad_hidden: Tensor, call: _Call, dtype: torch.dtype) -> Tensor:
    """Sums the gradient of hidden over the ranks of the vocabulary and rounds it to ``dtype``."""
    group = call.stage.group
    if group is not None and not alone(group):
        if call.sequence_parallel:
            return scatter_tokens(grad_hidden, group).to(dtype)
        dist.all_reduce(grad_hidden, group=group)
    return grad_hidden.to(dtype)
