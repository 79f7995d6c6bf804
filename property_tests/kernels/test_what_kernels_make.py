# SPDX-License-Identifier: Apache-2.0
"""Tests of the memory and the communication of kernels.

No kernel makes a tensor of tokens x vocabulary, in any branch, and peak memory does not grow with
both. Kernels call the collectives that they document.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fused_losses import (
    ClippedPGConfig,
    Metrics,
    Pack,
    RhoCorrection,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    linear_sft_loss,
    tiled_grpo_loss,
    tiled_loss,
    tiled_token_logprobs,
)
from lossgate.observe import MemoryWatch
from lossgate.worlds import RankContext, SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

WIDTH, VOCAB, CHUNK = 8, 1024, 6


class Batch:
    """Tokens in four sequences, with the inputs of every loss."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
        self.weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
        self.bias = torch.randn(VOCAB, generator=generator).requires_grad_()
        self.labels = torch.randint(VOCAB, (tokens,), generator=generator)
        self.mask = torch.rand(tokens, generator=generator) < 0.8
        self.sequence = torch.arange(tokens) * 4 // tokens
        self.sample_mask = torch.ones(4, dtype=torch.bool)
        self.other = -torch.rand(tokens, generator=generator)

    @property
    def head(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.labels

    def logprobs(self, **options: Any) -> Tensor:
        return linear_logprobs(*self.head, chunk=CHUNK, **options).logprobs


def _with_entropy(batch: Batch) -> Tensor:
    found = linear_logprobs(
        *batch.head, bias=batch.bias, softcap=5.0, temperature=0.7, entropy=True, logit_range=True, chunk=CHUNK
    )
    assert found.entropy is not None
    return (found.logprobs + found.entropy).sum()


def _half(batch: Batch) -> Tensor:
    return linear_cross_entropy(batch.hidden.bfloat16(), batch.weight.bfloat16(), batch.labels, chunk=CHUNK)


def _frozen(batch: Batch) -> Tensor:
    return linear_cross_entropy(batch.hidden, batch.weight.detach(), batch.labels, chunk=CHUNK)


def _sft(batch: Batch) -> Tensor:
    given: dict[str, Any] = {
        "mask": batch.mask,
        "real": batch.mask,
        "sequence": batch.sequence,
        "sequences": 4,
        "valid_tokens": 10**6,
    }
    return linear_sft_loss(*batch.head, chunk=CHUNK, **given)[0]


def _dpo(batch: Batch) -> Tensor:
    with torch.no_grad():
        reference = batch.logprobs()
    return dpo_loss(
        batch.logprobs(),
        reference,
        mask=batch.mask,
        sequence=batch.sequence,
        sample_mask=batch.sample_mask,
        valid_sequences=4,
        sft_loss_weight=1.0,
    )[0]


def _grpo(batch: Batch, logprobs: Tensor) -> Tensor:
    return grpo_loss(
        logprobs, advantages=batch.other, mask=batch.mask, valid_tokens=10**6, reference_logprobs=batch.other
    )[0]


def _tiled_grpo(batch: Batch) -> Tensor:
    head = nn.Linear(WIDTH, VOCAB)
    tiles = -(-len(batch.labels) // CHUNK)
    with torch.no_grad():  # This is the pass for old log-probabilities.
        tiled_token_logprobs(head, batch.hidden, batch.labels, tiles=tiles)
    return _grpo(batch, tiled_token_logprobs(head, batch.hidden, batch.labels, tiles=tiles).logprobs)


def _tiled_grpo_in_one_pass(batch: Batch) -> Tensor:
    given: dict[str, Any] = {"advantages": batch.other, "mask": batch.mask, "reference_logprobs": batch.other}
    head, tiles = nn.Linear(WIDTH, VOCAB), -(-len(batch.labels) // CHUNK)
    return tiled_grpo_loss(head, batch.hidden, batch.labels, tiles=tiles, valid_tokens=10**6, **given)[0]


def _clipped_pg(batch: Batch) -> Tensor:
    config = ClippedPGConfig(token_level_loss=False, sequence_level_importance_ratios=True)
    others = dict.fromkeys(("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages"), batch.other)
    where: dict[str, Any] = {"mask": batch.mask, "sequence": batch.sequence, "sample_mask": batch.sample_mask}
    return clipped_pg_loss(batch.logprobs(), **others, **where, valid_tokens=10**6, valid_sequences=4, config=config)[0]


PROGRAMS: dict[str, Callable[[Batch], Tensor]] = {
    "linear_cross_entropy": lambda batch: linear_cross_entropy(*batch.head, bias=batch.bias, chunk=CHUNK),
    "linear_cross_entropy, by default": lambda batch: linear_cross_entropy(*batch.head, bias=batch.bias),
    "linear_cross_entropy, bfloat16": _half,
    "linear_cross_entropy, frozen weight": _frozen,
    "linear_logprobs": lambda batch: batch.logprobs().sum(),
    "linear_logprobs, all statistics": _with_entropy,
    "linear_sft_loss": _sft,
    "dpo_loss": _dpo,
    "grpo_loss": lambda batch: _grpo(batch, batch.logprobs()),
    "grpo_loss, tiled": _tiled_grpo,
    "tiled_grpo_loss": _tiled_grpo_in_one_pass,
    "clipped_pg_loss": _clipped_pg,
}


def run(program: Callable[[Batch], Tensor], tokens: int) -> MemoryWatch:
    batch = Batch(tokens)
    with MemoryWatch() as made:
        program(batch).backward()
    return made


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_logits_never_exist(name: str) -> None:
    """No tensor exceeds a chunk of logits or the weight.

    A loop over chunks under ordinary autograd would save every chunk of logits. The passes of other
    policies are included, since open-instruct's once made all logits (O8 in losses.md).
    """
    tokens = 160
    chunk = 64 if "default" in name else CHUNK
    assert max(run(PROGRAMS[name], tokens).sizes) <= max(VOCAB * WIDTH, chunk * VOCAB)


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_at_the_peak_grows_with_tokens_x_hidden_alone(name: str) -> None:
    """Each token costs at most 4 tensors of its width and 50 numbers of its own.

    That is less than a tenth of its row of logits.
    """
    few, many = 120, 360
    assert (run(PROGRAMS[name], many).peak_bytes - run(PROGRAMS[name], few).peak_bytes) / (many - few) < 4 * (
        4 * WIDTH + 50
    )


def test_the_observer_sees_dense_logits() -> None:
    def dense(batch: Batch) -> Tensor:
        return F.cross_entropy(batch.hidden @ batch.weight.T, batch.labels)

    few, many = run(dense, 120), run(dense, 360)
    assert max(few.sizes) == 120 * VOCAB
    assert (many.peak_bytes - few.peak_bytes) / 240 >= 4 * VOCAB


@pytest.mark.parametrize(
    "name",
    ["linear_logprobs", "linear_logprobs, all statistics", "linear_sft_loss", "grpo_loss, tiled", "tiled_grpo_loss"],
)
def test_no_saved_tensor_but_the_head_grows_with_the_vocabulary(name: str) -> None:
    batch, saved = Batch(160), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        PROGRAMS[name](batch)
    assert max(t.numel() for t in saved) <= VOCAB * WIDTH
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if t.numel() < 160 * WIDTH}
    assert sum(own.values()) <= 160 * 8 * 20  # That is 20 numbers of 8 bytes for each token.


def _forward(kernel: str, head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    if kernel == "tiled_token_logprobs":
        return tiled_token_logprobs(head, hidden, labels).logprobs.sum()
    return tiled_loss(head, hidden, labels, lambda values, _: (values.logprobs.sum(), Metrics()))[0]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "vocab"), [(1024, 4096), (64, 32768)], ids=["wide", "narrow"])
@pytest.mark.parametrize("kernel", ["tiled_token_logprobs", "tiled_loss"])
def test_a_tiled_head_takes_the_bytes_of_its_docstring(kernel: str, width: int, vocab: int, dtype: torch.dtype) -> None:
    """A tile has 256 tokens. The gradient of a wide head is larger than its logits, as usual."""
    tokens, tile = 512, 256
    head = nn.Linear(width, vocab, bias=False, dtype=dtype)
    hidden, labels = torch.ones(tokens, width, dtype=dtype).requires_grad_(), torch.zeros(tokens, dtype=torch.long)
    half = dtype != torch.float32
    logits, copies = tile * vocab * dtype.itemsize, min(tile * vocab, 1 << 22) * (8 if half else 4)
    sums, of_tile = 4 * vocab * width, vocab * width * dtype.itemsize + half * 4 * vocab * width // 16
    of_hidden = tokens * width * (4 if dtype == torch.float16 and kernel == "tiled_loss" else dtype.itemsize)
    expected = sums + of_hidden + max(2 * logits + copies, logits + of_tile)
    with MemoryWatch() as made:
        _forward(kernel, head, hidden, labels).backward()
    # The observer takes the weight and hidden states for new where they are detached.
    found = made.peak_bytes - vocab * width * dtype.itemsize - tokens * width * dtype.itemsize
    assert 0.9 * expected < found < expected + 3 * tile * width * dtype.itemsize + 20 * 8 * tokens


def _sequence_grpo(batch: Batch, logprobs: Tensor, cp_group: Any) -> Tensor:
    rho = RhoCorrection(rho_mask_sequence_level=True)
    given: dict[str, Any] = {
        "advantages": batch.other,
        "mask": batch.mask,
        "valid_tokens": 10**6,
        "beta": 0.0,
        "vllm_logprobs": batch.other,
    }
    return grpo_loss(logprobs, **given, rho=rho, sequence=batch.sequence, sequences=4, cp_group=cp_group)[0]


def _where(batch: Batch) -> dict[str, Any]:
    return {"mask": batch.mask, "sequence": batch.sequence}


OVER_CP: dict[str, tuple[Callable[[Batch, Tensor, Any], Tensor], list[str]]] = {
    "dpo_loss": (
        lambda b, logprobs, group: dpo_loss(
            logprobs, b.other, **_where(b), sample_mask=b.sample_mask, valid_sequences=4, cp_group=group
        )[0],
        ["all_reduce SUM, [float32[3, 4]]"],
    ),
    "grpo_loss, rho of sequences": (_sequence_grpo, ["all_reduce SUM, [float32[3, 4]]"]),
    "clipped_pg_loss, GSPO": (
        lambda b, logprobs, group: clipped_pg_loss(
            logprobs,
            **dict.fromkeys(("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages"), b.other),
            **_where(b),
            sample_mask=b.sample_mask,
            valid_tokens=10**6,
            valid_sequences=4,
            config=ClippedPGConfig(token_level_loss=False, sequence_level_importance_ratios=True),
            cp_group=group,
        )[0],
        ["all_reduce SUM, [float32[5, 4]]", "all_reduce SUM, [float32[5, 4]]"],  # The second is in backward.
    ),
    "Pack.gather": (
        lambda _, logprobs, group: Pack.of(torch.tensor([0, 32]), cp_group=group).gather(logprobs, group).sum(),
        ["all_gather float32[16]"],
    ),
}


@pytest.mark.parametrize("name", OVER_CP)
def test_collectives_over_cp(make_world: MakeWorld, name: str) -> None:
    loss, expected = OVER_CP[name]

    def body(context: RankContext) -> None:
        batch = Batch(16)
        loss(batch, batch.other.clone().requires_grad_(), context.mesh.get_group("cp")).backward()

    world = make_world("cp=2")
    world.run(body)
    sent = [f"{logged.collective} {logged.shown}" for logged in world.log if logged.rank == 0]
    assert [entry.split(" -> ")[0] for entry in sent] == expected


def test_collectives_over_tp(make_world: MakeWorld) -> None:
    """Log-probabilities with all statistics send 2 T, 4 T and T H numbers, for any chunk size."""

    def body(context: RankContext) -> None:
        batch, group = Batch(16), context.mesh.get_group("tp")
        weight = batch.weight[512 * group.rank() :][:512]
        given: dict[str, Any] = {
            "entropy": True,
            "logit_range": True,
            "vocab_start": 512 * group.rank(),
            "tp_group": group,
            "chunk": 3,
        }
        linear_logprobs(batch.hidden, weight, batch.labels, **given).logprobs.sum().backward()

    world = make_world("tp=2")
    world.run(body)
    sent = [(logged.shown, logged.bytes) for logged in world.log if logged.rank == 0]
    assert sent == [("MAX, [float32[2, 16]]", 128), ("SUM, [float32[4, 16]]", 256), ("SUM, [float32[16, 8]]", 512)]
