# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's published tests of log-probabilities from logits, made again from their description.

There (NVIDIA-NeMo/RL, tests/unit/distributed/test_distributed_logprob.py and the sampling part of
test_model_utils.py), ``DistributedLogprob`` and its chunked version equal PyTorch's log-softmax
within 1e-4, in float32, with a gradient of ones: 4 rows of 8, 1024 ids, tp 1 and 2, chunks of 4 or
none. So do entropies (2 rows of 16, 256 ids, chunks of 5, 4 and 3), and top-k 10 and top-p 0.9 (4
rows of 16, 256 ids, tp 2). Chunks change nothing: within 1e-6 in float32 and bfloat16, gradients in
bfloat16 within 5e-3 (2 rows of 128, 2048 ids, chunks of 32). And they save more than a float32 copy
of the logits (4096 tokens, 32,768 ids, bfloat16, chunks of 512; bytes on the GPU).

float32 holds all of these hundredths, also 1e-8 for chunks: they change no number at all.
``ChunkedDistributedGatherLogprob``, which has several labels for each token, has no counterpart.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dense_losses
from fused_losses import linear_logprobs, vocab_parallel_logprobs
from lossgate.observe import MemoryWatch
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.published.comparison import assert_agrees

MakeWorld = Callable[..., SimulatedWorld]

PUBLISHED = 1e-4


def example(rows: int, length: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Makes logits ``[rows, length, vocab]`` and labels ``[rows, length]``."""
    generator = torch.Generator().manual_seed(42)
    logits = torch.randn(rows, length, vocab, generator=generator).to(dtype)
    return logits, torch.randint(vocab, (rows, length), generator=generator)


def upstreams(labels: Tensor) -> dict[str, Tensor]:
    """Makes upstream gradients: theirs, and one that is not 1."""
    return {
        "ones": torch.ones(labels.shape),
        "any": torch.randn(labels.shape, generator=torch.Generator().manual_seed(44)),
    }


def shard(logits: Tensor, context: RankContext) -> tuple[Tensor, dict[str, Any]]:
    """Returns a rank's columns with gradients, and the arguments that declare them."""
    group, vocab = context.mesh.get_group("tp"), logits.shape[-1] // context.mesh.get_group("tp").size()
    own = logits[..., vocab * group.rank() : vocab * (group.rank() + 1)]
    return own.clone().requires_grad_(), {"vocab_start": vocab * group.rank(), "tp_group": group}


def dense(
    logits: Tensor, labels: Tensor, upstream: Tensor | None = None, output: str = "logprobs", **filter_: Any
) -> tuple[Tensor, Tensor]:
    """Computes an output and the gradient of logits by the dense references in float64."""
    wide = logits.double().requires_grad_()
    flat = wide.flatten(0, -2)
    if output == "entropy":
        found = dense_losses.filtered_token_entropy(flat, **filter_)
    else:
        found = dense_losses.filtered_token_logprobs(flat, labels.flatten(), **filter_)
    found = found.view(labels.shape)
    kept = torch.where(found > -torch.inf, found, 0.0)
    (gradient,) = torch.autograd.grad(kept, wide, torch.ones_like(kept) if upstream is None else upstream.double())
    return found.detach(), gradient


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("upstream", ["ones", "any"])
def test_log_probabilities_and_gradients(make_world: MakeWorld, tp: int, chunk: int | None, upstream: str) -> None:
    """Without gradients and with them, from logits and from hidden states that make them."""
    logits, labels = example(4, 8, 1024)
    given = upstreams(labels)[upstream]
    expected, gradient = dense(logits, labels, given)

    def body(context: RankContext) -> Tensor:
        own, declared = shard(logits, context)
        with torch.no_grad():
            assert_agrees(vocab_parallel_logprobs(own, labels, chunk=chunk, **declared).logprobs, expected, PUBLISHED)
        found = vocab_parallel_logprobs(own, labels, chunk=chunk, **declared).logprobs
        assert_agrees(found, expected, PUBLISHED)
        # These are the same logits: each token's hidden state is its own row of a unit matrix.
        hidden, weight = torch.eye(labels.numel()), own.detach().flatten(0, 1).T.contiguous().requires_grad_()
        fused = linear_logprobs(hidden, weight, labels.flatten(), chunk=chunk, **declared).logprobs
        assert_agrees(fused, expected.flatten(), PUBLISHED)
        (of_weight,) = torch.autograd.grad(fused, weight, given.flatten())
        (of_logits,) = torch.autograd.grad(found, own, given)
        assert_agrees(of_weight.T.reshape(own.shape), of_logits, PUBLISHED)
        return of_logits

    assert_agrees(torch.cat(make_world(f"tp={tp}").run(body), -1), gradient, PUBLISHED)


def test_large_logits_and_labels_of_one_shard(make_world: MakeWorld) -> None:
    """Logits of a hundred, and labels that are all 0, on the first rank."""
    logits, labels = example(2, 3, 64)
    logits = 100 * logits

    def body(context: RankContext) -> None:
        own, declared = shard(logits, context)
        for given in (labels, torch.zeros_like(labels)):
            found = vocab_parallel_logprobs(own, given, **declared).logprobs
            assert found.isfinite().all()
            assert_agrees(found, dense(logits, given)[0], PUBLISHED)

    make_world("tp=2").run(body)


@pytest.mark.parametrize(("tp", "chunk", "gradients"), [(1, 5, True), (2, 4, True), (1, 3, False)])
def test_entropies(make_world: MakeWorld, tp: int, chunk: int, gradients: bool) -> None:
    """Theirs has the opposite sign."""
    logits, labels = example(2, 16, 256)
    given = upstreams(labels)["any"]
    expected, gradient = dense(logits, labels, given, "entropy")

    def body(context: RankContext) -> Tensor | None:
        own, declared = shard(logits, context)
        with torch.set_grad_enabled(gradients):
            found = vocab_parallel_logprobs(own, labels, entropy=True, chunk=chunk, **declared).entropy
        assert found is not None
        assert_agrees(found, expected, PUBLISHED)
        return torch.autograd.grad(found, own, given)[0] if gradients else None

    parts = make_world(f"tp={tp}").run(body)
    if gradients:
        assert_agrees(torch.cat([part for part in parts if part is not None], -1), gradient, PUBLISHED)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (10, 1.0), (None, 0.9), (10, 0.9)])
