# SPDX-License-Identifier: Apache-2.0
"""Tests of losses whose gradients are made in forward, tile by tile.

They cover the defects of open-instruct's tiled loss; O1 to O18 refer to the list in losses.md.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lossgate
from fused_losses import (
    Metrics,
    RhoCorrection,
    TokenLogprobs,
    flatten_like,
    grpo_loss,
    rho_weights,
    tiled_grpo_loss,
    tiled_loss,
    tiled_token_logprobs,
)
from fused_losses.tiled_head import GradientSums, tiles_of
from lossgate import Layout
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.heads import (
    VOCAB,
    WIDTH,
    Cosine,
    HiddenWeight,
    LoraHead,
    Remembers,
    ShardedHead,
    batch,
    dense,
    seeded,
)
from property_tests.kernels.our_candidates import OURS

MakeWorld = Callable[..., SimulatedWorld]
Values = list[Tensor]


test_tiled_grpo_in_one_pass_agrees = pytest.mark.slow(
    lossgate.suite(OURS["fused_tiled_grpo_in_one_pass"], layouts=["dp=2,cp=2"], examples=12)
)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, VOCAB, dtype=torch.float64)


def trained(head: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


def weighted(values: TokenLogprobs, tile: slice) -> tuple[Tensor, Metrics]:
    """A loss with other weights for every token, of log-probabilities and entropies."""
    weights = torch.linspace(-2, 3, 14, dtype=values.logprobs.dtype).view(2, 7)[:, tile]
    of_entropy = 0.0 if values.entropy is None else (values.entropy.square() * weights[1]).sum()
    lowest = torch.cat([values.logprobs.detach(), values.logprobs.new_full((1,), torch.inf)]).amin()
    metrics = Metrics({"count": len(values.logprobs), "lowest": lowest}, minima=["lowest"])
    return (values.logprobs.square() * weights[0]).sum() + of_entropy, metrics


def grpo_arguments(tokens: int = 7, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    names = ("advantages", "old_logprobs", "reference_logprobs", "vllm_logprobs")
    drawn = {name: torch.randn(tokens, generator=generator, dtype=torch.float64) - 1 for name in names}
    where = {"mask": torch.arange(tokens) % 3 != 1, "sequence": torch.arange(tokens) * 2 // max(1, tokens)}
    return {**drawn, **where, "sequences": 2, "valid_tokens": 9, **changes}


def values_and_gradients(loss: Tensor, metrics: Metrics, inputs: list[Any], upstream: float = 1.0) -> Values:
    return [loss.detach(), *metrics.values(), *torch.autograd.grad(loss, inputs, loss.new_tensor(upstream))]


def assert_equal(found: Values, expected: Values) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("upstream", [1.0, -2.5])
@pytest.mark.parametrize("tiles", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("make", [LoraHead, linear, Cosine64 := partial(Cosine, WIDTH, VOCAB, dtype=torch.float64)])
def test_any_loss_agrees_with_dense(make: Callable[[], nn.Module], tiles: int | None, upstream: float) -> None:
    """Any upstream gradient multiplies all gradients (O9), and adapters are trained (O4)."""
    hidden, labels = batch()
    head, inputs = seeded(make), [hidden.requires_grad_()]
    inputs += trained(head)
    found = tiled_loss(head, hidden, labels, weighted, temperature=0.7, tiles=tiles, entropy=True)
    values = TokenLogprobs(*dense(head, hidden, labels, 0.7), None, None)
    expected = weighted(values, slice(None))
    assert_equal(values_and_gradients(*found, inputs, upstream), values_and_gradients(*expected, inputs, upstream))
    assert found[1].reductions == {"count": "sum", "lowest": "min"}


RHO = {
    "no rho": None,
    "of tokens": RhoCorrection(rho_clamp_upper_bound=1.3, rho_mask_lower_bound=0.4, rho_mask_upper_bound=3.0),
    "of sequences": RhoCorrection(rho_mask_sequence_level=True, rho_mask_upper_bound=1.2),
    "by tv divergence": RhoCorrection(rho_mask_tv_divergence=True, rho_mask_upper_bound=0.5),
}
GRPO: dict[str, dict[str, Any]] = {
    "by default": {},
    "CISPO": {"loss_fn": "cispo", "clip_higher": 0.1},
    "KL estimator 3": {"kl_estimator": 3, "beta": 0.4},
    "on policy": {"old_logprobs": None},
    "by a constant": {"loss_denominator": 0.5, "loss_scale": 3},
    "a tensor of tokens": {"valid_tokens": torch.tensor(9)},
    "no reference": {"beta": 0.0, "reference_logprobs": None},
    "filtered": {"top_k": 4, "top_p": 0.8},
}


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("tiles", [1, 3, 100])
@pytest.mark.parametrize("rho", RHO)
@pytest.mark.parametrize("options", GRPO)
def test_grpo_agrees_with_two_passes(options: str, rho: str, tiles: int) -> None:
    hidden, labels = batch()
    head, given = seeded(LoraHead), grpo_arguments(rho=RHO[rho], **GRPO[options])
    inputs = [hidden.requires_grad_(), *trained(head)]
    found = tiled_grpo_loss(head, hidden, labels, temperature=0.7, tiles=tiles, **given)
    of_filter = {name: given.pop(name) for name in ("top_k", "top_p") if name in given}
    values = tiled_token_logprobs(
        head, hidden, labels, temperature=0.7, tiles=tiles, unfiltered=bool(of_filter), **of_filter
    )
    expected = grpo_loss(values.logprobs, unfiltered_logprobs=values.unfiltered_logprobs, **given)
    assert list(found[1]) == list(expected[1])
    assert_equal(values_and_gradients(*found, inputs), values_and_gradients(*expected, inputs))


@pytest.mark.parametrize("rho", [None, RhoCorrection()], ids=["no rho", "rho"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tiles", [1, 3, 100])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
def test_the_settings_of_the_originals_own_test(
    loss_fn: Any, reference: bool, tiles: int, temperature: float, rho: RhoCorrection | None
) -> None:
    """open-instruct's test has two rows of five tokens, and compares in float32 to 1e-5.

    Here it is 1e-7, in float64: float32 rounds the loss, about 1 after its scale, by as much.
    """
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(10, 8, generator=generator, dtype=torch.float64).requires_grad_()
    names = ("old_logprobs", "vllm_logprobs", "reference_logprobs", "advantages")
    given: dict[str, Any] = dict(zip(names, 0.3 * torch.randn(4, 10, generator=generator).double(), strict=True))
    given |= {name: given[name] - 2.5 for name in names[:3]}
    labels, mask = torch.randint(17, (10,), generator=generator), torch.rand(10, generator=generator) < 0.7
    given |= {"mask": mask, "valid_tokens": mask.sum(), "loss_denominator": 7.0, "loss_scale": 3}
    given |= {"loss_fn": loss_fn, "rho": rho, "beta": 0.1 if reference else 0.0}
    head = seeded(partial(nn.Linear, 8, 17, bias=False, dtype=torch.float64))
    found = tiled_grpo_loss(head, hidden, labels, temperature=temperature, tiles=tiles, **given)
    expected = grpo_loss(dense(head, hidden, labels, temperature)[0], **given)
    inputs = [hidden, *trained(head)]
    for own, other in zip(*(values_and_gradients(*each, inputs) for each in (found, expected)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-7)


def rows_of_calls(head: nn.Module) -> list[int]:
    """Returns a list to which each call of the head's part appends its number of tokens."""
    rows = list[int]()
    head.get_submodule("0").register_forward_hook(lambda _, inputs, logits: rows.append(len(logits)))
    return rows


