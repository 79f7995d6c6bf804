# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's published tests of its "linear CE fusion", made again from their description.

There (NVIDIA-NeMo/RL, tests/unit/models/policy/test_megatron_worker.py, the three
``test_megatron_{sft,dpo,grpo}_linear_ce_fusion_agreement``), a tiny Qwen2 of 151,936 tokens trains
one step with and without the fusion: 8 sequences of 64 tokens (4 pairs for DPO), a mask of the
upper triangle, chunks of 256, float32, two data-parallel ranks. The two losses agree within 1e-2.

Those chunks are longer than the sequences, no gradient is compared, tensor parallelism never runs,
and GRPO's old log-probabilities are near 0 where the policy's are near -12: every ratio is near 0,
and every KL estimate is clamped. All of that is added here. float32 holds the hundredth, 1e-4.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dense_losses
from fused_losses import (
    ClippedPGConfig,
    clipped_pg_loss,
    dpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    vocab_parallel_logprobs,
)
from lossgate.losses.clipped_pg import ClippedPgOptions
from lossgate.losses.dpo import DpoOptions
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.published.comparison import assert_agrees

MakeWorld = Callable[..., SimulatedWorld]

PUBLISHED = 1e-2
VOCAB, B, S, CHUNK = 151_936, 8, 64, 256
WIDTH = 8
DPO: dict[str, Any] = {"reference_policy_kl_penalty": 0.1, "sft_loss_weight": 0.5, "epsilon": 1e-8}
UPSTREAM = {"sft": 0.5, "dpo": -2.0, "grpo": 3.0, "grpo near the old policy": 100.0}
"""The upstream gradient of each loss, none of them 1. One backward serves all losses."""


@cache
def batch() -> dict[str, Tensor]:
    """Makes hidden states ``[S, B, H]`` as in Megatron, the head, ids and fields of rows."""
    generator = torch.Generator().manual_seed(42)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "hidden": normal(S, B, WIDTH),
        "weight": normal(VOCAB, WIDTH) / 2,
        "ids": torch.randint(VOCAB, (B, S), generator=generator),
        "mask": torch.ones(B, S).triu(1),
        "dpo_reference": normal(B, S),
        "advantages": normal(B, S),
        **{name: 0.1 * normal(B, S) for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs")},
    }
    logits = made["hidden"].transpose(0, 1) @ made["weight"].T
    policy = torch.log_softmax(logits[:, :-1], -1).gather(-1, made["ids"][:, 1:, None]).squeeze(-1)
    return made | {"policy": F.pad(policy, (1, 0))}


