# SPDX-License-Identifier: Apache-2.0
"""Tests of the table in kernels.md on torch.compile: which kernels compile in one graph."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_losses import (
    ClippedPGConfig,
    Pack,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    linear_sft_loss,
    vocab_parallel_cross_entropy,
    vocab_parallel_logprobs,
)

TOKENS, WIDTH, VOCAB = 6, 4, 9
LABELS = torch.tensor([3, 1, 8, 2, 5, 7])
OTHER = -torch.arange(1.0, 7.0, dtype=torch.float64)
MASK, SAMPLES = torch.ones(TOKENS, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
SEQUENCE = torch.arange(TOKENS) // 3
POLICIES = dict.fromkeys(("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages"), OTHER)
PACKED: dict[str, Any] = {"mask": MASK, "sequence": SEQUENCE, "sample_mask": SAMPLES}


def _filtered(hidden: Tensor, weight: Tensor) -> Tensor:
    found = linear_logprobs(hidden, weight, LABELS, top_k=5, top_p=0.9, unfiltered=True, chunk=4)
    assert found.unfiltered_logprobs is not None
    return torch.where(found.logprobs > -torch.inf, found.logprobs, 0.0).sum() + found.unfiltered_logprobs.sum()


def _all_statistics(hidden: Tensor, weight: Tensor) -> Tensor:
    found = linear_logprobs(hidden, weight, LABELS, entropy=True, logit_range=True, softcap=5.0, chunk=4)
    assert found.entropy is not None
    return (found.logprobs + found.entropy).sum()


def _logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear_logprobs(hidden, weight, LABELS, chunk=4).logprobs


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear_logprobs": lambda h, w: _logprobs(h, w).sum(),
    "linear_logprobs, all statistics": _all_statistics,
    "linear_logprobs, filtered": _filtered,
    "linear_cross_entropy": lambda h, w: linear_cross_entropy(h, w, LABELS, chunk=4),
    "vocab_parallel_logprobs": lambda h, w: vocab_parallel_logprobs(h @ w.T, LABELS, chunk=4).logprobs.sum(),
    "vocab_parallel_cross_entropy": lambda h, w: vocab_parallel_cross_entropy(h @ w.T, LABELS),
    "linear_sft_loss": lambda h, w: linear_sft_loss(
        h, w, LABELS, mask=MASK, real=MASK, sequence=SEQUENCE, sequences=2, valid_tokens=6
    )[0],
    "dpo_loss": lambda h, w: dpo_loss(_logprobs(h, w), OTHER, **PACKED, valid_sequences=2)[0],
    "grpo_loss": lambda h, w: grpo_loss(
        _logprobs(h, w), advantages=OTHER, mask=MASK, valid_tokens=6, reference_logprobs=OTHER
    )[0],
    "clipped_pg_loss": lambda h, w: clipped_pg_loss(
        _logprobs(h, w), **POLICIES, **PACKED, valid_tokens=6, valid_sequences=2, config=ClippedPGConfig()
    )[0],
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(program: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for n in (TOKENS, VOCAB)]
    loss = program(*leaves)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.slow(but=1)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does so
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_compile_in_one_graph(name: str) -> None:
    compiled = torch.compile(PROGRAMS[name], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled), run(PROGRAMS[name]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_pack_reads_lengths_so_it_breaks_the_graph() -> None:
    def program(hidden: Tensor, weight: Tensor) -> Tensor:
        pack = Pack.of(torch.tensor([0, 3, 6]))
        return linear_cross_entropy(hidden, weight, pack.labels(LABELS.reshape(2, 3)))

    torch.testing.assert_close(run(torch.compile(program, backend="aot_eager")), run(program))
    torch.compiler.reset()
    with pytest.raises(Exception, match="data-dependent"):
        run(torch.compile(program, backend="aot_eager", fullgraph=True))
