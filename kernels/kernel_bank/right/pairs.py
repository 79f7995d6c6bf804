# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs of a chosen and a rejected response: spec ``dpo``."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_bank.right.formats import COARSE_LOGITS, COARSE_LOSS, DOUBLE, FINE, LOW_LOSS, TRAINED, Formats
from kernel_bank.right.kernel import Batch, Call, by_index_add, declared
from kernel_bank.right.logprobs import Way, cross_entropy, log_softmax, online, parallel_shifted, row_by_row
from kernel_bank.right.sigmoids import (
    Sigmoid,
    by_binary_cross_entropy,
    by_log1p,
    by_logaddexp,
    by_logsigmoid,
    by_softplus,
)
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.declaration.supports import ANY

Sums = Callable[[Tensor, Batch], Tensor]
"""``(values of tokens, 0 where nothing is trained; batch) -> their sum in each sequence``."""


def by_slices(x: Tensor, batch: Batch) -> Tensor:
    """One sequence after the other."""
    parts = [part.sum()[None] for part in x.split(batch["cu_seqlens_padded"].diff().tolist())]
    return torch.cat([x[:0], *parts[: len(batch["cu_seqlens"]) - 1]])


def by_product(x: Tensor, batch: Batch) -> Tensor:
    """A product with the one-hot numbers of the sequences."""
    sequences = torch.arange(len(batch["cu_seqlens"]) - 1, device=x.device)
    return x @ (batch["sequence"][:, None] == sequences).to(x.dtype)


def dpo_loss(logprobs: Tensor, batch: Batch, options: Any, sums: Sums, sigmoid: Sigmoid, *, joined: bool) -> Tensor:
    """Returns the loss of DPO or IPO with its SFT term.

    Args:
        logprobs: of the labels.
        batch: the batch.
        options: those of spec ``dpo``.
        sums: adds the values of each sequence up.
        sigmoid: -log sigmoid.
        joined: whether policy and reference are subtracted token by token, and not their sums.
    """
    mask = batch["mask"]
    tokens = sums(mask.to(logprobs.dtype), batch).clamp(min=1)
    policy, reference = (torch.where(mask, x, 0.0) for x in (logprobs, batch["reference_logprobs"]))
    policies = sums(policy, batch)
    rewards = sums(policy - reference, batch) if joined else policies - sums(reference, batch)
    rewards = rewards / tokens if options.preference_average_log_probs else rewards
    margin, beta = rewards[0::2] - rewards[1::2], options.reference_policy_kl_penalty
    losses = (margin - 1 / (2 * beta)).square() if options.loss_type == "ipo" else sigmoid(beta * margin)
    losses = options.preference_loss_weight * losses
    if options.sft_loss_weight:
        likelihoods = policies / tokens if options.sft_average_log_probs else policies
        losses = losses - options.sft_loss_weight * likelihoods[0::2]
    counted = losses[batch["sample_mask"][0::2]]
    return counted.sum() / (batch["valid_sequences"].clamp(min=1) / 2).to(counted.dtype)


_SUPPORTS: Mapping[str, Any] = dict.fromkeys(
    (
        "reference_policy_kl_penalty",
        "preference_loss_weight",
        "sft_loss_weight",
        "preference_average_log_probs",
        "sft_average_log_probs",
        "loss_type",
    ),
    ANY,
)


def _dpo(
    head: str, way: Way | None, sums: Sums, sigmoid: Sigmoid, formats: Formats, *, joined: bool = False
) -> Candidate:
    def kernel(call: Call) -> Outputs:
        everything = slice(None)
        values = call.leaves[0] if way is None else way(call.scores(everything, call.leaves))
        batch = call.batch(everything)
        loss = dpo_loss(call.to_loss(values), batch, call.options, sums, sigmoid, joined=joined)
        return Outputs(loss=loss)

    name = f"{sums.__name__}_{sigmoid.__name__}" + ("_joined" if joined else "")
    given: dict[str, Any] = {"formats": formats, "axes": ("dp",), "parallel": way is parallel_shifted}
    return declared(name, "dpo", head, kernel, supports=_SUPPORTS, **given)


def _kernels() -> Iterator[Candidate]:
    yield _dpo("hidden", log_softmax, by_index_add, by_logsigmoid, TRAINED)
    yield _dpo("hidden", cross_entropy, by_slices, by_softplus, FINE, joined=True)
    yield _dpo("hidden", online, by_product, by_log1p, FINE)
    yield _dpo("hidden", parallel_shifted, by_index_add, by_logaddexp, TRAINED, joined=True)
    yield _dpo("hidden", cross_entropy, by_slices, by_logsigmoid, COARSE_LOGITS)
    yield _dpo("logits", online, by_product, by_softplus, COARSE_LOSS)
    yield _dpo("logits", parallel_shifted, by_slices, by_logsigmoid, FINE)
    yield _dpo("logits", row_by_row, by_index_add, by_binary_cross_entropy, TRAINED, joined=True)
    yield _dpo("logits", log_softmax, by_slices, by_softplus, LOW_LOSS)
    yield _dpo("logits", log_softmax, by_product, by_logsigmoid, DOUBLE)
    yield _dpo("logprobs", None, by_index_add, by_logsigmoid, FINE)
    yield _dpo("logprobs", None, by_slices, by_log1p, FINE, joined=True)
    yield _dpo("logprobs", None, by_product, by_softplus, FINE)
    yield _dpo("logprobs", None, by_index_add, by_logaddexp, LOW_LOSS, joined=True)


KERNELS = tuple(_kernels())