@pytest.mark.parametrize(
    ("rho", "changes", "passes"),
    [
        ("no rho", {}, 1),
        ("of tokens", {}, 1),
        ("of sequences", {}, 1),
        ("by tv divergence", {}, 1),
        ("of tokens", {"old_logprobs": None}, 1),
        ("of sequences", {"old_logprobs": None}, 2),
    ],
)
def test_the_head_runs_once_for_each_tile(rho: str, changes: dict[str, Any], passes: int) -> None:
    """Means over sequences of new log-probabilities take it twice: sequences lie across tiles."""
    hidden, labels = batch()
    head = nn.Sequential(linear())
    rows = rows_of_calls(head)
    tiled_grpo_loss(head, hidden, labels, tiles=3, **grpo_arguments(rho=RHO[rho], **changes))[0].backward()
    assert rows == [2, 2, 3] * passes


def test_hooks_of_parameters_fire_once_and_in_backward() -> None:
    """Forward writes nothing to ``.grad`` (O10), and backward hands on what is complete (O3)."""
    hidden, labels = batch()
    head, fired = seeded(LoraHead), list[str]()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    loss, _ = tiled_loss(head, hidden.requires_grad_(), labels, weighted, tiles=3)
    assert not fired
    assert all(tensor.grad is None for tensor in (hidden, *head.parameters()))
    loss.backward()
    assert sorted(fired) == ["lora_A.weight", "lora_B.weight"]


