# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference of ``value_loss``.

The methods are a closed form, numpy in a loop, hand computation and properties.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense_losses.value import explained_variance, value_loss
from lossgate.losses.value import ValueOptions

TOKENS = 12
CLIPPED = ValueOptions(cliprange=0.5)
OPTIONS = {
    "no clip": ValueOptions(),
    "clip": CLIPPED,
    "narrow clip": ValueOptions(cliprange=0.05),
    "wide clip": ValueOptions(cliprange=100.0),
    "scale": ValueOptions(cliprange=0.5, scale=3.0),
    "epsilon": ValueOptions(cliprange=0.5, epsilon=0.25),
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
INPUTS = ("values", "old_values", "returns")
SUMS = ("loss", "vf_clipfrac", "returns_mean", "values_mean", "returns_sq_mean", "residual_sq_mean")


def example(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values, old_values, returns = torch.randn(3, TOKENS, generator=generator, dtype=torch.float64)
    mask = torch.arange(TOKENS) % 4 != 2
    return {
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "mask": mask,
        "valid_tokens": mask.sum() + 3,
    }


def with_gradient(e: dict[str, Tensor], options: ValueOptions) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    values = e["values"].clone().requires_grad_()
    loss, metrics = value_loss(**{**e, "values": values}, options=options)
    (gradient,) = torch.autograd.grad(loss, values)
    return loss.detach(), gradient, metrics


def close(a: Any, b: Any) -> bool:
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-13, atol=1e-15)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)


def one_token(value: float, old_value: float, returned: float) -> dict[str, Tensor]:
    values, old_values, returns = (torch.tensor([x], dtype=torch.float64) for x in (value, old_value, returned))
    return {
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "mask": torch.tensor([True]),
        "valid_tokens": torch.tensor(1),
    }


# Gradients


@with_options
def test_gradients_by_a_closed_form(options: ValueOptions) -> None:
    """The gradient is scale (v - R) m / N, but 0 where the maximum takes the clipped error.

    That is where v has left the range and the edge of the range is further from the return than v.
    """
    e = example(seed=1)
    derived = torch.zeros(TOKENS, dtype=torch.float64)
    stopped = 0
    for t in range(TOKENS):
        v, old, r = (float(e[name][t]) for name in INPUTS)
        c = math.inf if options.cliprange is None else options.cliprange
        edge = old + math.copysign(c, v - old)
        stop = abs(v - old) > c and abs(edge - r) > abs(v - r)
        stopped += stop and bool(e["mask"][t])
        if e["mask"][t] and not stop:
            derived[t] = options.scale * (v - r) / (int(e["valid_tokens"]) + options.epsilon)
    assert (stopped > 0) == (options.cliprange is not None and options.cliprange < 100)
    assert close(with_gradient(e, options)[1], derived)


# Values


@with_options
@pytest.mark.parametrize("seed", [0, 1])
def test_values_by_numpy(options: ValueOptions, seed: int) -> None:
    e = example(seed)
    n = int(e["valid_tokens"]) + options.epsilon
    parts: dict[str, list[float]] = {name: [] for name in SUMS}
    trained = []
    for v, old, r, m in zip(*(e[name].numpy() for name in (*INPUTS, "mask")), strict=True):
        if not m:
            continue
        near = v if options.cliprange is None else np.clip(v, old - options.cliprange, old + options.cliprange)
        parts["loss"].append(0.5 * options.scale * max((v - r) ** 2, (near - r) ** 2))
        parts["vf_clipfrac"].append(float((near - r) ** 2 > (v - r) ** 2))
        parts["returns_mean"].append(r)
        parts["values_mean"].append(v)
        parts["returns_sq_mean"].append(r * r)
        parts["residual_sq_mean"].append((r - v) ** 2)
        trained.append(v)
    loss, _, metrics = with_gradient(e, options)
    assert loss == metrics["loss"]
    expected = {name: math.fsum(values) / n for name, values in parts.items()} | {
        "values_min": min(trained),
        "values_max": max(trained),
    }
    assert same(metrics, {name: torch.tensor(x, dtype=torch.float64) for name, x in expected.items()})


