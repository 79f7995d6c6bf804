# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from logits whose vocabulary is split over ranks.

The logits are never gathered.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import check_integer, check_label_dtype
from fused_losses.filtering import LogitFilter
from fused_losses.lm_head import check_split, chunks_of
from fused_losses.names import named
from fused_losses.numerics import check_temperature
from fused_losses.operators import Form, operator
from fused_losses.passes import check_not_transformed, once_differentiable, without_autocast
from fused_losses.softmax import TokenLogprobs
from fused_losses.token_layouts import TokenLayout, flatten_tokens
from fused_losses.token_stage import Saved, TokenStage, Upstream, own_labels

_CHUNK = 1 << 22
"""Logits that are held in the compute dtype at a time, by default: 16 MiB in float32."""


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are not tensors."""

    stage: TokenStage
    rows: int
    chunk: int

    OPTIONS = f"SymInt rows, SymInt chunk, {TokenStage.OPTIONS}"
    """``options`` for ``operator``."""

    @property
    def options(self) -> tuple[Any, ...]:
        """The fields as numbers and texts."""
        return self.rows, self.chunk, *self.stage.options

    @classmethod
    def of(cls, rows: int, chunk: int, *stage: Any) -> "_Call":
        """Makes a call from ``options``."""
        return cls(TokenStage.of(*stage), rows, chunk)

    def logits(self, logits: Tensor, tokens: slice) -> Tensor:
        """Returns logits over temperature without padding: a new tensor in the compute dtype."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return torch.div(logits[tokens, : self.rows].to(dtype), self.stage.temperature)


@named
def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_range: bool = False,
    top_k: int | None = None,
    top_p: float = 1.0,
    unfiltered: bool = False,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    layout: TokenLayout = "bsh",
    chunk: int | None = None,
) -> TokenLogprobs:
    """Computes ``log p(label)`` of each token, where ``p = softmax(logits / temperature)``.

    Any upstream gradient is supported. The vocabulary is split as in Megatron-LM
    (arXiv:1909.08053).

    Args:
        logits: ``[tokens, local_vocab]``, this rank's columns of the vocabulary; or a batch,
            ``[B, S, local_vocab]`` or ``[S, B, local_vocab]`` as ``layout`` says.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids in the whole vocabulary, or
            ``ignore_index``.
        temperature: divides the logits; positive.
        entropy: whether to return the entropy of p.
        logit_range: whether to return the smallest and the largest logit.
        top_k: only the k largest logits of a token stay in its softmax; see ``linear_logprobs``.
        top_p: of these, only the most probable stay, until their probabilities sum to this number.
        unfiltered: whether to return log-probabilities without this filter too.
        ignore_index: the label of tokens that do not count: their log-probability is 0, without a
            gradient.
        vocab_start: id in the whole vocabulary of this rank's first column; needed if ``tp_group``
            has several ranks.
        vocab_rows: number of leading columns that belong to the vocabulary; all by default. The
            remaining ones are padding and get a gradient of zero.
        tp_group: the ranks among which the vocabulary is split; None if it is whole here.
        layout: order of the dims of logits; see ``flatten_tokens``. ``"sbh"`` is Megatron's.
        chunk: number of tokens whose logits exist in the compute dtype at a time. By default their
            logits take 16 MiB in float32, or there is one token.

    Returns:
        ``logprobs`` and, if asked for, ``entropy`` in nats, ``min_logits`` and ``max_logits``
        (before temperature and filter), and ``unfiltered_logprobs``; else None. Each has the shape
        of the labels, is in float32 (float64 for float64 logits) and the same on every rank of
        ``tp_group``. Log-probabilities and entropies carry gradients. A label that is filtered out
        has -inf, without a gradient. The gradient of the logits is local, in their dtype.

    Raises:
        ValueError: A shape, dtype or number does not fit; a label belongs to no rank, or to two; or
            ``vocab_start`` is missing. The message names the argument. The check of labels waits
            for the device; ``unchecked_values`` switches it off, and such a label then has NaN.

    Collectives:
        Forward: one all-reduce MAX of ``[tokens]`` (``[2, tokens]`` with ``logit_range``) and one
        all-reduce SUM of ``[3, tokens]`` (``[4, tokens]`` with ``entropy``), in the dtype of the
        results. With a filter: also the collectives of ``LogitFilter.bound`` for each chunk, and
        with ``unfiltered`` or ``logit_range`` the two all-reduces twice. Backward: none.

    Memory:
        ``[chunk, local_vocab]`` logits at a time in the compute dtype; see "Memory" in
        kernels.md for how many. Backward makes the gradient of the logits, in their dtype.
        Saved for backward: the logits, an int64 label and one number for each token (one more with
        ``entropy``; with a filter one more and a bool, and with ``unfiltered`` yet another).
    """
    check_not_transformed(logits=logits, labels=labels)
    logits, labels, restore = flatten_tokens(logits, labels, layout, name="logits")
    check_label_dtype(labels)
    check_temperature(temperature)
    if chunk is not None:
        check_integer("chunk", chunk, least=1, otherwise="or None to choose one")
    columns = logits.shape[1]
    check_split(columns, "logits", "columns", vocab_start, vocab_rows, tp_group)
    call = _Call(
        TokenStage(temperature, entropy, logit_range, LogitFilter(top_k, top_p), unfiltered, tp_group),
        rows=columns if vocab_rows is None else vocab_rows,
        chunk=chunk or max(1, _CHUNK // max(1, columns)),
    )
    own = own_labels(labels, ignore_index, vocab_start or 0)
    return call.stage.results(_VocabParallelLogprobs.apply(logits, own, call), restore)  # type: ignore[arg-type]


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, logits: Tensor, labels: Tensor, call: _Call) -> tuple[Tensor, ...]:
        found = _forward(call, logits, labels)
        outputs: Any = tuple(found[:5])
        ctx.save_for_backward(logits, labels, *found[5:])
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:4])
        return outputs

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *upstream_of: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, *kept = ctx.saved_tensors
        return *_backward(ctx.call, logits, kept, list(upstream_of)), None, None


