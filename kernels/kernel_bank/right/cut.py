# SPDX-License-Identifier: Apache-2.0
"""Cut cross-entropy: negative log-likelihoods that never have more than a tile of the logits.

Forward multiplies each label's logit apart from the others. Backward makes the gradient of the
logits tile by tile of the vocabulary, and adds the gradient of the hidden states over the tiles.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernel_bank.right.formats import INPUTS
from kernel_bank.right.kernel import Call, Leaves, of_tokens
from kernel_bank.right.logprobs import VOCAB_TILE
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY


class _Cut(torch.autograd.Function):
    """Returns log-probabilities of the labels.

    Products are in float32. ``dlogits`` and ``sums`` are the dtypes of a tile of the logits'
    gradient, and of the sum over tiles that is the gradient of the hidden states.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: "_How") -> Tensor:
        rows, columns = hidden.float(), weight.float()
        label = (rows * columns[labels]).sum(-1) + (0.0 if bias is None else bias.float()[labels])
        tiles = [_tile(rows, columns, bias, start, how) for start in range(0, len(columns), VOCAB_TILE)]
        logsumexp = torch.logsumexp(torch.stack([torch.logsumexp(tile, -1) for tile in tiles]), 0)
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp)
        ctx.how = how
        return label / how.temperature - logsumexp

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, labels, logsumexp = ctx.saved_tensors
        how: _How = ctx.how
        rows, columns = hidden.float(), weight.float()
        grad_hidden = torch.zeros_like(hidden, dtype=how.sums)
        grad_weight, grad_bias = torch.zeros_like(columns), columns.new_zeros(len(columns))
        for start in range(0, len(columns), VOCAB_TILE):
            p = (_tile(rows, columns, bias, start, how) - logsumexp[:, None]).exp()
            own = labels[:, None] == torch.arange(start, start + p.shape[1], device=p.device)
            d = (own.float() - p) * (upstream / how.temperature)[:, None]
            d = d.to(how.dlogits).float()
            tile = slice(start, start + p.shape[1])
            grad_hidden += (d @ columns[tile]).to(how.sums)
            grad_weight[tile], grad_bias[tile] = d.T @ rows, d.sum(0)
        grads = grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)
        return *grads, None if bias is None else grad_bias.to(bias.dtype), None, None


class _How:
    def __init__(self, temperature: float, dlogits: torch.dtype, sums: torch.dtype) -> None:
        self.temperature, self.dlogits, self.sums = temperature, dlogits, sums


def _tile(rows: Tensor, columns: Tensor, bias: Tensor | None, start: int, how: _How) -> Tensor:
    """Returns a tile of the logits, in float32."""
    logits = rows @ columns[start : start + VOCAB_TILE].T
    logits = logits if bias is None else logits + bias.float()[start : start + VOCAB_TILE]
    return logits / how.temperature


def _cut(name: str, *, dlogits: str, sums: str) -> Candidate:
    def write(call: Call, tokens: slice, leaves: Leaves) -> Tensor:
        hidden, weight, *bias = leaves
        dtypes = (hidden.dtype if one == INPUTS else torch.float32 for one in (dlogits, sums))
        how = _How(call.options.temperature, *dtypes)
        weight, labels = weight[: call.columns], call.inputs.labels[tokens]
        return -_Cut.apply(hidden, weight, bias[0][: call.columns] if bias else None, labels, how)  # pyright: ignore[reportOperatorIssue]

    declares = {"dlogits": dlogits, "accumulate_hidden": sums, "vocab_chunk": VOCAB_TILE}
    return of_tokens(name, "nll", "hidden", write, supports={"reduction": ANY}, declares=declares)


def _kernels() -> Iterator[Candidate]:
    yield _cut("cut", dlogits="float32", sums="float32")
    yield _cut("cut_low_dlogits", dlogits=INPUTS, sums="float32")
    yield _cut("cut_low_sums", dlogits=INPUTS, sums=INPUTS)


KERNELS = tuple(_kernels())