@pytest.mark.parametrize(
    ("value", "old_value", "returned", "loss", "gradient", "clipped"),
    [
        # within the range: the plain squared error
        (1.25, 1.0, 3.0, 1.53125, -1.75, False),
        (0.75, 1.0, -1.0, 1.53125, 1.75, False),
        # above the range, on its way to the return: the error of the edge 1.5, without gradient
        (2.0, 1.0, 3.0, 1.125, 0.0, True),
        # above the range, away from the return: the error of the value, with gradient
        (2.0, 1.0, 0.0, 2.0, 2.0, False),
        # below the range, on its way to the return: the error of the edge 0.5, without gradient
        (0.0, 1.0, -1.0, 1.125, 0.0, True),
        # below the range, away from the return
        (0.0, 1.0, 2.0, 2.0, -2.0, False),
        # beyond the return, but nearer to it than the edge is
        (2.25, 1.0, 2.0, 0.125, 0.0, True),
        # so far beyond the return that the edge is nearer
        (4.0, 1.0, 2.0, 2.0, 2.0, False),
        # at the return, but outside of the range
        (2.0, 1.0, 2.0, 0.125, 0.0, True),
        # at the return
        (1.25, 1.0, 1.25, 0.0, 0.0, False),
    ],
)
def test_every_side_of_the_clip_by_hand(
    value: float, old_value: float, returned: float, loss: float, gradient: float, clipped: bool
) -> None:
    e = one_token(value, old_value, returned)
    found, found_gradient, metrics = with_gradient(e, CLIPPED)
    assert (found, found_gradient, metrics["vf_clipfrac"]) == (loss, gradient, clipped)
    plain, plain_gradient, metrics = with_gradient(e, ValueOptions())
    assert (plain, plain_gradient, metrics["vf_clipfrac"]) == ((value - returned) ** 2 / 2, value - returned, 0)


def test_at_the_edge_of_the_range_the_gradient_is_between_its_two_sides() -> None:
    for value, returned in ((1.5, 3.0), (0.5, -1.0)):
        gradient = float(with_gradient(one_token(value, 1.0, returned), CLIPPED)[1])
        assert min(0, value - returned) <= gradient <= max(0, value - returned)


def test_metrics_by_hand() -> None:
    e = {
        "values": torch.tensor([1.0, 2.0, 100.0, 4.0], dtype=torch.float64),
        "old_values": torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
        "returns": torch.tensor([2.0, 3.0, 100.0, 1.0], dtype=torch.float64),
        "mask": torch.tensor([True, True, False, True]),
        "valid_tokens": torch.tensor(4),
    }
    loss, metrics = value_loss(**e, options=ValueOptions(cliprange=0.5, scale=2.0))
    assert loss == (1 + 1.5**2 + 9) / 4
    assert {name: float(x) for name, x in metrics.items()} == {
        "loss": 12.25 / 4,
        "vf_clipfrac": 0.25,
        "returns_mean": 1.5,
        "values_mean": 1.75,
        "returns_sq_mean": 3.5,
        "residual_sq_mean": 2.75,
        "values_min": 1,
        "values_max": 4,
    }


def test_epsilon_counts_even_where_it_is_small() -> None:
    """NeMo-RL's 1e-8 would vanish beside a count in float32."""
    loss = value_loss(**one_token(2.0, 2.0, 0.0), options=ValueOptions(epsilon=1e-8))[0]
    assert float(loss) == pytest.approx(2 / (1 + 1e-8), rel=1e-15)


# Identities


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 3.0))
def test_a_narrower_clip_gives_a_larger_loss(seed: int, cliprange: float) -> None:
    losses = [
        float(value_loss(**example(seed), options=ValueOptions(cliprange=c))[0])
        for c in (cliprange, 2 * cliprange, None)
    ]
    assert losses == sorted(losses, reverse=True)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-5, 5))