def _forms(call: _Call, logits: Tensor, labels: Tensor) -> list[Form | None]:
    return call.stage.forms(labels.shape[0], torch.promote_types(logits.dtype, torch.float32))


@operator("vocab_parallel_logprobs", "Tensor logits, Tensor labels", _Call.OPTIONS, _Call.of, _forms)
def _forward(call: _Call, logits: Tensor, labels: Tensor) -> tuple[Tensor | None, ...]:
    """Computes the outputs, and then what is saved for backward."""
    found = call.stage.statistics(
        lambda tokens: call.logits(logits, tokens),
        labels,
        chunks_of(len(logits), call.chunk),
        call.logits(logits, slice(0, 0)),
    )
    return *found.outputs(labels, call.stage.temperature), *found.saved()


@operator(
    "vocab_parallel_logprobs_gradient",
    "Tensor logits, Tensor?[] kept, Tensor?[] upstream",
    _Call.OPTIONS,
    _Call.of,
    lambda _, logits, *__: [(logits.shape, logits.dtype)],
)
def _backward(call: _Call, logits: Tensor, kept: list[Any], upstream_of: list[Tensor | None]) -> tuple[Tensor]:
    """Computes the gradient of the logits."""
    saved = Saved(*kept)
    upstream = Upstream.of(upstream_of, saved, call.stage.temperature, saved.logsumexp.dtype)
    grad = torch.zeros_like(logits)
    for tokens in chunks_of(len(logits), call.chunk):
        grad[tokens, : call.rows] = upstream.part(tokens).dlogits(call.logits(logits, tokens), saved.part(tokens))
    return (grad,)
