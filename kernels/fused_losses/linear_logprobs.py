# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from hidden states and lm-head, without the ``[tokens, vocab]`` logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.softmax import RunningSoftmax


@dataclass(frozen=True)
class _Tiles:
    """How the logits are cut: ``token_chunk x vocab_chunk`` of them exist at a time."""

    tokens: int
    rows: int
    token_chunk: int
    vocab_chunk: int

    def vocab(self) -> list[slice]:
        return [slice(i, min(i + self.vocab_chunk, self.rows)) for i in range(0, self.rows, self.vocab_chunk)]

    def token(self) -> list[slice]:
        return [slice(i, min(i + self.token_chunk, self.tokens)) for i in range(0, self.tokens, self.token_chunk)]


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    token_chunk: int = 1024,
    vocab_chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """``log p(label)`` and the entropy of ``p = softmax((hidden weight^T + bias) / temperature)``, token by token.

    hidden: ``[T, H]``, the same on every rank of ``tp_group``. weight: ``[local vocab, H]``, bias ``[local vocab]``:
    this rank's rows of the lm-head, of which the first ``vocab_rows`` (default: all) belong to the vocabulary, from
    row ``vocab_start`` of it on; further ones are padding, and get a gradient of zero. labels: ``[T]`` integer ids in
    the whole vocabulary; a label outside of it, such as -100, is owned by no rank, and its value means nothing.

    Returns logprobs ``[T]`` and entropy ``[T]``, the same on every rank, in float32 (float64 for float64 inputs);
    entropy, in nats, carries no gradient. Any upstream gradient of logprobs is right, zeros included, whatever the
    hidden states there are. The gradient of hidden is complete on every rank; those of weight and bias are for this
    rank's tokens, for the caller to add up over data and context parallelism.

    Computes in float32 whatever the inputs' dtype; gradients are rounded once, at the end. Holds T H float32 numbers
    and one tile of ``token_chunk x vocab_chunk`` logits, forward and backward; saves no more than its inputs and 2 T
    numbers for backward, where the tiles are computed again. Collectives on ``tp_group``: forward one all-reduce
    MAX of T and one SUM of 3 T float32 numbers, backward one SUM of T H, whatever the chunks.
    """
    _check(hidden, weight, labels, bias, temperature, vocab_rows)
    rows = weight.shape[0] if vocab_rows is None else vocab_rows
    tiles = _Tiles(hidden.shape[0], rows, token_chunk, vocab_chunk)
    return _LinearLogprobs.apply(hidden, weight, bias, labels - vocab_start, temperature, tiles, tp_group)  # type: ignore[return-value]


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float, rows: int | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [tokens, H] and [vocab, H]")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels {list(labels.shape)}: expected one for each of {hidden.shape[0]} tokens")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)}: expected one for each of {weight.shape[0]} rows of weight")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: expected a positive number; for greedy decoding there is no log-probability")
    if rows is not None and not 0 <= rows <= weight.shape[0]:
        raise ValueError(f"vocab_rows {rows}: weight has {weight.shape[0]} rows")


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, tiles: _Tiles, group: Any
    ) -> tuple[Tensor, Tensor]:
        running = RunningSoftmax.start(tiles.tokens, hidden)
        for rows in tiles.vocab():
            head = _Head.of(weight, bias, rows, temperature, running.total.dtype)
            for tokens in tiles.token():
                running.add(tokens, head.logits(hidden[tokens]), labels[tokens] - rows.start)
        running.reduce(group)
        ctx.save_for_backward(hidden, weight, bias, labels, running.logsumexp)
        ctx.temperature, ctx.tiles, ctx.group = temperature, tiles, group
        entropy = running.entropy
        ctx.mark_non_differentiable(entropy)
        return running.logprobs, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # A token without upstream gradient takes no part, even if its hidden state is NaN.
        live = upstream != 0
        scale = torch.where(live, upstream, 0.0) / ctx.temperature
        grad_hidden = torch.zeros(hidden.shape, dtype=scale.dtype, device=hidden.device) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for rows in tiles.vocab():
            head = _Head.of(weight, bias, rows, ctx.temperature, scale.dtype)
            tile_weight, tile_bias = torch.zeros_like(head.weight), torch.zeros_like(head.weight[:, 0])
            for tokens in tiles.token():
                h = torch.where(live[tokens, None], hidden[tokens], 0.0).to(scale.dtype)
                dlogits = head.dlogits(h, labels[tokens] - rows.start, logsumexp[tokens], scale[tokens])
                if grad_hidden is not None:
                    grad_hidden[tokens] += dlogits @ head.weight
                if grad_weight is not None:
                    tile_weight.addmm_(dlogits.T, h)
                if grad_bias is not None:
                    tile_bias += dlogits.sum(0)
            if grad_weight is not None:
                grad_weight[rows] = tile_weight.to(weight.dtype)
            if grad_bias is not None:
                grad_bias[rows] = tile_bias.to(weight.dtype)
        if grad_hidden is not None:
            if ctx.group is not None and ctx.group.size() > 1:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


@dataclass(frozen=True)
class _Head:
    """Some rows of the lm-head, in the dtype of computation."""

    weight: Tensor
    bias: Tensor | None
    temperature: float

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, rows: slice, temperature: float, dtype: torch.dtype) -> "_Head":
        return cls(weight[rows].to(dtype), None if bias is None else bias[rows].to(dtype), temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        z = hidden.to(self.weight.dtype) @ self.weight.T
        if self.bias is not None:
            z += self.bias
        return z.div_(self.temperature) if self.temperature != 1.0 else z

    def dlogits(self, hidden: Tensor, labels: Tensor, logsumexp: Tensor, scale: Tensor) -> Tensor:
        """``(onehot - p) scale``. A token of scale 0 gets zeros, though its logsumexp may be NaN."""
        p = (self.logits(hidden) - torch.where(scale != 0, logsumexp, 0.0)[:, None]).exp_()
        d = torch.where((scale != 0)[:, None], p * -scale[:, None], 0.0)
        here = ((labels >= 0) & (labels < d.shape[1])).nonzero().squeeze(1)
        return d.index_put_((here, labels[here]), scale[here], accumulate=True)