def test_filtered_log_probabilities(make_world: MakeWorld, top_k: int | None, top_p: float, chunk: int | None) -> None:
    """Labels are random as theirs, so most are filtered out; every second is one that stays."""
    logits, labels = example(4, 16, 256)
    labels[:, ::2] = logits[:, ::2].topk(3).indices[..., 2]
    given = upstreams(labels)["any"]
    expected, gradient = dense(logits, labels, given, top_k=top_k, top_p=top_p)
    assert (expected > -torch.inf).float().mean() >= 0.5

    def body(context: RankContext) -> Tensor:
        own, declared = shard(logits, context)
        found = vocab_parallel_logprobs(own, labels, top_k=top_k, top_p=top_p, unfiltered=True, chunk=chunk, **declared)
        assert_agrees(found.logprobs, expected, PUBLISHED)
        assert found.unfiltered_logprobs is not None
        assert_agrees(found.unfiltered_logprobs, dense(logits, labels)[0], PUBLISHED)
        return torch.autograd.grad(found.logprobs, own, given)[0]

    assert_agrees(torch.cat(make_world("tp=2").run(body), -1), gradient, PUBLISHED)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(make_world: MakeWorld, tp: int, dtype: torch.dtype) -> None:
    """Not even the gradient in bfloat16, of which theirs expects 5e-3."""
    logits, labels = example(2, 128, 2048, dtype)

    def body(context: RankContext) -> None:
        def run(chunk: int | None) -> tuple[Tensor, Tensor]:
            own, declared = shard(logits, context)
            found = vocab_parallel_logprobs(own, labels, chunk=chunk, **declared).logprobs
            return found, torch.autograd.grad(found.sum(), own)[0].float()

        whole, cut = run(None), run(32)
        assert_agrees(cut, whole, 1e-6)
        assert whole[1].abs().max() > 0

    make_world(f"tp={tp}").run(body)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("gradients", [True, False])
def test_chunks_save_more_than_a_float32_copy_of_the_logits(make_world: MakeWorld, tp: int, gradients: bool) -> None:
    """An eighth of their tokens and of their ids; bytes that live at a time, counted on the CPU.

    Without chunks all logits of a rank fit the default chunk here.
    """
    tokens, vocab = 4096 // 8, 32_768 // 8
    logits, labels = example(1, tokens, vocab, torch.bfloat16)
    wide = tokens * vocab // tp * 4

    def body(context: RankContext) -> list[int]:
        def peak(chunk: int | None) -> int:
            own, declared = shard(logits, context)
            own.requires_grad_(gradients)
            # Ranks take turns in one process, and each observer sees what its own thread makes.
            with MemoryWatch() as made:
                found = vocab_parallel_logprobs(own, labels, chunk=chunk, **declared).logprobs
                if gradients:
                    found.sum().backward()
            return made.peak_bytes

        return [peak(None), peak(512 // 8)]

    for whole, cut in make_world(f"tp={tp}").run(body):
        assert whole - cut > wide