class CountsBackwards(nn.Linear):
    """A head that counts how often gradients are made."""

    backwards = 0

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        if logits.requires_grad:
            logits.register_hook(lambda _: setattr(self, "backwards", self.backwards + 1))
        return logits


@pytest.mark.parametrize(
    ("frozen", "of_hidden", "enabled", "backwards"),
    [(False, True, True, 3), (True, True, True, 3), (True, False, True, 0), (False, True, False, 0)],
    ids=["all", "hidden alone", "nothing", "no_grad"],
)
def test_gradients_are_made_where_they_are_needed(frozen: bool, of_hidden: bool, enabled: bool, backwards: int) -> None:
    hidden, labels = batch()
    head, saved = CountsBackwards(WIDTH, VOCAB, dtype=torch.float64).requires_grad_(not frozen), list[Tensor]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)  # type: ignore[func-returns-value]
    with torch.set_grad_enabled(enabled), hooks:
        loss, _ = tiled_loss(head, hidden.requires_grad_(of_hidden), labels, weighted, tiles=3)
    assert head.backwards == backwards
    assert loss.requires_grad == bool(backwards)
    assert [tuple(t.shape) for t in saved] == [(VOCAB, WIDTH), (VOCAB,)] * (backwards > 0 and not frozen) + [
        (7, WIDTH)
    ] * (backwards > 0)


def test_backward_again() -> None:
    hidden, labels = batch()
    head = seeded(LoraHead)
    loss, _ = tiled_loss(head, hidden, labels, weighted, tiles=3)
    first = torch.autograd.grad(loss, trained(head), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, trained(head))))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    hidden, labels = batch()
    backbone = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    loss, _ = tiled_loss(seeded(LoraHead), backbone(hidden), labels, weighted)
    gradient = torch.autograd.grad(loss, [backbone.weight], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="computes first derivatives only, and this is a second one"):
        gradient.square().sum().backward()


def test_gradients_are_those_of_forward_whatever_happens_to_the_head_afterwards() -> None:
    hidden, labels = batch()
    head = seeded(linear)
    expected = torch.autograd.grad(tiled_loss(head, hidden, labels, weighted)[0], trained(head))
    loss, _ = tiled_loss(head, hidden, labels, weighted)
    with torch.no_grad():
        head.weight.add_(1)
    assert all(map(torch.equal, expected, torch.autograd.grad(loss, trained(head))))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_computes_each_tile_once_more(reentrant: bool) -> None:
    """Its hooks on saved tensors would compute all tiles again for the gradients of each."""
    hidden, labels = batch()
    head = nn.Sequential(seeded(linear))
    plain, _ = tiled_loss(head, hidden.requires_grad_(), labels, weighted, tiles=3)
    expected = torch.autograd.grad(plain, [hidden, *trained(head)])
    rows = rows_of_calls(head)
    again = checkpoint(lambda h: tiled_loss(head, h, labels, weighted, tiles=3)[0], hidden, use_reentrant=reentrant)
    assert isinstance(again, Tensor)
    again.backward()
    assert rows == [2, 2, 3] * 2
    assert all(torch.equal(own, leaf.grad) for own, leaf in zip(expected, (hidden, *trained(head)), strict=True))


