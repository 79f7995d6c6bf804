# SPDX-License-Identifier: Apache-2.0
"""Tests of the weights of rho, computed before the loss that takes them."""

from collections.abc import Callable
from inspect import signature
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_losses.rho import importance_weights
from fused_losses import RhoCorrection, RhoWeights, grpo_loss, rho_weights, unchecked_values
from lossgate import Layout
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses.grpo import RhoOptions
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.loss_inputs import rollout
from property_tests.kernels.our_candidates import OURS

MakeWorld = Callable[..., SimulatedWorld]

CORRECTIONS = {
    "default": {},
    "none": {"use_rho_correction": False},
    "clamp": {"rho_clamp_lower_bound": 0.9, "rho_clamp_upper_bound": 1.2},
    "no clamp": {"rho_clamp_upper_bound": 0.0},
    "mask": {"rho_mask_lower_bound": 0.9, "rho_mask_upper_bound": 1.3},
    "sequences": {"rho_mask_sequence_level": True, "rho_mask_lower_bound": 0.95, "rho_mask_upper_bound": 1.3},
    "tv": {"rho_mask_tv_divergence": True, "rho_mask_lower_bound": 0.2, "rho_mask_upper_bound": 0.4},
    "tv of sequences": {
        "rho_mask_tv_divergence": True,
        "rho_mask_sequence_level": True,
        "rho_mask_upper_bound": 0.3,
        "rho_clamp_upper_bound": 1.05,
    },
}
with_corrections = pytest.mark.parametrize("options", CORRECTIONS.values(), ids=CORRECTIONS)
NEEDED = ("old_logprobs", "vllm_logprobs", "advantages", "mask", "sequence", "sequences")


def given(**changes: Any) -> dict[str, Any]:
    """Returns the arguments of ``rho_weights`` but for the correction."""
    return {name: rollout(**changes)[name] for name in NEEDED}


def weights(options: dict[str, Any], **changes: Any) -> RhoWeights:
    return rho_weights(RhoCorrection(**options), **given(**changes))


def with_gradient(rho: Any, **changes: Any) -> tuple[Any, ...]:
    batch = rollout(rho=rho, **changes)
    loss, metrics = grpo_loss(**batch)
    return loss, metrics, torch.autograd.grad(loss, batch["logprobs"])[0]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@with_corrections
def test_weights_are_those_of_the_reference(options: dict[str, Any]) -> None:
    unknown = given()["vllm_logprobs"].index_fill(0, torch.tensor([1, 2]), nan)
    found = weights(options, vllm_logprobs=unknown)
    expected = importance_weights(**{**given(), "vllm_logprobs": unknown}, options=RhoOptions(**options))
    mask = given()["mask"]
    for name, x in expected._asdict().items():
        mine = getattr(found, name)[mask]
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine, x[mask], rtol=1e-13, atol=0)


@with_corrections
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
def test_a_loss_takes_weights_in_place_of_the_correction(options: dict[str, Any], loss_fn: str) -> None:
    found = with_gradient(weights(options), loss_fn=loss_fn, vllm_logprobs=None, sequence=None, sequences=None)
    assert_same(found, with_gradient(RhoCorrection(**options), loss_fn=loss_fn))


@with_corrections
def test_a_loss_takes_a_tensor_of_weights(options: dict[str, Any]) -> None:
    """open-instruct's tiled loss takes nothing else.

    What a tensor does not say is no metric.
    """
    loss, metrics, gradient = with_gradient(weights(options).weight)
    expected = with_gradient(RhoCorrection(**options))
    unknown = {"rho_mean", "rho_clipfrac", "rho_drop_low_frac", "rho_drop_high_frac", "rho_min", "rho_max"}
    assert_same((loss, gradient), (expected[0], expected[2]))
    assert_same(metrics, {name: x for name, x in expected[1].items() if name not in unknown})


@with_corrections
@pytest.mark.parametrize("tile", [1, 4, 5])
def test_losses_of_tiles_add_up_with_weights_of_whole_sequences(options: dict[str, Any], tile: int) -> None:
    whole, metrics, _ = with_gradient(RhoCorrection(**options))
    precomputed, parts = weights(options), list[tuple[Tensor, dict[str, Tensor]]]()
    for start in range(0, 12, tile):
        own = slice(start, start + tile)
        batch = rollout(rho=precomputed.part(own), vllm_logprobs=None)
        parts.append(grpo_loss(**{name: x[own] if isinstance(x, Tensor) else x for name, x in batch.items()}))
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-13, atol=1e-15)
    joined = {name: torch.stack([part[name] for _, part in parts]) for name in metrics}
    for name, x in metrics.items():
        reduced = {"rho_min": Tensor.amin, "rho_max": Tensor.amax}.get(name, Tensor.sum)(joined[name])
        torch.testing.assert_close(reduced, x, rtol=1e-13, atol=1e-15)


