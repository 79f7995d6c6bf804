# SPDX-License-Identifier: Apache-2.0
"""Tests that count bytes against what docs/reference/kernels.md says under "Memory"."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_losses import linear_cross_entropy, linear_logprobs, vocab_parallel_cross_entropy, vocab_parallel_logprobs
from fused_losses.lm_head import default_chunk
from lossgate.observe import MemoryWatch

TOKENS, WIDTH, VOCAB, CHUNK = 48, 4, 2048, 8
STATISTICS: dict[str, dict[str, Any]] = {
    "log-probabilities alone": {},
    "temperature": {"temperature": 0.7},
    "entropy": {"entropy": True},
    "range": {"logit_range": True},
    "top-k": {"top_k": 8},
    "top-p": {"top_p": 0.9},
    "both, unfiltered too": {"top_k": 8, "top_p": 0.9, "unfiltered": True},
    "top-p, unfiltered and entropy": {"top_p": 0.9, "unfiltered": True, "entropy": True, "logit_range": True},
}
CAPPED = {"soft-cap": {"softcap": 5.0}, "soft-cap and entropy": {"softcap": 5.0, "entropy": True}}
DTYPES = [torch.float32, torch.bfloat16]


def copies(how: dict[str, Any]) -> tuple[float, float]:
    """Returns how many times the chunk's logits forward and backward hold, at most."""
    forward = 3.5 if how.keys() & {"entropy", "top_k", "top_p"} else 2
    return forward, 2 + len(how.keys() & {"entropy", "softcap", "unfiltered"})


def leaves(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator).to(dtype).requires_grad_() for n in (TOKENS, VOCAB))
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), generator=generator)


def of_each_token(found: Any) -> Tensor:
    parts = (found.logprobs, found.entropy, found.unfiltered_logprobs)
    return sum((torch.where(x > -torch.inf, x, 0.0).sum() for x in parts if x is not None), torch.zeros(()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*STATISTICS, *CAPPED])
def test_linear_kernels_hold_few_copies_of_a_chunk(name: str, dtype: torch.dtype) -> None:
    hidden, weight, labels = leaves(dtype)
    how = {**STATISTICS, **CAPPED}[name]
    with MemoryWatch() as forward:
        found = linear_logprobs(hidden, weight, labels, chunk=CHUNK, **how)
    loss = of_each_token(found)
    with MemoryWatch() as backward:
        loss.backward()
    logits, head, tokens = CHUNK * VOCAB * 4, VOCAB * WIDTH * 4, TOKENS * (8 * WIDTH + 150)
    of_forward, of_backward = copies(how)
    assert forward.peak_bytes <= of_forward * logits + head + tokens  # the weight itself is seen once it is sliced
    assert backward.peak_bytes <= of_backward * logits + 3 * head + tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STATISTICS)
def test_vocab_parallel_kernels_hold_few_copies_of_a_chunk(name: str, dtype: torch.dtype) -> None:
    """No copy of the shard is made, neither in forward nor in backward, but for its gradient."""
    hidden, weight, labels = leaves(dtype)
    given, how = (hidden @ weight.T).detach().requires_grad_(), STATISTICS[name]
    shard = given.numel() * given.element_size()
    with MemoryWatch() as forward:
        found = vocab_parallel_logprobs(given, labels, chunk=CHUNK, **how)
    loss = of_each_token(found)
    with MemoryWatch() as backward:
        loss.backward()
    logits, tokens = CHUNK * VOCAB * 4, TOKENS * 200
    of_forward, of_backward = copies(how)
    assert (
        forward.peak_bytes <= of_forward * logits + shard + tokens
    )  # the logits themselves are seen once they are sliced
    assert backward.peak_bytes <= of_backward * logits + 2 * shard + tokens


@pytest.mark.parametrize("kernel", [vocab_parallel_logprobs, vocab_parallel_cross_entropy])
def test_vocab_parallel_kernels_hold_a_chunk_without_gradients_too(kernel: Any) -> None:
    hidden, weight, labels = leaves(torch.bfloat16)
    given = (hidden @ weight.T).detach()
    with torch.no_grad(), MemoryWatch() as made:
        kernel(given, labels, chunk=CHUNK)
    assert max(made.sizes - {given.numel()}) <= CHUNK * VOCAB
    assert made.peak_bytes <= 2 * CHUNK * VOCAB * 4 + given.numel() * 2 + TOKENS * 200


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_forward_hold_a_gradient_of_the_head(dtype: torch.dtype) -> None:
    hidden, weight, labels = leaves(dtype)
    with MemoryWatch() as made:
        linear_cross_entropy(hidden, weight, labels, chunk=CHUNK)
    assert made.peak_bytes <= 2 * CHUNK * VOCAB * 4 + 3 * VOCAB * WIDTH * 4 + TOKENS * (8 * WIDTH + 100)


SAVED = {
    "log-probabilities alone": 8 + 4,
    "entropy": 8 + 4 + 4,
    "top-k": 8 + 4 + 4 + 1,
    "both, unfiltered too": 8 + 4 + 4 + 1 + 4,
}
"""Bytes for each token, beside the inputs."""


@pytest.mark.parametrize("name", SAVED)
def test_saved_for_backward(name: str) -> None:
    hidden, weight, labels = leaves(torch.float32)
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        linear_logprobs(hidden, weight, labels, chunk=CHUNK, **STATISTICS[name])
    of_tokens = [t for t in saved if t.shape[0] == TOKENS and t.dim() == 1]
    assert sum(t.numel() * t.element_size() for t in of_tokens) == TOKENS * SAVED[name]
    assert {t.shape for t in saved if t.dim() > 1} == {hidden.shape, weight.shape}


@pytest.mark.parametrize("width", [256, 1024, 4096])
def test_logits_of_a_default_chunk_take_a_quarter_of_a_bfloat16_weight(width: int) -> None:
    rows = 1000
    weight = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    assert default_chunk(weight) * rows * 4 == weight.numel() * 2 / 4