def test_a_head_that_overwrites_what_its_backward_needs_raises_an_error() -> None:
    class Overwrites(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            capped = super().forward(hidden).tanh()
            return capped.mul_(30)

    hidden, labels = batch()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tiled_loss(Overwrites(WIDTH, VOCAB, dtype=torch.float64), hidden, labels, weighted)


@pytest.mark.parametrize("make", [LoraHead, Cosine64], ids=["LoRA", "cosine"])
def test_garbage_at_masked_tokens_has_no_effect(make: Callable[[], nn.Module]) -> None:
    """What is masked is selected away, not multiplied by 0 (O15)."""
    hidden, labels = batch()
    head, given = seeded(make), grpo_arguments(rho=RHO["of tokens"])
    masked = ~given["mask"]
    spoilt = {name: torch.where(masked, torch.inf, given[name]) for name in ("old_logprobs", "advantages")}
    results = [
        values_and_gradients(*tiled_grpo_loss(head, h, y, tiles=3, **{**given, **changes}), [h, *trained(head)])
        for h, y, changes in (
            (hidden.clone().requires_grad_(), labels, {}),
            (
                torch.where(masked[:, None], torch.nan, hidden).requires_grad_(),
                torch.where(masked, -100, labels),
                {**spoilt, "mask": given["mask"].float()},
            ),
        )
    ]
    assert all(map(torch.equal, *results))
    assert all(result.isfinite().all() for result in results[0])


def test_no_token_counts() -> None:
    hidden, labels = batch()
    head, nothing = seeded(LoraHead), torch.zeros(7, dtype=torch.bool)
    given = grpo_arguments(mask=nothing, valid_tokens=0)
    loss, metrics = tiled_grpo_loss(head, hidden.requires_grad_(), labels, tiles=3, **given)
    assert float(loss.detach()) == 0
    assert metrics["rho_min"] == torch.inf
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, [hidden, *trained(head)]))


def test_every_rank_calls_the_head_equally_often(make_world: MakeWorld) -> None:
    """The head is gathered when called, and ranks have different numbers of tokens (O11, O13)."""
    tokens, weight = [5, 0, 1, 12], torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).double()

    def body(context: RankContext) -> Tensor:
        hidden, labels = batch(tokens[context.rank])
        head = ShardedHead(weight, context.mesh.get_group("dp"))
        tiled_loss(head, hidden, labels % 8, summed, tiles=4)[0].backward()
        assert head.rows.grad is not None
        return head.rows.grad

    world = make_world("dp=4")
    found = torch.cat(world.run(body))
    whole = weight.clone().requires_grad_()
    logprobs = [
        torch.log_softmax(hidden @ whole.T, 1).gather(1, labels[:, None] % 8) for hidden, labels in map(batch, tokens)
    ]
    torch.testing.assert_close(found, torch.autograd.grad(torch.cat(logprobs).sum(), [whole])[0])
    # Each of four tiles gathers the head once and reduces its gradient once; nothing in backward.
    assert {sum(logged.rank == rank for logged in world.log) for rank in range(4)} == {4 + 4}


def summed(values: TokenLogprobs, tile: slice) -> tuple[Tensor, Metrics]:
    return values.logprobs.sum(), Metrics()


def test_tokens_that_do_not_count_have_no_gradient_though_the_loss_has() -> None:
    hidden, labels = batch()
    head, mask = seeded(LoraHead), torch.arange(7) % 3 != 1
    inputs = [hidden.requires_grad_(), *trained(head)]
    found = torch.autograd.grad(tiled_loss(head, hidden, labels, summed, mask=mask, tiles=3)[0], inputs)
    expected = torch.autograd.grad(dense(head, hidden, labels, 1.0)[0][mask].sum(), inputs)
    assert_equal(list(found), list(expected))