def test_weights_of_tiles_alone_would_be_others() -> None:
    """A tile does not know the other tokens of its sequences; so weights are computed before."""
    options = CORRECTIONS["sequences"]
    tile = {name: x[1:4] if isinstance(x, Tensor) else x for name, x in given().items()}
    assert not torch.equal(
        rho_weights(RhoCorrection(**options), **tile).weight, weights(options).part(slice(1, 4)).weight
    )


def test_a_part_may_be_an_index() -> None:
    whole = weights(CORRECTIONS["mask"])
    index = torch.tensor([7, 3])
    assert_same(whole.part(index), RhoWeights(*(x[index] for x in whole)))
    assert RhoWeights(whole.weight).part(slice(2)).rho is None


def test_values_for_histograms() -> None:
    batch, mask = given(), given()["mask"]
    found = weights({"rho_clamp_upper_bound": 1.2})
    rho = (batch["old_logprobs"] - batch["vllm_logprobs"])[mask].exp()
    assert found.rho is not None
    torch.testing.assert_close(found.rho[mask], rho, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.weight[mask], rho.clamp(max=1.2), rtol=1e-14, atol=0)
    assert not any(x.requires_grad for x in weights({}, old_logprobs=rollout()["logprobs"]) if x is not None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.25, 0.5, 1, 2, 2]),
        ({"rho_clamp_upper_bound": 0.0}, [0.25, 0.5, 1, 2, 4]),
        ({"rho_clamp_lower_bound": 0.5}, [0.5, 0.5, 1, 2, 2]),
        ({"rho_mask_lower_bound": 0.5, "rho_mask_upper_bound": 2.0}, [0, 0.5, 1, 2, 0]),
        ({"rho_mask_lower_bound": 0.5}, [0, 0.5, 1, 2, 2]),
        ({"rho_mask_upper_bound": 2.0}, [0.25, 0.5, 1, 2, 0]),
        ({"use_rho_correction": False}, [1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_five_tokens_as_in_the_tests_of_open_instruct(options: dict[str, Any], expected: list[float]) -> None:
    """rho is 1/4, 1/2, 1, 2 and 4. Tokens at a bound of the mask stay."""
    old = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64).log()
    ones = torch.ones(5, dtype=torch.float64)
    found = rho_weights(RhoCorrection(**options), old_logprobs=old, vllm_logprobs=ones * 0, advantages=ones, mask=ones)
    torch.testing.assert_close(found.weight, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)
    metrics = found.metrics(ones, 5)
    assert metrics["rho_drop_low_frac"] == expected[:1].count(0) / 5
    assert metrics["rho_drop_high_frac"] == expected[4:].count(0) / 5


@pytest.mark.parametrize("garbage", [nan, inf, -1.0])
def test_weights_of_masked_tokens_have_no_effect(garbage: float) -> None:
    clean = weights(CORRECTIONS["mask"])
    spoilt = RhoWeights(*(x.masked_fill(~given()["mask"], garbage if x.is_floating_point() else True) for x in clean))
    assert_same(with_gradient(spoilt), with_gradient(clean))
    assert_same(with_gradient(spoilt.weight), with_gradient(clean.weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    old, vllm = (given()[name].to(dtype) for name in ("old_logprobs", "vllm_logprobs"))
    found = weights({}, old_logprobs=old, vllm_logprobs=vllm)
    assert_same(found, weights({}, old_logprobs=old.float(), vllm_logprobs=vllm.float()))


@pytest.mark.parametrize("options", [CORRECTIONS["sequences"], CORRECTIONS["mask"]], ids=["sequences", "tokens"])
def test_sequences_over_ranks(make_world: MakeWorld, options: dict[str, Any]) -> None:
    """Ranks that hold parts of sequences find the weights of whole ones, in one all-reduce."""

    def body(context: RankContext) -> RhoWeights:
        own = {name: x[context.rank :: 2] if isinstance(x, Tensor) else x for name, x in given().items()}
        return rho_weights(RhoCorrection(**options), **own, cp_group=context.mesh.get_group("cp"))

    world = make_world("cp=2")
    for rank, found in enumerate(world.run(body)):
        for mine, whole in zip(found, weights(options), strict=True):
            assert mine is not None
            assert whole is not None
            torch.testing.assert_close(mine, whole[rank::2], rtol=1e-13, atol=0)
    sent = [logged.shown.split(" -> ")[0] for logged in world.log if logged.rank == 0]
    assert sent == (["SUM, [float64[3, 4]]"] if RhoCorrection(**options).of_sequences else [])


WRONG: dict[str, tuple[Callable[[RhoWeights], Any], str]] = {
    "negative": (lambda w: w.weight - 5, "rho: the weight of token 0 is -.*, expected a finite number from 0"),
    "nan": (lambda w: w.weight * nan, "rho: the weight of token 0 is nan"),
    "infinite": (lambda w: w._replace(weight=w.weight + inf), "rho: the weight of token 0 is inf"),
    "column": (lambda w: w.weight[:, None], r"rho.weight \[12, 1\]: expected \[12\], one for each token, as logprobs"),
    "short mask": (lambda w: w._replace(clamped=w.weight[:3] > 0), r"rho.clamped \[3\]: expected \[12\]"),
    "number": (lambda w: 2.0, "rho 2.0: expected RhoCorrection, the result of rho_weights"),
    "no weights": (lambda w: RhoWeights(None), "rho.weight None: expected"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_weights_are_refused(wrong: str) -> None:
    spoil, message = WRONG[wrong]
    with pytest.raises(ValueError, match=f"^{message}"):
        grpo_loss(**rollout(rho=spoil(weights({}))))


def test_weights_are_not_read_where_values_are_unchecked() -> None:
    with unchecked_values():
        assert grpo_loss(**rollout(rho=weights({}).weight * nan))[0].isnan()


def test_what_is_missing_is_named() -> None:
    rest = {name: x for name, x in given().items() if name != "sequence"}
    with pytest.raises(ValueError, match="sequence or sequences is missing"):
        rho_weights(RhoCorrection(rho_mask_sequence_level=True), **rest)
    assert set(NEEDED) < signature(rho_weights).parameters.keys()


MUTANTS: dict[str, Callable[..., RhoWeights]] = {
    "dropped tokens keep a weight": lambda rho, **given: (
        lambda w: w._replace(weight=torch.where(w.weight == 0, 1.0, w.weight))
    )(rho_weights(rho, **given)),
    "weights of the next token": lambda rho, **given: (lambda w: w._replace(weight=w.weight.roll(-1)))(
        rho_weights(rho, **given)
    ),
    "no clamp": lambda rho, **given: (lambda w: w._replace(weight=torch.where(w.weight == 0, 0.0, w.rho)))(
        rho_weights(rho, **given)
    ),
    "parts of sequences": lambda rho, **given: rho_weights(rho, **given | {"cp_group": None}),
    "rho is the weight": lambda rho, **given: (lambda w: w._replace(rho=w.weight))(rho_weights(rho, **given)),
    "low and high mixed up": lambda rho, **given: (
        lambda w: w._replace(dropped_low=w.dropped_high, dropped_high=w.dropped_low)
    )(rho_weights(rho, **given)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_weights_disagree(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """The candidate ``fused_tiled_grpo`` computes weights before the loss."""
    candidate = OURS["fused_tiled_grpo"]
    monkeypatch.setitem(candidate.kernel.__globals__, "rho_weights", MUTANTS[mutant])
    layout = Layout.parse("cp=2" if mutant == "parts of sequences" else "single")
    assert (
        run_cell(Cell(candidate, layout, "float32"), Settings(examples=20, shrink_calls=0)).verdict is Verdict.DISAGREE
    )


def test_a_label_that_both_policies_leave_out_has_no_correction() -> None:
    """Top-k may leave a label out for both. Other tokens of its sequence are unharmed."""
    left_out = torch.tensor([-torch.inf, -1.0], dtype=torch.float64)
    given: dict[str, Any] = {"advantages": torch.ones(2), "mask": torch.ones(2), "sequence": torch.zeros(2).long()}
    rho = RhoCorrection(rho_mask_sequence_level=True)
    found = rho_weights(rho, old_logprobs=left_out, vllm_logprobs=left_out, sequences=1, **given)
    assert found.rho is not None
    assert found.rho.tolist() == found.weight.tolist() == [1.0, 1.0]
