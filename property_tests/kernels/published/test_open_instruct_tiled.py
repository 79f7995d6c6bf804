# SPDX-License-Identifier: Apache-2.0
"""open-instruct's published tests of its tiled GRPO loss, made again from their description.

There (allenai/open-instruct, open_instruct/test_grpo_utils_tiled_loss.py), loss,
gradients of hidden states and of the head's weight, and the share of clipped tokens agree with a
dense computation within 1e-5, in float32: 2 rows of 5, hidden size 8, 17 ids; DAPO and CISPO, with
and without a reference policy (beta 0.1), 1, 3 and 100 tiles, temperatures 1 and 0.7, with and
without weights of rho, some of them 0; a denominator of 7 and a scale of 3. The four KL estimators
are compared by loss alone, with DAPO, 2 tiles and temperature 1. The helper for log-probabilities
has three cases.

float32 does not hold the hundredth, 1e-7: losses are within 6e-7 of their size there, gradients
within 6e-7 of the largest. So these tests are in float64. Their upstream gradient is 1, and in
every case some token counts; neither is so here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dense_losses
from fused_losses import (
    RhoCorrection,
    flatten_like,
    grpo_loss,
    linear_logprobs,
    tiled_grpo_loss,
    tiled_token_logprobs,
    vocab_parallel_logprobs,
)
from lossgate.losses.grpo import GrpoOptions
from property_tests.kernels.published.comparison import assert_agrees

PUBLISHED = 1e-5
B, T, WIDTH, VOCAB = 2, 5, 8, 17
DENOMINATOR, SCALE, BETA = 7.0, 3, 0.1
UPSTREAM = 8.0
DROPPED, LOWER = 5e-5, 1e-4
"""A rho that is dropped, and the mask bound that drops it; other values of rho are above."""

Fused = Callable[..., tuple[Tensor, Any]]


def example(*, far: bool = True, tokens: int = B * T) -> dict[str, Any]:
    """Makes a batch ``[B, T]`` and the head.

    Args:
        far: whether old log-probabilities are so small that ratios are clipped from above.
        tokens: how many of the tokens may count.
    """
    generator = torch.Generator().manual_seed(1)

    def uniform() -> Tensor:
        return torch.rand(B, T, generator=generator, dtype=torch.float64)

    head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
    nn.init.normal_(head.weight, std=0.3, generator=generator)
    hidden = torch.randn(B, T, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (B, T), generator=generator)
    mask = (uniform() > 0.3) & (torch.arange(B * T).view(B, T) < tokens)
    assert mask.sum() != DENOMINATOR  # It would not be seen whether that is used.
    old = -6 * uniform() - 3 if far else -2 * uniform()
    # Some ratios are near 1, so that they are not clipped.
    near = dense_losses.token_logprobs(head(hidden).flatten(0, 1), labels.flatten()).detach().view(B, T)
    return {
        "head": head,
        "hidden": hidden,
        "labels": labels,
        "mask": mask,
        "advantages": torch.randn(B, T, generator=generator, dtype=torch.float64),
        "old_logprobs": torch.where(uniform() < 0.3, near + 0.1, old),
        "reference_logprobs": -2 * uniform(),
        "rho": torch.where(uniform() > 0.2, (1.5 * uniform()).clamp(1e-3, 1.2), 0.0),
    }


def loss_of(logprobs: Tensor, batch: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Any]:
    """Computes the loss of log-probabilities ``[B, T]``."""
    flat = {name: flatten_like(name, x, batch["labels"]) for name, x in options.items() if isinstance(x, Tensor)}
    return grpo_loss(logprobs.flatten(), **{**options, **flat})


def unfused(batch: dict[str, Any], temperature: float, tiles: int, **options: Any) -> tuple[Tensor, Any]:
    """All logits ``[B, T, V]`` are formed."""
    logits = batch["head"](batch["hidden"])
    found = vocab_parallel_logprobs(logits, batch["labels"], temperature=temperature, layout="bsh")
    return loss_of(found.logprobs, batch, options)


def by_linear_logprobs(batch: dict[str, Any], temperature: float, tiles: int, **options: Any) -> tuple[Tensor, Any]:
    """A tile is a chunk."""
    given = batch["hidden"], batch["head"].weight, batch["labels"]
    found = linear_logprobs(*given, temperature=temperature, chunk=-(-B * T // tiles), layout="bsh")
    return loss_of(found.logprobs, batch, options)


def by_tiled_token_logprobs(
    batch: dict[str, Any], temperature: float, tiles: int, **options: Any
) -> tuple[Tensor, Any]:
    """The head is called twice for each tile."""
    given = batch["head"], batch["hidden"], batch["labels"]
    found = tiled_token_logprobs(*given, temperature=temperature, tiles=tiles, layout="bsh")
    return loss_of(found.logprobs, batch, options)


def in_one_pass(batch: dict[str, Any], temperature: float, tiles: int, **options: Any) -> tuple[Tensor, Any]:
    """The head is called once for each tile, as by theirs."""
    given = batch["head"], batch["hidden"], batch["labels"]
    return tiled_grpo_loss(*given, temperature=temperature, tiles=tiles, layout="bsh", **options)


FUSED: dict[str, Fused] = {
    "unfused": unfused,
    "linear_logprobs": by_linear_logprobs,
    "tiled_token_logprobs": by_tiled_token_logprobs,
    "tiled_grpo_loss": in_one_pass,
}


def options_of(batch: dict[str, Any], *, has_reference: bool, rho: str, **others: Any) -> dict[str, Any]:
    """Returns the arguments of ``grpo_loss``, ``[B, T]`` each.

    Args:
        batch: that of ``example``.
        has_reference: whether there is a reference policy.
        rho: "off", "weights" as they are given to the original, or "correction", which makes the
            same weights from vLLM's log-probabilities.
        others: other arguments.
    """
    names = ["mask", "advantages", "old_logprobs", *["reference_logprobs"] * has_reference]
    given = {name: batch[name] for name in names}
    if rho == "weights":
        given["rho"] = batch["rho"]
    elif rho == "correction":
        given |= {"rho": RhoCorrection(rho_mask_lower_bound=LOWER), "vllm_logprobs": sampled(batch)}
    counted = int(batch["mask"].sum())
    return {
        **given,
        "valid_tokens": counted,
        "beta": BETA * has_reference,
        "loss_denominator": DENOMINATOR,
        "loss_scale": SCALE,
        **others,
    }


def sampled(batch: dict[str, Any]) -> Tensor:
    """Returns log-probabilities by vLLM, ``[B, T]``, from which the weights of rho follow."""
    rho = torch.where(batch["rho"] == 0, DROPPED, batch["rho"])
    return batch["old_logprobs"] - rho.log()


def reference(
    batch: dict[str, Any], temperature: float, *, has_reference: bool, rho: str, **others: Any
) -> tuple[Tensor, Any]:
    logits = batch["head"](batch["hidden"]).flatten(0, 1)
    flat = {name: x.flatten() for name, x in batch.items() if isinstance(x, Tensor) and x.shape == (B, T)}
    options = GrpoOptions(
        beta=BETA * has_reference,
        loss_denominator=DENOMINATOR,
        loss_scale=SCALE,
        use_rho_correction=rho != "off",
        rho_mask_lower_bound=LOWER,
        **others,
    )
    logprobs = dense_losses.token_logprobs(logits, flat["labels"], temperature)
    return dense_losses.grpo(
        logprobs=logprobs,
        reference_logprobs=flat["reference_logprobs"] if has_reference else logprobs.detach(),
        **{name: flat[name] for name in ("old_logprobs", "advantages", "mask")},
        vllm_logprobs=sampled(batch).flatten(),
        sequence=torch.arange(B).repeat_interleave(T),
        sequences=B,
        valid_tokens=flat["mask"].sum(),
        options=options,
    )


def assert_same(fused: Fused, batch: dict[str, Any], temperature: float, tiles: int, **settings: Any) -> Any:
    """Compares loss, both gradients and metrics with the reference; returns its metrics."""
    leaves = [batch["hidden"].requires_grad_(), batch["head"].weight]
    expected, expected_metrics = reference(batch, temperature, **settings)
    gradients = torch.autograd.grad(UPSTREAM * expected, leaves)
    loss, metrics = fused(batch, temperature, tiles, **options_of(batch, **settings))
    assert_agrees(loss, expected, PUBLISHED)
    assert_agrees(torch.autograd.grad(UPSTREAM * loss, leaves), gradients, PUBLISHED)
    # Without rho, or with its weights alone, fewer of its metrics are known.
    names = [name for name in metrics if settings["rho"] == "correction" or not name.startswith("rho")]
    assert_agrees({name: metrics[name] for name in names}, {n: expected_metrics[n] for n in names}, PUBLISHED)
    return expected_metrics, gradients


@pytest.mark.slow(but=72)
@pytest.mark.parametrize("fused", FUSED)  # those above change first, so the first cases differ in them
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
@pytest.mark.parametrize("rho", ["off", "weights", "correction"])
@pytest.mark.parametrize("tiles", [1, 3, 100])
@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_loss_gradients_and_clipped_share(
    fused: str, loss_fn: str, has_reference: bool, tiles: int, temperature: float, rho: str
) -> None:
    """Some tokens are clipped: this share was once 0 for CISPO always."""
    settings: dict[str, Any] = {"loss_fn": loss_fn, "has_reference": has_reference, "rho": rho}
    metrics, gradients = assert_same(FUSED[fused], example(), temperature, tiles, **settings)
    assert 0 < metrics["clipfrac"] < 1
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
def test_kl_estimators(fused: str, loss_fn: str, estimator: int) -> None:
    settings: dict[str, Any] = {"loss_fn": loss_fn, "kl_estimator": estimator, "has_reference": True}
    assert_same(FUSED[fused], example(far=False), 1.0, 2, rho="off", **settings)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("tokens", [0, 3])
def test_tiles_without_tokens_that_count(fused: str, tokens: int) -> None:
    """Of all tiles, or of all but the first one or two."""
    settings: dict[str, Any] = {"has_reference": True, "rho": "correction"}
    _, gradients = assert_same(FUSED[fused], example(tokens=tokens), 0.7, 3, **settings)
    assert tokens or not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("tiles", "temperature"), [(1, 1.0), (3, 0.7), (100, 1.0)])
def test_log_probabilities_without_gradients(tiles: int, temperature: float) -> None:
    batch = example()
    given = batch["head"], batch["hidden"], batch["labels"]
    with torch.no_grad():
        found = tiled_token_logprobs(*given, temperature=temperature, tiles=tiles, layout="bsh").logprobs
        logits = batch["head"](batch["hidden"]).flatten(0, 1)
    expected = dense_losses.token_logprobs(logits, batch["labels"].flatten(), temperature)
    assert_agrees(found, expected.view(B, T), PUBLISHED)


def test_an_unknown_loss_is_refused() -> None:
    batch = example()
    given = options_of(batch, has_reference=False, rho="off", loss_fn="not_a_loss")
    with pytest.raises(ValueError, match="loss_fn 'not_a_loss'"):
        in_one_pass(batch, 1.0, 1, **given)