def test_an_offset_of_all_inputs_changes_nothing(seed: int, offset: float) -> None:
    e = example(seed)
    moved = {**e, **{name: e[name] + offset for name in INPUTS}}
    (loss, gradient, metrics), (loss_moved, gradient_moved, metrics_moved) = (
        with_gradient(e, CLIPPED),
        with_gradient(moved, CLIPPED),
    )
    assert float(loss_moved) == pytest.approx(float(loss), rel=1e-12)
    assert (gradient - gradient_moved).abs().max() < 1e-13
    assert metrics["vf_clipfrac"] == metrics_moved["vf_clipfrac"]


def test_the_loss_scales_with_the_square_of_the_unit() -> None:
    """Values, returns and the range are in another unit. A factor of -1 mirrors them."""
    e = example()
    for factor in (-1.0, 4.0):
        other = {**e, **{name: e[name] * factor for name in INPUTS}}
        assert close(
            value_loss(**other, options=ValueOptions(cliprange=0.5 * abs(factor)))[0],
            value_loss(**e, options=CLIPPED)[0] * factor**2,
        )


def test_unmoved_values_are_not_clipped() -> None:
    e = example()
    e["values"] = e["old_values"]
    clipped, plain = with_gradient(e, CLIPPED), with_gradient(e, ValueOptions())
    assert clipped[2] == plain[2]
    assert torch.equal(clipped[1], plain[1])


def halves() -> tuple[Tensor, Tensor]:
    first = torch.arange(TOKENS) < 5
    return first, ~first


def test_explained_variance_of_summed_moments_is_that_of_all_tokens() -> None:
    """It needs summed moments: the mean of the explained variances of parts is another number."""
    e = example()
    e["valid_tokens"] = e["mask"].sum()
    values, returns = (e[name][e["mask"]].numpy() for name in ("values", "returns"))
    expected = 1 - np.var(returns - values) / np.var(returns)
    parts = [value_loss(**{**e, "mask": e["mask"] & part}, options=CLIPPED)[1] for part in halves()]
    found = explained_variance({name: parts[0][name] + parts[1][name] for name in SUMS})
    assert float(found) == pytest.approx(expected, rel=1e-13)
    assert abs(float(sum(explained_variance(part) for part in parts)) / 2 - expected) > 0.1


def test_explained_variance_by_hand() -> None:
    e = {**example(), "mask": torch.ones(TOKENS).bool(), "valid_tokens": torch.tensor(TOKENS)}

    def of(values: Tensor, returns: Tensor) -> float:
        return float(
            explained_variance(value_loss(**{**e, "values": values, "returns": returns}, options=ValueOptions())[1])
        )

    returns = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(TOKENS // 2)
    assert of(returns, returns) == 1
    assert of(returns + 7, returns) == pytest.approx(1, rel=1e-12)  # an offset has no variance
    assert of(torch.full_like(returns, 0.5), returns) == pytest.approx(0, abs=1e-12)
    assert of(-returns, returns) == -3  # the residual is twice the returns
    assert of(returns / 2, returns) == 0.75
    assert math.isnan(of(returns, torch.ones_like(returns)))


# Options


def test_scale_has_no_effect_on_other_metrics() -> None:
    before, after = (
        value_loss(**example(), options=ValueOptions(cliprange=0.5, scale=scale))[1] for scale in (1.0, 4.0)
    )
    assert after.pop("loss") == 4 * before.pop("loss")
    assert before == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cliprange": 0.0}, "cliprange is 0.0; expected a finite positive number, or None"),
        ({"cliprange": -0.2}, "cliprange is -0.2"),
        ({"cliprange": math.nan}, "cliprange is nan"),
        ({"cliprange": math.inf}, "cliprange is inf"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"epsilon": -1e-8}, "epsilon is -1e-08"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValueOptions(**options)


# Masks, counts and parts


# Transforms


def test_metrics_carry_no_gradient() -> None:
    e = example()
    _, metrics = value_loss(**{**e, "values": e["values"].requires_grad_()}, options=CLIPPED)
    assert not any(x.requires_grad for x in metrics.values())


def test_shapes_are_checked() -> None:
    with pytest.raises(Exception, match="returns"):
        value_loss(**{**example(), "returns": torch.zeros(3, dtype=torch.float64)}, options=ValueOptions())