def near(name: str, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the other policies of a GRPO loss: as published, or near the policy itself."""
    names = ("prev_logprobs", "generation_logprobs", "reference_logprobs")
    offset = rows["policy"] if name != "grpo" else 0
    return {other: rows[other] + offset for other in names}


def losses_of(logprobs: Tensor, rows: dict[str, Tensor], share: int = 1) -> dict[str, Tensor]:
    """Computes all losses by the kernels from log-probabilities ``[B, S - 1]`` of whole sequences.

    Args:
        logprobs: of one rank's rows.
        rows: of the same rows.
        share: how many ranks there are; the counts that divide are those of all of them.
    """
    of_tokens = {name: x[:, 1:].flatten() for name, x in rows.items() if x.shape == rows["ids"].shape}
    flat, count = logprobs.flatten(), batch()["mask"].sum()
    where: dict[str, Any] = {
        "mask": of_tokens["mask"],
        "sequence": torch.arange(len(logprobs)).repeat_interleave(S - 1),
        "sample_mask": torch.ones(len(logprobs)),
    }
    found = {"sft": -torch.where(of_tokens["mask"] > 0, flat, 0.0).sum() / count}
    found["dpo"] = dpo_loss(flat, of_tokens["dpo_reference"], **where, valid_sequences=len(logprobs) * share, **DPO)[0]
    for name in ("grpo", "grpo near the old policy"):
        found[name] = clipped_pg_loss(
            flat,
            **near(name, of_tokens),
            **where,
            advantages=of_tokens["advantages"],
            valid_tokens=count,
            valid_sequences=len(logprobs) * share,
            config=ClippedPGConfig(epsilon=1e-8),
        )[0]
    return found


def weighted(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack([UPSTREAM[name] * loss for name, loss in losses.items()]).sum()


@cache
def reference() -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """Computes the losses by the dense references in float64.

    Returns:
        The losses, the gradients of hidden and weight of their weighted sum, and the gradient of
        each loss with respect to the log-probabilities.
    """
    rows = {name: x.double() if x.is_floating_point() else x for name, x in batch().items()}
    hidden, weight = rows["hidden"].requires_grad_(), rows["weight"].requires_grad_()

    def of_sequence(h: Tensor, y: Tensor) -> Tensor:
        return dense_losses.token_logprobs(dense_losses.linear_logits(h, weight), y)

    # One sequence at a time: the logits of all of them are 0.6 GB in float64.
    parts = [checkpoint(of_sequence, hidden[:-1, b], rows["ids"][b, 1:], use_reentrant=False) for b in range(B)]
    logprobs = torch.cat(parts)  # type: ignore[arg-type]
    of_tokens = {name: x[:, 1:].flatten() for name, x in rows.items() if x.shape == (B, S)}
    mask, count = of_tokens["mask"] > 0, torch.as_tensor(int(batch()["mask"].sum()))
    where: dict[str, Any] = {
        "mask": mask,
        "sequence": torch.arange(B).repeat_interleave(S - 1),
        "sample_mask": torch.ones(B, dtype=torch.bool),
        "valid_sequences": torch.tensor(B),
    }
    found = {"sft": dense_losses.nll(logprobs, mask, count)}
    options = DpoOptions(**DPO)
    found["dpo"] = dense_losses.dpo(
        logprobs=logprobs, reference_logprobs=of_tokens["dpo_reference"], **where, options=options
    )[0]
    for name in ("grpo", "grpo near the old policy"):
        found[name] = dense_losses.clipped_pg(
            logprobs=logprobs,
            **near(name, of_tokens),
            **where,
            advantages=of_tokens["advantages"],
            valid_tokens=count,
            options=ClippedPgOptions(epsilon=1e-8),
        )[0]
    of_logprobs = {name: torch.autograd.grad(loss, logprobs, retain_graph=True)[0] for name, loss in found.items()}
    gradients = list(torch.autograd.grad(weighted(found), [hidden, weight]))
    return {name: loss.detach() for name, loss in found.items()}, gradients, of_logprobs


def leaves(rows: dict[str, Tensor], which: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden ``[S, b, H]`` and weight with gradients, and labels ``[b, S]``."""
    labels = F.pad(rows["ids"][which, 1:], (0, 1), value=-100)
    return rows["hidden"][:, which].clone().requires_grad_(), rows["weight"].clone().requires_grad_(), labels


@pytest.mark.slow
def test_the_unfused_path_agrees() -> None:
    """Logits are formed and the same losses follow, as without the fusion."""
    hidden, weight, labels = leaves(batch())
    found = vocab_parallel_logprobs(hidden @ weight.T, labels, layout="sbh")
    losses = losses_of(found.logprobs[:, :-1], batch())
    expected, gradients, _ = reference()
    assert_agrees(losses, expected, PUBLISHED)
    assert_agrees(torch.autograd.grad(weighted(losses), [hidden, weight]), gradients, PUBLISHED)


@pytest.mark.slow
def test_each_loss_has_the_gradient_of_its_reference() -> None:
    """Gradients with respect to log-probabilities show each loss alone."""
    logprobs = batch()["policy"][:, 1:].clone().requires_grad_()
    for name, loss in losses_of(logprobs, batch()).items():
        (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        assert_agrees(gradient.flatten(), reference()[2][name], PUBLISHED)


@pytest.mark.slow
def test_the_fused_path_agrees_on_two_data_parallel_ranks(make_world: MakeWorld) -> None:
    """As published: each rank has 4 sequences, in one chunk of 256 tokens. Losses add up."""

    def body(context: RankContext) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        which = slice(4 * context.rank, 4 * context.rank + 4)
        hidden, weight, labels = leaves(batch(), which)
        found = linear_logprobs(hidden, weight, labels, layout="sbh", chunk=CHUNK)
        rows = {name: x[which] for name, x in batch().items() if x.shape == (B, S)}
        losses = losses_of(found.logprobs[:, :-1], rows, share=2)
        gradients = torch.autograd.grad(weighted(losses), [hidden, weight])
        return {name: loss.detach() for name, loss in losses.items()}, *gradients

    ranks = make_world("dp=2").run(body)
    expected, (of_hidden, of_weight), _ = reference()
    assert_agrees(
        {name: torch.stack([rank[0][name] for rank in ranks]).sum() for name in expected}, expected, PUBLISHED
    )
    assert_agrees(torch.cat([rank[1] for rank in ranks], 1), of_hidden, PUBLISHED)
    assert_agrees(ranks[0][2] + ranks[1][2], of_weight, PUBLISHED)


@pytest.mark.slow
def test_the_fused_path_agrees_on_two_tensor_parallel_ranks(make_world: MakeWorld) -> None:
    """The vocabulary and the positions are split, and 5 chunks of 100 tokens leave 12 over."""

    def body(context: RankContext) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        hidden, weight, labels = leaves(batch())
        own = slice(VOCAB // 2 * context.rank, VOCAB // 2 * (context.rank + 1))
        part, shard = (x.detach().requires_grad_() for x in (hidden.chunk(2)[context.rank], weight[own]))
        given: dict[str, Any] = {"vocab_start": own.start, "tp_group": context.mesh.get_group("tp")}
        found = linear_logprobs(part, shard, labels, layout="sbh", chunk=100, sequence_parallel=True, **given)
        losses = losses_of(found.logprobs[:, :-1], batch())
        gradients = torch.autograd.grad(weighted(losses), [part, shard])
        return {name: loss.detach() for name, loss in losses.items()}, *gradients

    ranks = make_world("tp=2").run(body)
    expected, gradients, _ = reference()
    for losses, *_ in ranks:
        assert_agrees(losses, expected, PUBLISHED)
    assert_agrees([torch.cat([rank[i] for rank in ranks]) for i in (1, 2)], gradients, PUBLISHED)


def test_the_fused_cross_entropy_agrees() -> None:
    """``linear_cross_entropy`` is SFT in one call; two sequences of the batch, in two chunks."""
    rows = {name: x[:2] for name, x in batch().items() if x.shape == (B, S)}
    hidden, weight, labels = leaves(batch(), slice(2))
    mask, count = F.pad(rows["mask"][:, 1:], (0, 1)), int(rows["mask"].sum())
    loss = linear_cross_entropy(hidden, weight, labels, mask=mask, valid_tokens=count, layout="sbh", chunk=100)
    wide, head = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = dense_losses.linear_logits(wide[:-1].transpose(0, 1).flatten(0, 1), head)
    logprobs = dense_losses.token_logprobs(logits, rows["ids"][:, 1:].flatten())
    expected = dense_losses.nll(logprobs, rows["mask"][:, 1:].flatten() > 0, torch.tensor(count))
    assert_agrees(loss, expected, PUBLISHED)
    gradients = torch.autograd.grad(3 * expected, [wide, head])
    assert_agrees(torch.autograd.grad(3 * loss, [hidden, weight]), gradients, PUBLISHED)