def test_a_loss_without_gradients_has_gradients_of_zero() -> None:
    """The head's backward runs nevertheless: on other ranks it may be a collective."""
    hidden, labels = batch()
    head = CountsBackwards(WIDTH, VOCAB, dtype=torch.float64)
    loss, _ = tiled_loss(head, hidden, labels, lambda values, _: (values.logprobs.detach().sum(), Metrics()), tiles=3)
    assert head.backwards == 3
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, trained(head)))


class InFloat32(nn.Linear):
    """A head that leaves autocast, as heads do that need exact logits."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(hidden.float())


@pytest.mark.parametrize("make", [nn.Linear, InFloat32])
def test_autocast_is_that_of_two_passes(make: Callable[[int, int], nn.Module]) -> None:
    """In backward it is off, so a gradient has the dtype that the head chose in forward."""
    hidden, labels = batch(40)
    head, hidden = make(WIDTH, VOCAB), hidden.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        losses = (
            tiled_loss(head, hidden, labels, summed, tiles=3)[0],
            tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs.sum(),
        )
    assert all(map(torch.equal, *(torch.autograd.grad(loss, [hidden, *trained(head)]) for loss in losses)))


def error(dtype: torch.dtype, tiles: int, scale: float, one_pass: bool) -> float:
    """Returns the relative error of gradients of a loss that is divided, and multiplied again."""
    head = nn.Linear(16, 32, bias=False, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(32, (512,), generator=generator)
    exact, exact_hidden = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    expected = torch.autograd.grad(dense(exact, exact_hidden, labels, 1.0)[0].sum(), [exact_hidden, exact.weight])
    if one_pass:
        loss, _ = tiled_loss(head, hidden, labels, lambda v, _: (v.logprobs.sum() / scale, Metrics()), tiles=tiles)
    else:
        loss = tiled_token_logprobs(head, hidden, labels, tiles=tiles).logprobs.sum() / scale
    found = torch.autograd.grad(loss * scale, [hidden, head.weight])
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def test_the_weights_gradient_is_added_up_in_float32() -> None:
    """In bfloat16, the sum over tiles would lose accuracy with every tile."""
    assert seeded_error(torch.bfloat16, 512, 1.0) < 1.5 * seeded_error(torch.bfloat16, 1, 1.0)


def test_small_gradients_in_float16_are_not_lost_before_a_scaler_multiplies_them() -> None:
    """A GradScaler's factor comes in backward, when the gradients are made already."""
    assert seeded_error(torch.float16, 3, 2.0**20) < 1.5 * seeded_error(torch.float16, 3, 2.0**20, one_pass=False)


def seeded_error(dtype: torch.dtype, tiles: int, scale: float, *, one_pass: bool = True) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return error(dtype, tiles, scale, one_pass)


def test_attributes_that_forward_leaves_behind_are_no_weights() -> None:
    hidden, labels = batch()
    head = seeded(Remembers)
    for _ in range(2):
        loss, _ = tiled_loss(head, hidden, labels, weighted, tiles=3)
        expected, _ = weighted(TokenLogprobs(dense(head, hidden, labels, 1.0)[0], None, None, None), slice(None))
        assert_equal(*(list(torch.autograd.grad(total, trained(head))) for total in (loss, expected)))


