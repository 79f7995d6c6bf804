# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's published tests of its NLL and DPO losses, made again from their description.

There (NVIDIA-NeMo/RL, tests/unit/algorithms/test_loss_functions.py), sure predictions of 8 ids have
an NLL of 0 or 999; DPO is computed of uniform logits or with beta 0, for one pair and for two of
several lengths; and its SFT term is the NLL of chosen sequences. Where no tolerance is given, that
of clipped PG's tests there is taken, 1e-3. So the preference term is never seen: with beta 0.1 and
references that matter it is added here, by hand, with gradients.

float32 holds the hundredth, 1e-5; float64 is tried too.
"""

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

import dense_losses
from fused_losses import dpo_loss, linear_cross_entropy, vocab_parallel_cross_entropy, vocab_parallel_logprobs
from lossgate.losses.dpo import DpoOptions
from property_tests.kernels.published.comparison import assert_agrees
from property_tests.kernels.published.exact_logits import (
    DTYPES,
    PATHS,
    PUBLISHED,
    VOCAB,
    exact_logits,
    ids_of,
    logprobs_by,
    mean,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("of_label", "expected"), [(0, 0.0), (-999.0, 999.0)])
def test_nll_of_sure_predictions(of_label: float, expected: float, path: str, dtype: torch.dtype) -> None:
    """A token is predicted with certainty, rightly or wrongly; two of three count."""
    ids = torch.arange(4)[None]
    logits = torch.zeros(1, 4, VOCAB, dtype=dtype)
    right_or_wrong = ids[:, 1:] if of_label == 0 else ids[:, :-1]
    logits[:, :-1].scatter_(2, right_or_wrong[..., None], 999.0)
    rows, labels, mask = logits[0, :-1], ids[0, 1:], torch.tensor([False, True, True])
    given: dict[str, Any] = {"mask": mask, "valid_tokens": 2}
    if path == "fused":
        found = linear_cross_entropy(rows, torch.eye(VOCAB, dtype=dtype), labels, **given)
    elif path == "unfused":
        found = vocab_parallel_cross_entropy(rows, labels, **given)
    else:
        found = dense_losses.nll(dense_losses.token_logprobs(rows, labels), mask, torch.tensor(2))
    assert_agrees(found, torch.tensor(expected, dtype=torch.float64), PUBLISHED)


def dpo_by(path: str, logprobs: Tensor, mask: Tensor, reference: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """Computes DPO on log-probabilities of rows, flat, with a mask ``[B, S - 1]`` of numbers."""
    rows = len(mask)
    given: dict[str, Any] = {
        "reference_logprobs": reference.flatten().to(logprobs.dtype),
        "sequence": torch.arange(rows).repeat_interleave(mask.shape[1]),
    }
    if path != "dense":
        where = {"mask": mask.flatten(), "sample_mask": torch.ones(rows), "valid_sequences": rows}
        return dpo_loss(logprobs, **given, **where, **options)
    return dense_losses.dpo(
        logprobs=logprobs,
        **given,
        mask=mask.flatten().bool(),
        sample_mask=torch.ones(rows, dtype=torch.bool),
        valid_sequences=torch.tensor(rows),
        options=DpoOptions(**options),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sft", [0.0, 0.5])
def test_dpo_of_uniform_logits(sft: float, path: str, dtype: torch.dtype) -> None:
    """One pair, 16 ids, beta 0: log 2, and log 16 for each of the two trained tokens."""
    ids = torch.arange(8).view(2, 4)
    logprobs = dense_losses.token_logprobs(torch.zeros(6, 16, dtype=dtype), ids[:, 1:].flatten())
    if path != "dense":
        logprobs = vocab_parallel_logprobs(torch.zeros(6, 16, dtype=dtype), ids[:, 1:].flatten()).logprobs
    mask = torch.tensor([[0, 1, 1], [0, 1, 1]])
    options = {"reference_policy_kl_penalty": 0.0, "sft_loss_weight": sft}
    loss, _ = dpo_by(path, logprobs, mask, torch.zeros(2, 3), **options)
    assert_agrees(loss, torch.tensor(log(2) + sft * 2 * log(16), dtype=torch.float64), PUBLISHED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["fused", "dense"])
@pytest.mark.parametrize("average", [False, True])
def test_dpo_of_sequences_of_several_lengths(average: bool, path: str, dtype: torch.dtype) -> None:
    """Lengths 3, 5, 4 and 6; uniform over 10 ids. Chosen sequences have 2 and 3 labels."""
    lengths = torch.tensor([3, 5, 4, 6])
    mask = (torch.arange(1, 6) < lengths[:, None]).float()
    options: dict[str, Any] = {
        "reference_policy_kl_penalty": 0.1,
        "sft_loss_weight": 0.5,
        "preference_average_log_probs": average,
        "sft_average_log_probs": average,
    }
    logprobs = torch.full((20,), -log(10), dtype=dtype)
    loss, metrics = dpo_by(path, logprobs, mask, torch.zeros(4, 5), **options)
    sft = log(10) * (1 if average else mean(2, 3))
    # Each rejected sequence has two labels more than its chosen one.
    preference = log(2) if average else log(1 + exp(-0.1 * 2 * log(10)))
    found = {"loss": loss, "sft_loss": metrics["sft_loss"], "preference_loss": metrics["preference_loss"]}
    expected = {"loss": 0.5 * sft + preference, "sft_loss": sft, "preference_loss": preference}
    assert_agrees(found, {name: torch.tensor(x, dtype=torch.float64) for name, x in expected.items()}, PUBLISHED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_the_sft_term_of_dpo_is_the_nll_of_chosen_sequences(path: str, dtype: torch.dtype) -> None:
    """Without the preference term, and for the counts that divide."""
    logits = torch.randn(4, 5, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]])
    logprobs = logprobs_by(path, logits, ids_of(4, 5))
    options = {"reference_policy_kl_penalty": 0.0, "preference_loss_weight": 0.0, "sft_loss_weight": 1.0}
    loss, _ = dpo_by(path, logprobs, mask, torch.randn(4, 4), **options)
    tokens = mask[0::2].sum()
    nll = dense_losses.nll(logprobs.view(4, 4)[0::2].flatten(), mask[0::2].flatten().bool(), tokens)
    assert_agrees(loss * 2 / tokens, nll, PUBLISHED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_dpo_with_a_preference_is_as_by_hand(path: str, dtype: torch.dtype) -> None:
    """beta 0.1 and references that matter, which theirs leave out; and gradients.

    The rewards are 0.3 + 0.4 and -0.2 + 0.1, so that the margin is 0.8.
    """
    rewards = torch.tensor([[9.0, 0.3, 0.4], [9.0, -0.2, 0.1]], dtype=dtype)
    logits = exact_logits(torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.5, -1.0]], dtype=dtype), ids_of(2))
    logprobs = logprobs_by(path, logits, ids_of(2)).requires_grad_()
    reference, mask = logprobs.detach().view(2, 3) - rewards, torch.tensor([[0, 1, 1]] * 2)
    loss, metrics = dpo_by(path, logprobs, mask, reference, reference_policy_kl_penalty=0.1)
    expected = {"loss": log(1 + exp(-0.08)), "accuracy": 1.0, "rewards_chosen_mean": 0.7, "rewards_rejected_mean": -0.1}
    found = {"loss": loss, **{name: metrics[name] for name in list(expected)[1:]}}
    assert_agrees(found, {name: torch.tensor(x, dtype=torch.float64) for name, x in expected.items()}, PUBLISHED)
    of_each = 0.1 / (1 + exp(0.08))
    by_hand = torch.tensor([0, -of_each, -of_each, 0, of_each, of_each], dtype=torch.float64)
    assert_agrees(torch.autograd.grad(-3 * loss, logprobs)[0], -3 * by_hand, PUBLISHED)
