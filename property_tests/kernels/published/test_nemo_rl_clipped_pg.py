# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's published tests of its clipped policy gradient, made again from their description.

There (NVIDIA-NeMo/RL, tests/unit/algorithms/test_loss_functions.py, ``test_clipped_pg_loss_*`` and
``test_calculate_kl*``), logits ``[1, 4, 8]`` are made so that labels have chosen log-probabilities,
and losses are compared with calculations by hand, within 1e-3 of their size, on a GPU. Old
log-probabilities are -1, ratios 0.5, 1 and 1.5, and advantages 1, -1 and 2. Gradients are compared
for the score term of the KL alone.

Here the fused and the unfused path, the dense reference and the calculations by hand agree: in
float32 at the hundredth, 1e-5, and in float64. So do gradients of logits and all metrics.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import dense_losses
from fused_losses import ClippedPGConfig, clipped_pg_loss
from lossgate.losses.clipped_pg import ClippedPgOptions
from property_tests.kernels.published.clipped_pg_by_hand import CASES, GSPO, Case, Rows, kl, truncated
from property_tests.kernels.published.comparison import assert_agrees
from property_tests.kernels.published.exact_logits import (
    DTYPES,
    PATHS,
    PUBLISHED,
    VOCAB,
    exact_logits,
    ids_of,
    logprobs_by,
)


def clipped_pg_by(path: str, logprobs: Tensor, config: dict[str, Any], **given: Any) -> tuple[Tensor, Any]:
    if path == "dense":
        counts = {name: torch.tensor(given.pop(name)) for name in ("valid_tokens", "valid_sequences")}
        given |= {name: given[name].bool() for name in ("mask", "sample_mask")}
        options = ClippedPgOptions(**config)
        return dense_losses.clipped_pg(logprobs=logprobs, **given, **counts, options=options)
    return clipped_pg_loss(logprobs, **given, config=ClippedPGConfig(**config))