def with_scale(values: TokenLogprobs, tile: slice) -> tuple[Tensor, Metrics]:
    return values.logprobs.sum() * torch.ones((), dtype=torch.float64, requires_grad=True), Metrics()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiles": 0}, "tiles 0: expected an integer from 1"),
        ({"temperature": 0.0}, "temperature 0.0: expected a finite number above 0"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"hidden \[7, 4\] and labels \[3\]: layout 'bsh' expects"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask \[3\]: expected \[7\], one entry for each of labels"),
        ({"mask": torch.ones(7), "labels": torch.arange(3, 10)}, "labels: token 6 has 9, outside of the vocab"),
        ({"loss_of_tile": lambda v, _: (v.logprobs, {})}, r"loss_of_tile returned a loss \[7\]: expected a scalar"),
        ({"loss_of_tile": with_scale}, r"loss_of_tile uses a Tensor \[\] that needs a gradient, which would be lost"),
        (
            {"lm_head": HiddenWeight(nn.Parameter(torch.zeros(VOCAB, WIDTH, dtype=torch.float64)), as_parameter=False)},
            r"it uses a Parameter \[9, 4\] that is no attribute of it.* make it a parameter",
        ),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(changes: dict[str, Any], message: str) -> None:
    hidden, labels = batch()
    given = {"lm_head": linear(), "hidden": hidden, "labels": labels, "loss_of_tile": weighted, **changes}
    with pytest.raises(ValueError, match=message):
        tiled_loss(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.zeros(9)}, r"advantages \[9\]: expected \[7\], one for each token"),
        ({"old_logprobs": torch.zeros(7, 1)}, r"old_logprobs \[7, 1\]: expected \[7\]"),
        ({"mask": torch.ones(1, 7)}, r"mask \[1, 7\]: expected \[7\]"),
        ({"loss_fn": "ppo"}, "loss_fn 'ppo': expected 'dapo' or 'cispo'"),
        ({"unfiltered_logprobs": torch.zeros(7)}, "unfiltered_logprobs: expected none, since they are computed here"),
        ({"advantages": torch.zeros(8)}, r"advantages \[8\]: expected \[7\], one for each token"),
        ({"rho": torch.full((7,), -1.0)}, "rho: the weight of token 0 is -1, expected a finite number from 0"),
        ({"valid_tokens": torch.tensor(-1)}, "valid_tokens -1: expected a finite number from 0"),
        ({"top_k": 0}, "top_k 0: expected an integer from 1"),
        ({"top_p": 2.0}, "top_p 2.0: expected a finite number"),
        ({"rho": RHO["of sequences"], "vllm_logprobs": None}, "vllm_logprobs None: expected"),
        ({"rho": RHO["of sequences"], "sequence": torch.full((7,), 5)}, "sequence: token 0 has 5, outside of"),
    ],
)
def test_bad_arguments_of_grpo_raise_errors_that_name_them(changes: dict[str, Any], message: str) -> None:
    hidden, labels = batch()
    with pytest.raises(ValueError, match=message):
        tiled_grpo_loss(linear(), hidden, labels, tiles=2, **grpo_arguments(**changes))


def given_rho(kind: str, given: dict[str, Any]) -> Any:
    names = ("old_logprobs", "vllm_logprobs", "advantages", "mask", "sequence", "sequences")
    weights = rho_weights(RHO["of sequences"], **{name: given[name] for name in names})
    return weights.weight if kind == "tensor" else weights


@pytest.mark.parametrize("kind", ["tensor", "weights"])
def test_weights_of_rho_from_elsewhere(kind: str) -> None:
    hidden, labels = batch()
    head, given = seeded(LoraHead), grpo_arguments()
    inputs = [hidden.requires_grad_(), *trained(head)]
    found = tiled_grpo_loss(head, hidden, labels, tiles=3, **{**given, "rho": given_rho(kind, given)})
    expected = tiled_grpo_loss(head, hidden, labels, tiles=3, **{**given, "rho": RHO["of sequences"]})
    assert set(found[1]) == set(expected[1]) if kind == "weights" else {"rho_weight"} <= set(found[1])
    common = Metrics({name: expected[1][name] for name in found[1]})
    assert_equal(values_and_gradients(*found, inputs), values_and_gradients(expected[0], common, inputs))


