# SPDX-License-Identifier: Apache-2.0
"""The ways to a loss through an lm-head: ours, and the dense one that they are compared with."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distributed_tests.wrappers.model import Batch
from fused_losses import (
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    linear_sft_loss,
    run_in_forward,
    tiled_grpo_loss,
    tiled_token_logprobs,
)

Metrics = Mapping[str, Tensor]
Way = Callable[[nn.Module, Tensor, Batch, int], tuple[Tensor, Metrics]]
"""From the lm-head, hidden states ``[tokens, WIDTH]``, a batch and the number of tokens of all
ranks and microbatches to this rank's part of the loss and of the metrics.
"""

TILES = 3


def grpo(logprobs: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    """Computes the loss from log-probabilities, with the policy itself as the old policy."""
    mask = torch.ones_like(batch.labels, dtype=torch.bool)
    return grpo_loss(logprobs, advantages=batch.advantages, mask=mask, valid_tokens=tokens, beta=0.0)


def dense_logprobs(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1)


def dense(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    """Forms the logits."""
    return grpo(dense_logprobs(head, hidden, batch.labels), batch, tokens)


def dense_nll(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    """Forms the logits."""
    return -dense_logprobs(head, hidden, batch.labels).sum() / tokens, _counts(batch)


def _counts(batch: Batch) -> Metrics:
    own = torch.tensor(float(len(batch.labels)))
    return {"n_tokens": own, "n_valid_tokens": own}


def tiled(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    logprobs = tiled_token_logprobs(head, hidden, batch.labels, tiles=TILES).logprobs
    return grpo(logprobs, batch, tokens)


def one_pass(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    mask = torch.ones_like(batch.labels, dtype=torch.bool)
    given: dict[str, Any] = {"advantages": batch.advantages, "mask": mask, "valid_tokens": tokens, "beta": 0.0}
    return tiled_grpo_loss(head, hidden, batch.labels, tiles=TILES, **given)


def weight_of(head: nn.Module) -> Tensor:
    """Returns the weight of a head inside its wrappers, with its adapters."""
    if hasattr(head, "get_delta_weight"):
        return head.base_layer.weight + head.get_delta_weight("default")
    return head.weight


def linear(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    def logprobs(head: nn.Module, hidden: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight_of(head), batch.labels, chunk=8).logprobs

    return grpo(run_in_forward(head, logprobs, hidden), batch, tokens)


def cross_entropy(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    def loss(head: nn.Module, hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight_of(head), batch.labels, valid_tokens=tokens, chunk=8)

    return run_in_forward(head, loss, hidden), _counts(batch)


def sft(head: nn.Module, hidden: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Metrics]:
    every, statistics = torch.ones_like(batch.labels, dtype=torch.bool), []

    def loss(head: nn.Module, hidden: Tensor) -> Tensor:
        value, found = linear_sft_loss(
            hidden,
            weight_of(head),
            batch.labels,
            mask=every,
            real=every,
            sequence=torch.zeros_like(batch.labels),
            sequences=1,
            valid_tokens=tokens,
            chunk=8,
        )
        statistics.append(found)
        return value

    value = run_in_forward(head, loss, hidden)
    return value, {name: statistics[0][name] for name in ("n_tokens", "n_valid_tokens")}


WAYS: dict[str, Way] = {
    "tiled_token_logprobs": tiled,
    "tiled_grpo_loss": one_pass,
    "linear_logprobs": linear,
    "linear_cross_entropy": cross_entropy,
    "linear_sft_loss": sft,
    "dense": dense,
    "dense NLL": dense_nll,
}

DENSE_OF = {name: "dense" if way in (tiled, one_pass, linear, dense) else "dense NLL" for name, way in WAYS.items()}
"""The dense way to the same loss."""
