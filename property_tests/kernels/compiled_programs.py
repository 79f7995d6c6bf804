# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels for ``torch.compile``, and how often it compiles them over many sizes."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_losses import (
    ClippedPGConfig,
    RhoCorrection,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    linear_sft_loss,
    vocab_parallel_cross_entropy,
    vocab_parallel_logprobs,
)

WIDTH, VOCAB = 3, 14
SIZES = (6, 10, 4, 32, 64, 100, 8, 40, 66, 70, 96, 128)
"""Numbers of tokens: even, for sequence parallelism over two ranks.

The first compilation takes sizes that are equal for the same, so no two of the first batch are.
"""


class Batch(NamedTuple):
    """The tokens of a call. Its Python numbers differ between batches, as those of a run do."""

    labels: Tensor
    mask: Tensor
    sequence: Tensor
    sample_mask: Tensor
    other: Tensor
    """Numbers of tokens: log-probabilities of another policy, or advantages."""
    valid_tokens: int
    valid_sequences: int

    @classmethod
    def of(cls, tokens: int) -> "Batch":
        sequences = 4 + 2 * (tokens % 3)  # torch compiles sizes of 0 and 1, such as one pair, on their own
        mask = torch.arange(tokens) % 4 < 3
        other = -torch.arange(1.0, tokens + 1, dtype=torch.float64) / tokens
        samples = torch.ones(sequences, dtype=torch.bool)
        sequence = torch.arange(tokens) * sequences // tokens
        return cls(torch.arange(tokens) * 3 % VOCAB, mask, sequence, samples, other, int(mask.sum()), sequences)

    @property
    def packed(self) -> dict[str, Any]:
        return {"mask": self.mask, "sequence": self.sequence, "sample_mask": self.sample_mask}


class Ranks(NamedTuple):
    """The arguments that depend on ranks."""

    head: dict[str, Any]
    """Those of kernels that need the vocabulary."""
    loss: dict[str, Any]


ALONE = Ranks({}, {})
Program = Callable[[Tensor, Tensor, Batch, Ranks], Tensor]
"""A loss of hidden states, weight and batch."""


def _logprobs(h: Tensor, w: Tensor, b: Batch, r: Ranks, **options: Any) -> Any:
    return linear_logprobs(h, w, b.labels, chunk=16, **r.head, **options)


def _filtered(h: Tensor, w: Tensor, b: Batch, r: Ranks) -> Tensor:
    found = _logprobs(h, w, b, r, top_k=5, top_p=0.9, unfiltered=True)
    return torch.where(found.logprobs > -torch.inf, found.logprobs, 0.0).sum() + found.unfiltered_logprobs.sum()


def _all_statistics(h: Tensor, w: Tensor, b: Batch, r: Ranks) -> Tensor:
    found = _logprobs(h, w, b, r, entropy=True, logit_range=True, softcap=5.0)
    return (found.logprobs * found.max_logits + found.entropy).sum()


def _clipped(config: ClippedPGConfig, h: Tensor, w: Tensor, b: Batch, r: Ranks) -> Tensor:
    policies = ("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages")
    counts = {"valid_tokens": b.valid_tokens, "valid_sequences": b.valid_sequences}
    logprobs = _logprobs(h, w, b, r).logprobs
    return clipped_pg_loss(logprobs, **dict.fromkeys(policies, b.other), **b.packed, **counts, config=config, **r.loss)[
        0
    ]


def _grpo(h: Tensor, w: Tensor, b: Batch, r: Ranks) -> Tensor:
    names = ("advantages", "old_logprobs", "vllm_logprobs", "reference_logprobs")
    return grpo_loss(
        _logprobs(h, w, b, r).logprobs,
        **dict.fromkeys(names, b.other),
        mask=b.mask,
        valid_tokens=b.valid_tokens,
        sequence=b.sequence,
        sequences=b.sample_mask.shape[0],
        rho=RhoCorrection(rho_mask_sequence_level=True, rho_mask_upper_bound=2.0),
        **r.loss,
    )[0]


_GSPO = ClippedPGConfig(token_level_loss=False, sequence_level_importance_ratios=True)
PROGRAMS: dict[str, Program] = {
    "linear_logprobs": lambda h, w, b, r: linear_logprobs(h, w, b.labels, **r.head).logprobs.sum(),
    "linear_logprobs, all statistics": _all_statistics,
    "linear_logprobs, filtered": _filtered,
    "linear_cross_entropy": lambda h, w, b, r: linear_cross_entropy(
        h, w, b.labels, mask=b.mask, valid_tokens=b.valid_tokens, chunk=16, **r.head
    ),
    "vocab_parallel_logprobs": lambda h, w, b, r: vocab_parallel_logprobs(
        h @ w.T, b.labels, chunk=16, **r.head
    ).logprobs.sum(),
    "vocab_parallel_cross_entropy": lambda h, w, b, r: vocab_parallel_cross_entropy(h @ w.T, b.labels, **r.head),
    "linear_sft_loss": lambda h, w, b, r: linear_sft_loss(
        h,
        w,
        b.labels,
        mask=b.mask,
        real=b.mask,
        sequence=b.sequence,
        sequences=b.sample_mask.shape[0],
        valid_tokens=b.valid_tokens,
        **r.head,
        **r.loss,
    )[0],
    "dpo_loss": lambda h, w, b, r: dpo_loss(
        _logprobs(h, w, b, r).logprobs, b.other, **b.packed, valid_sequences=b.valid_sequences, **r.loss
    )[0],
    "grpo_loss": _grpo,
    "clipped_pg_loss": lambda h, w, b, r: _clipped(ClippedPGConfig(), h, w, b, r),
    "clipped_pg_loss, GSPO": lambda h, w, b, r: _clipped(_GSPO, h, w, b, r),
}


def compilations(name: str, dynamic: bool | None, ranks: Ranks = ALONE, rows: slice = slice(VOCAB)) -> int:
    """Compares a program that is compiled in one graph with the same in eager mode, over ``SIZES``.

    Args:
        name: its name.
        dynamic: the argument of ``torch.compile``.
        ranks: the last argument of the program.
        rows: this rank's rows of the weight.

    Returns:
        How many graphs were compiled.
    """
    graphs, group = 0, ranks.head.get("tp_group")

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def program(h: Tensor, w: Tensor, b: Batch) -> Tensor:
        return PROGRAMS[name](h, w, b, ranks)

    torch.compiler.reset()
    compiled = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*should not be instantiated", DeprecationWarning
        )  # torch's compiler does so
        for tokens in SIZES:
            generator = torch.Generator().manual_seed(tokens)
            h, w = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (tokens, VOCAB))
            if "sequence_parallel" in ranks.head:
                h = h.chunk(group.size())[group.rank()].clone()
            leaves = h.requires_grad_(), w[rows].clone().requires_grad_()
            losses = [each(*leaves, Batch.of(tokens)) for each in (compiled, program)]
            found, expected = ((loss.detach(), *torch.autograd.grad(loss, leaves)) for loss in losses)
            torch.testing.assert_close(found, expected)
    torch.compiler.reset()
    return graphs