@pytest.mark.parametrize("rho", [None, "of sequences", "tensor", "weights"])
@pytest.mark.parametrize("layout", ["bsh", "sbh"])
def test_a_batch_gives_the_loss_of_its_tokens(layout: Any, rho: str | None) -> None:
    """All that has a number for each token has the shape of the labels."""
    hidden, labels = batch(8)
    head, given = seeded(LoraHead), grpo_arguments(8)
    given["rho"] = given_rho(rho, given) if rho in ("tensor", "weights") else RHO[rho or "no rho"]
    expected = tiled_grpo_loss(head, hidden.requires_grad_(), labels, **given)

    def rows(x: Any) -> Any:
        return x.view(2, 4) if isinstance(x, Tensor) else type(x)(*map(rows, x)) if isinstance(x, tuple) else x

    batched = hidden.view(2, 4, WIDTH)
    batched = batched.transpose(0, 1) if layout == "sbh" else batched
    of_rows = {name: rows(x) for name, x in given.items()}
    found = tiled_grpo_loss(head, batched, labels.view(2, 4), layout=layout, tiles=3, **of_rows)
    inputs = [hidden, *trained(head)]
    assert_equal(values_and_gradients(*found, inputs), values_and_gradients(*expected, inputs))


def test_a_tile_of_a_batch_is_in_the_order_of_flatten_tokens() -> None:
    hidden, labels = batch(8)
    rows, factors = labels.view(2, 4), torch.arange(8.0).double().view(2, 4)
    own = flatten_like("factors", factors, rows, "sbh")

    def loss(values: TokenLogprobs, tile: slice) -> tuple[Tensor, Metrics]:
        return (values.logprobs * own[tile]).sum(), Metrics()

    head = seeded(LoraHead)
    found, _ = tiled_loss(head, hidden.view(2, 4, WIDTH).transpose(0, 1), rows, loss, layout="sbh", tiles=3)
    expected = (dense(head, hidden, labels, 1.0)[0] * factors.flatten()).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_loss_is_given_all_statistics_of_its_filter() -> None:
    hidden, labels = batch()
    head, options = seeded(LoraHead), {"top_k": 3, "top_p": 0.9, "entropy": True, "unfiltered": True}

    def loss_of(values: TokenLogprobs) -> Tensor:
        assert values.unfiltered_logprobs is not None
        assert values.entropy is not None
        finite = torch.where(values.logprobs == -torch.inf, 0.0, values.logprobs)
        return (finite.square() + 2 * values.entropy + values.unfiltered_logprobs.exp()).sum()

    inputs = [hidden.requires_grad_(), *trained(head)]
    found = tiled_loss(head, hidden, labels, lambda v, _: (loss_of(v), Metrics()), tiles=3, **options)
    expected = loss_of(tiled_token_logprobs(head, hidden, labels, **options)), Metrics()
    assert_equal(values_and_gradients(*found, inputs), values_and_gradients(*expected, inputs))


def test_rho_of_sequences_is_summed_over_cp_once(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        hidden, labels = batch()
        given = grpo_arguments(rho=RHO["of sequences"], cp_group=context.mesh.get_group("cp"))
        tiled_grpo_loss(seeded(LoraHead), hidden, labels, tiles=3, **given)[0].backward()

    world = make_world("cp=2")
    world.run(body)
    assert [logged.shown.split(" -> ")[0] for logged in world.log if logged.rank == 0] == ["SUM, [float64[3, 2]]"]


@pytest.mark.parametrize("rho", ["no rho", "of sequences", "tensor"])
def test_values_are_checked_once_for_all_tiles(monkeypatch: pytest.MonkeyPatch, rho: str) -> None:
    """As often for three tiles as for one: each check waits for the device."""
    hidden, labels = batch()
    head, counts = seeded(LoraHead), list[int]()
    given = grpo_arguments(valid_tokens=torch.tensor(9))
    given["rho"] = given_rho(rho, given) if rho == "tensor" else RHO[rho]
    given["mask"] = given["mask"].float()
    waits = list[Tensor]()
    for name in ("nonzero", "item", "__bool__"):
        own = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda x, own=own: waits.append(x) or own(x))  # type: ignore[func-returns-value]
    for tiles in (1, 3):
        waits.clear()
        tiled_grpo_loss(head, hidden, labels, tiles=tiles, **given)
        counts.append(len(waits))
    assert counts[0] == counts[1]