def arguments(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of the loss, ``[B 3]`` each; masks are numbers, as theirs."""
    rows = len(case.current)
    others: dict[str, Rows | None] = {
        "advantages": case.advantages,
        "prev_logprobs": case.old,
        "generation_logprobs": case.generation,
        "reference_logprobs": case.reference,
    }
    return {
        **{name: torch.tensor(x or [[0.0] * 3] * rows, dtype=dtype).flatten() for name, x in others.items()},
        "mask": torch.ones(3 * rows, dtype=torch.long),
        "sequence": torch.arange(rows).repeat_interleave(3),
        "sample_mask": torch.ones(rows, dtype=torch.long),
        "valid_tokens": 3 * rows,
        "valid_sequences": rows,
    }


def config_of(case: Case) -> dict[str, Any]:
    return {**kl(0.0), **case.config} if case.no_kl else case.config


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_clipped_pg_is_as_by_hand(name: str, path: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    ids = ids_of(len(case.current))
    logits = exact_logits(torch.tensor(case.current, dtype=dtype), ids).requires_grad_()
    loss, metrics = clipped_pg_by(path, logprobs_by(path, logits, ids), config_of(case), **arguments(case, dtype))
    expected = {"loss": case.loss, **case.metrics}
    found = {"loss": loss, **{metric: metrics[metric] for metric in case.metrics}}
    assert_agrees(found, {name: torch.tensor(x, dtype=torch.float64) for name, x in expected.items()}, PUBLISHED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["fused", "unfused"])
@pytest.mark.parametrize("name", [name for name in CASES if "-inf" not in name])  # Its metrics are NaN.
def test_clipped_pg_has_the_gradients_and_metrics_of_its_reference(name: str, path: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    ids = ids_of(len(case.current))
    results = []
    for how, own in ((path, dtype), ("dense", torch.float64)):
        logits = exact_logits(torch.tensor(case.current, dtype=own), ids).requires_grad_()
        loss, metrics = clipped_pg_by(how, logprobs_by(how, logits, ids), config_of(case), **arguments(case, own))
        (gradient,) = torch.autograd.grad(-3 * loss, logits)
        results.append((loss, gradient, {metric: x for metric, x in metrics.items() if metric != "loss"}))
    assert_agrees(*results, PUBLISHED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("approximation", [False, True])
def test_the_kl_has_the_gradient_of_its_score_term(approximation: bool, path: str, dtype: torch.dtype) -> None:
    """The gradient with the penalty less that without it, by hand.

    With d = log q - log p, that of each token is beta w (k3(d) + 1 - exp(d)) / 2 = -beta w d / 2.
    """
    current = torch.tensor([-1.2, -0.7], dtype=dtype).requires_grad_()
    reference, generation = torch.tensor([[-0.9, -1.1], [-1.5, -0.4]], dtype=dtype)
    given: dict[str, Any] = {
        "advantages": torch.tensor([0.4, -0.2], dtype=dtype),
        "prev_logprobs": torch.tensor([-1.0, -0.8], dtype=dtype),
        "generation_logprobs": generation,
        "reference_logprobs": reference,
        "mask": torch.ones(2),
        "sequence": torch.zeros(2, dtype=torch.long),
        "sample_mask": torch.ones(1),
        "valid_tokens": 2,
        "valid_sequences": 1,
    }

    def gradient(beta: float) -> Tensor:
        config = kl(beta, use_on_policy_kl_approximation=approximation)
        return torch.autograd.grad(clipped_pg_by(path, current, config, **given)[0], current)[0]

    d = (reference - current).detach().double()
    weight = (current.detach() - generation).double().exp() if approximation else 1.0
    assert_agrees(gradient(0.3) - gradient(0.0), -0.3 * weight * d / 2, PUBLISHED)


def random_batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """Makes log-probabilities with gradients and the arguments of a loss for ``rows`` rows of 4."""
    generator = torch.Generator().manual_seed(42)
    names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")
    fields = {name: 0.1 * torch.randn(rows, 3, generator=generator, dtype=torch.float64) for name in names}
    fields["advantages"] += 1
    logits = torch.randn(rows, 4, VOCAB, generator=generator, dtype=torch.float64)
    logprobs = logprobs_by("unfused", logits.to(dtype), ids_of(rows)).requires_grad_()
    given: dict[str, Any] = {name: x.flatten().to(dtype) for name, x in fields.items()}
    given |= {"mask": torch.ones(3 * rows), "sequence": torch.arange(rows).repeat_interleave(3)}
    return logprobs, {**given, "sample_mask": torch.ones(rows), "valid_tokens": 3 * rows, "valid_sequences": rows}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["fused", "dense"])
def test_masks(path: str, dtype: torch.dtype) -> None:
    """A masked token changes the loss, and a masked sequence counts as little as an absent one."""
    logprobs, both = random_batch(2, dtype)
    loss = clipped_pg_by(path, logprobs, kl(0.1), **both)[0]
    fewer = {**both, "mask": torch.tensor([0.0, 1, 1, 1, 1, 1]), "valid_tokens": 5}
    assert (clipped_pg_by(path, logprobs, kl(0.1), **fewer)[0] - loss).abs() > 1e-4
    one = {name: x[: len(x) // 2] if isinstance(x, Tensor) else x // 2 for name, x in both.items()}
    masked = {**both, "sample_mask": torch.tensor([1.0, 0.0]), "valid_tokens": 3, "valid_sequences": 1}
    alone, with_other = (
        clipped_pg_by(path, x, kl(0.1), **given)[0] for x, given in ((logprobs[:3], one), (logprobs, masked))
    )
    assert_agrees(with_other, alone, PUBLISHED)
    assert_agrees(*(torch.autograd.grad(x, logprobs)[0] for x in (with_other, alone)), PUBLISHED)


@pytest.mark.parametrize("path", ["fused", "dense"])
def test_without_tokens_the_loss_is_zero(path: str) -> None:
    logprobs, given = random_batch(1, torch.float32)
    loss, _ = clipped_pg_by(path, logprobs, kl(0.1), **{**given, "mask": torch.zeros(3), "valid_tokens": 0})
    assert loss == 0
    assert not torch.autograd.grad(loss, logprobs)[0].any()


@pytest.mark.parametrize(
    "config",
    [
        {"use_cispo": True, "disable_ppo_ratio": True},
        {"use_cispo": True, "force_on_policy_ratio": True},
        {"use_cispo": True, "ratio_clip_c": 3.0},
        {"use_cispo": True, **GSPO},
        {"use_cispo": True, "token_level_loss": False},
        *(truncated(kind, 1.0, 2.0) for kind in ("tis", "icepop", "seq-mask-tis")),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any]) -> None:
    for make in (ClippedPGConfig, ClippedPgOptions):
        with pytest.raises(ValueError, match=r"expected|leave .* out"):
            make(**config)