GIVEN = grpo_arguments()
CALLS: dict[str, Callable[..., Tensor]] = {
    "tiled_token_logprobs": lambda head, h, y: tiled_token_logprobs(head, h, y, tiles=2).logprobs.sum(),
    "tiled_loss": lambda head, h, y: tiled_loss(head, h, y, summed, tiles=2)[0],
    "tiled_grpo_loss": lambda head, h, y: tiled_grpo_loss(head, h, y, tiles=2, **GIVEN)[0],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at it.
@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_leaves_it_as_it_is(name: str) -> None:
    hidden, labels = batch()
    head = seeded(LoraHead)
    inputs = [hidden.requires_grad_(), *trained(head)]
    torch.compiler.reset()
    compiled = torch.compile(lambda h: 3 * CALLS[name](head, 2 * h, labels), backend="aot_eager")
    assert_equal(
        *(
            list(torch.autograd.grad(loss, inputs))
            for loss in (compiled(hidden), 3 * CALLS[name](head, 2 * hidden, labels))
        )
    )
    torch.compiler.reset()


@pytest.mark.parametrize("name", CALLS)
def test_fullgraph_is_refused_with_the_reason(name: str) -> None:
    hidden, labels = batch()
    torch.compiler.reset()
    compiled = torch.compile(partial(CALLS[name], seeded(LoraHead)), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="call run_in_forward and tiled_\\* functions outside of what is compiled"):
        compiled(hidden, labels)
    torch.compiler.reset()


@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_torch_func_are_refused(name: str) -> None:
    hidden, labels = batch()
    head = seeded(LoraHead)
    with pytest.raises(ValueError, match=r"hidden belongs to a transform of torch\.func"):
        torch.func.grad(lambda h: CALLS[name](head, h, labels))(hidden)
    with pytest.raises(ValueError, match=r"hidden belongs to a transform of torch\.func"):
        torch.vmap(lambda h: CALLS[name](head, h, labels))(hidden[None])
    whole = nn.ModuleDict({"head": head})
    whole.forward = lambda: CALLS[name](whole["head"], hidden, labels)
    with pytest.raises(ValueError, match=r"lm_head: its .* belongs to a transform of torch\.func"):
        torch.func.grad(lambda p: torch.func.functional_call(whole, p, ()))(
            {n: p.detach() for n, p in whole.named_parameters()}
        )


class LastTileAlone(GradientSums):
    def add(self, gradients: Sequence[Tensor | None], unit: Tensor | None = None) -> None:
        self.sums = [None] * len(self.sums)
        super().add(gradients, unit)


MUTANTS: dict[str, tuple[str, Any]] = {
    "the last tile is lost": ("tiles_of", lambda tokens, tiles: tiles_of(tokens, tiles)[:-1]),
    "each tile's last row is lost": (
        "tiles_of",
        lambda tokens, tiles: [slice(t.start, max(t.start, t.stop - 1)) for t in tiles_of(tokens, tiles)],
    ),
    "a tile counts twice": ("tiles_of", lambda tokens, tiles: tiles_of(tokens, tiles) + tiles_of(tokens, tiles)[:1]),
    "gradients of the last tile alone": ("GradientSums", LastTileAlone),
    "gradients without the upstream gradient": ("multiplied", lambda gradient, factor, dtype: gradient.to(dtype)),
    "rho of tokens for that of sequences": (
        "rho_weights",
        lambda rho, **given: rho_weights(replace(rho, rho_mask_sequence_level=False), **given),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_disagree(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    name, changed = MUTANTS[mutant]
    monkeypatch.setattr(sys.modules["fused_losses.tiled_loss"], name, changed)
    cell = Cell(OURS["fused_tiled_grpo_in_one_pass"], Layout.parse("single"), "float32")
    assert run_cell(cell, Settings(examples=12, shrink_calls=0)).verdict is Verdict.DISAGREE
