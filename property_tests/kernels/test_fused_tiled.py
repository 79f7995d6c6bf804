# SPDX-License-Identifier: Apache-2.0
"""Tests of log-probabilities through an lm-head that is any module, tile by tile.

They cover the defects of open-instruct's tiled loss; O1 to O18 refer to the list in losses.md.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lossgate
from fused_losses import TokenLogprobs, grpo_loss, linear_logprobs, tiled_token_logprobs, unchecked_values
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.heads import (
    VOCAB,
    WIDTH,
    Cosine,
    HiddenWeight,
    LoraHead,
    Remembers,
    ShardedHead,
    Switched,
    batch,
    dense,
    seeded,
)
from property_tests.kernels.our_candidates import OURS

MakeWorld = Callable[..., SimulatedWorld]


test_tiled_grpo_agrees = pytest.mark.slow(lossgate.suite(OURS["fused_tiled_grpo"], layouts=["dp=2,cp=2"], examples=12))
test_tiled_token_logprobs_agree = pytest.mark.slow(
    lossgate.suite(OURS["fused_tiled_token_logprobs"], layouts=["dp=2,cp=2"], examples=12)
)
test_tiled_clipped_pg_agrees = pytest.mark.slow(
    lossgate.suite(OURS["fused_tiled_clipped_pg"], layouts=["dp=2,cp=2"], examples=12)
)


@pytest.mark.parametrize("tiles", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "make", [LoraHead, lambda: nn.Linear(WIDTH, VOCAB, dtype=torch.float64)], ids=["LoRA", "linear"]
)
def test_any_number_of_tiles_agrees_with_dense(make: Callable[[], nn.Module], tiles: int) -> None:
    """Gradients reach every parameter of a LoRA head (O4), for any upstream gradient (O9).

    There may be more tiles than tokens (O12).
    """
    hidden, labels = batch()
    head = seeded(make)
    upstream = torch.linspace(-2, 3, 14, dtype=torch.float64)
    gradients = []
    for made in (
        tiled_token_logprobs(head, hidden.requires_grad_(), labels, temperature=0.7, tiles=tiles, entropy=True)[:2],
        None,
    ):
        values = made or dense(head, hidden, labels, 0.7)
        assert values[1] is not None
        trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
        gradients.append(
            [*(v.detach() for v in values if v is not None), *torch.autograd.grad(torch.cat(values), trained, upstream)]
        )
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_hooks_of_parameters_fire_once_and_in_backward() -> None:
    """Hooks of data-parallel wrappers see each complete gradient once (O3).

    Forward writes nothing to ``.grad`` (O10).
    """
    hidden, labels = batch()
    head, fired = seeded(LoraHead), list[str]()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    logprobs = tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs
    assert all(parameter.grad is None for parameter in head.parameters())
    logprobs.sum().backward()
    assert sorted(fired) == ["lora_A.weight", "lora_B.weight"]


def test_a_hook_of_a_parameter_changes_its_whole_gradient_once() -> None:
    hidden, labels = batch()
    head, gradients = nn.Linear(WIDTH, VOCAB, dtype=torch.float64), list[Tensor]()
    for factor in (1, 2):
        handle = head.weight.register_hook(lambda grad, factor=factor: factor * grad)
        gradients += torch.autograd.grad(
            tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs.sum(), [head.weight]
        )
        handle.remove()
    torch.testing.assert_close(gradients[1], 2 * gradients[0])


def test_plain_attributes_are_trained_as_parameters_are() -> None:
    """FSDP puts views of a flat parameter in the place of parameters, and weight_norm a product."""
    hidden, labels = batch()
    head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
    flat = head.weight.detach().flatten().clone().requires_grad_()
    gradients = []
    del head.weight
    for tiles in (1, 3):
        head.weight = flat.view(VOCAB, WIDTH)
        gradients += torch.autograd.grad(tiled_token_logprobs(head, hidden, labels, tiles=tiles).logprobs.sum(), [flat])
        assert head.weight._base is flat
    expected = torch.autograd.grad(dense(head, hidden, labels, 1.0)[0].sum(), [flat])[0]
    for found in gradients:
        torch.testing.assert_close(found, expected)


def test_a_parameter_that_the_head_does_not_use_has_no_gradient() -> None:
    hidden, labels = batch()
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
    head.unused = nn.Parameter(torch.zeros(3))
    tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs.sum().backward()
    assert head.unused.grad is None
    assert head.weight.grad is not None


def test_activation_checkpointing_and_two_backwards() -> None:
    """A second forward does not add its gradients a second time (O10)."""
    hidden, labels = batch()
    head = seeded(LoraHead)
    trained = [p for p in head.parameters() if p.requires_grad]
    plain = tiled_token_logprobs(head, hidden.requires_grad_(), labels, tiles=3).logprobs.sum()
    expected = torch.autograd.grad(plain, trained, retain_graph=True)
    again = checkpoint(lambda h: tiled_token_logprobs(head, h, labels, tiles=3).logprobs, hidden, use_reentrant=False)
    assert isinstance(again, Tensor)
    for other in (torch.autograd.grad(plain, trained), torch.autograd.grad(again.sum(), trained)):
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


def test_garbage_has_no_effect_where_the_upstream_gradient_is_zero() -> None:
    """A token whose upstream gradient is 0 is selected away, not multiplied by 0 (O15)."""
    hidden, labels = batch()
    head = seeded(LoraHead)
    spoilt = hidden.clone()
    spoilt[2] = torch.nan
    for h in (hidden, spoilt):
        logprobs = tiled_token_logprobs(head, h.requires_grad_(), labels, tiles=3).logprobs
        torch.where(torch.arange(7) == 2, 0.0, logprobs).sum().backward()
    assert hidden.grad is not None
    assert spoilt.grad is not None
    assert torch.equal(hidden.grad, spoilt.grad)


def test_nothing_is_saved_without_gradients() -> None:
    """That is the pass for old log-probabilities (O8, O10)."""
    hidden, labels = batch()
    head, saved = seeded(LoraHead), list[Tensor]()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        assert not tiled_token_logprobs(head, hidden, labels).logprobs.requires_grad
    assert not saved


def test_every_rank_calls_the_head_equally_often(make_world: MakeWorld) -> None:
    """The head is gathered when called, and ranks have different numbers of tokens (O13).

    One rank has none (O11).
    """
    tokens = [5, 0, 1, 12]
    weight = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(context: RankContext) -> Tensor:
        hidden, labels = batch(tokens[context.rank])
        head = ShardedHead(weight, context.mesh.get_group("dp"))
        logprobs = tiled_token_logprobs(head, hidden, labels % 8, tiles=4).logprobs
        logprobs.sum().backward()
        assert head.rows.grad is not None
        return head.rows.grad

    world = make_world("dp=4")
    found = torch.cat(world.run(body))
    whole = weight.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for count in tokens:
        hidden, labels = batch(count)
        total = total + torch.log_softmax(hidden @ whole.T, 1).gather(1, labels[:, None] % 8).sum()
    total.backward()
    torch.testing.assert_close(found, whole.grad)
    # Four tiles gather the head in forward and again in backward, and reduce its gradient.
    assert {sum(logged.rank == rank for logged in world.log) for rank in range(4)} == {4 + 4 + 4}


def test_attributes_that_forward_leaves_behind_are_no_weights() -> None:
    hidden, labels = batch()
    head = seeded(Remembers)
    for _ in range(2):
        found, expected = (
            torch.autograd.grad(logprobs.sum(), list(head.parameters()))
            for logprobs in (
                tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs,
                dense(head, hidden, labels, 1.0)[0],
            )
        )
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other)


def test_another_adapter_in_backward_raises_an_error() -> None:
    hidden, labels = batch()
    head = seeded(Switched)
    logprobs = tiled_token_logprobs(head, hidden, labels).logprobs
    head.active = 1
    with pytest.raises(RuntimeError, match="forward used its weight, but backward does not; leave the head as it was"):
        logprobs.sum().backward()


def test_a_head_that_cannot_take_zeros_trains_on_masked_tokens() -> None:
    hidden, labels = batch()
    head = seeded(lambda: Cosine(WIDTH, VOCAB, dtype=torch.float64))
    kept = torch.arange(7) % 3 == 0
    gradients = [
        torch.autograd.grad(torch.where(kept, logprobs, 0.0).sum(), list(head.parameters()))
        for logprobs in (
            tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs,
            dense(head, hidden, labels, 1.0)[0],
        )
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
    nothing = torch.autograd.grad(
        0 * tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs.sum(), list(head.parameters())
    )
    assert not any(gradient.any() for gradient in nothing)


def test_a_gradient_that_would_be_lost_is_refused_when_called() -> None:
    hidden, labels = batch()
    weight = nn.Parameter(torch.zeros(VOCAB, WIDTH, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"it uses a Parameter \[9, 4\] that is no attribute of it.* make it a parameter"
    ):
        tiled_token_logprobs(HiddenWeight(weight, as_parameter=False), hidden, labels)
    tiled_token_logprobs(HiddenWeight(weight, as_parameter=True), hidden, labels).logprobs.sum().backward()
    assert weight.grad is not None


def test_changed_parameters_raise_an_error() -> None:
    hidden, labels = batch()
    head = seeded(LoraHead)
    logprobs = tiled_token_logprobs(head, hidden, labels).logprobs
    with torch.no_grad():
        next(p for p in head.parameters() if p.requires_grad).add_(1)
    with pytest.raises(RuntimeError, match="lm_head: a parameter was changed in place after forward"):
        logprobs.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    """It would lack what comes through the head."""
    hidden, labels = batch()
    backbone, head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), seeded(LoraHead)
    logprobs = tiled_token_logprobs(head, backbone(hidden), labels).logprobs
    gradient = torch.autograd.grad(logprobs.sum(), [backbone.weight], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="computes first derivatives only, and this is a second one"):
        gradient.square().sum().backward()


def test_a_second_backward_is_named_as_torch_does() -> None:
    hidden, labels = batch()
    total = tiled_token_logprobs(seeded(LoraHead), hidden, labels).logprobs.sum()
    total.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()


def test_autocast_is_the_same_in_both_passes() -> None:
    hidden, labels = batch(40)
    head = nn.Linear(WIDTH, VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs = tiled_token_logprobs(head, hidden.bfloat16().requires_grad_(), labels, tiles=3).logprobs
        expected, _ = dense(head, hidden.bfloat16(), labels, 1.0)
    found = torch.autograd.grad(logprobs.sum(), [head.weight])[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), [head.weight])[0], rtol=0.05, atol=0.05)


def test_a_split_loses_no_token() -> None:
    """Labels that are shifted before the split score the same tokens on any number of ranks.

    A shift after the split loses one token at each boundary (O1).
    """
    hidden, labels = batch(16)
    head = seeded(LoraHead)
    given: dict[str, Any] = {"beta": 0.0, "valid_tokens": 15}
    advantages, mask = torch.linspace(0.5, 2, 16, dtype=torch.float64), torch.arange(16) < 15
    whole = grpo_loss(tiled_token_logprobs(head, hidden, labels).logprobs, advantages=advantages, mask=mask, **given)[0]
    parts = []
    for rank in range(4):
        own = slice(4 * rank, 4 * rank + 4)
        logprobs = tiled_token_logprobs(head, hidden[own], labels[own]).logprobs
        parts.append(grpo_loss(logprobs, advantages=advantages[own], mask=mask[own], **given)[0])
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_the_weights_gradient_is_added_up_in_float32() -> None:
    """In bfloat16, the sum over tiles would lose accuracy with every tile."""
    head = nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    hidden, labels = (
        torch.randn(512, 16, generator=generator).bfloat16(),
        torch.randint(32, (512,), generator=generator),
    )
    exact = copy.deepcopy(head).double()
    dense(exact, hidden.double(), labels, 1.0)[0].mean().backward()
    assert exact.weight.grad is not None
    errors = []
    for tiles in (1, 512):
        head.weight.grad = None
        tiled_token_logprobs(head, hidden, labels, tiles=tiles).logprobs.mean().backward()
        assert head.weight.grad is not None
        errors.append(float((head.weight.grad.double() - exact.weight.grad).norm() / exact.weight.grad.norm()))
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiles": 0}, "tiles 0: expected an integer from 1, or None to choose one"),
        ({"tiles": 2.5}, "tiles 2.5: expected an integer"),
        ({"labels": torch.zeros(7)}, "labels is torch.float32: expected int64, int32 or int16"),
        ({}, r"hidden is torch.float64 and lm_head torch.float32: its forward failed; cast one of them, or enter"),
        ({"temperature": 0.0}, "temperature 0.0: expected a finite number above 0"),
        (
            {"labels": torch.zeros(3, dtype=torch.long)},
            r"hidden \[7, 4\] and labels \[3\]: layout 'bsh' expects hidden \[1, 3, 4\] or \[3, 4\]",
        ),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(changes: dict[str, Any], message: str) -> None:
    hidden, labels = batch()
    with pytest.raises(ValueError, match=message):
        tiled_token_logprobs(nn.Linear(WIDTH, VOCAB), **{"hidden": hidden, "labels": labels, **changes})


ALL: dict[str, Any] = {"entropy": True, "logit_range": True, "unfiltered": True}
STATISTICS: dict[str, dict[str, Any]] = {
    "log-probabilities": {},
    "all": ALL,
    "top-k": {**ALL, "top_k": 3},
    "top-p": {**ALL, "top_p": 0.8, "temperature": 0.7},
    "top-k and top-p, without entropy": {"top_k": 4, "top_p": 0.7, "unfiltered": True},
    "ignored labels": {**ALL, "top_k": 3, "ignore_index": 5},
}


def values_and_gradients(found: TokenLogprobs, inputs: list[Tensor]) -> list[Tensor]:
    values = [x for x in found if x is not None]
    finite = [torch.where(x.isfinite(), x, 0.0) for x in values if x.requires_grad]
    loss = sum((x * torch.linspace(-1, 2, x.numel()).reshape(x.shape)).sum() for x in finite)
    assert isinstance(loss, Tensor)
    return [*(x.detach() for x in values), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("tiles", [1, 3, 100])
@pytest.mark.parametrize("options", STATISTICS)
def test_all_statistics_are_those_of_linear_logprobs(options: str, tiles: int) -> None:
    hidden, labels = batch()
    head = seeded(lambda: nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64))
    inputs, given = [hidden.requires_grad_(), head.weight], STATISTICS[options]
    labels[2] = given.get("ignore_index", -100)
    found = tiled_token_logprobs(head, hidden, labels, tiles=tiles, **given)
    expected = linear_logprobs(hidden, head.weight, labels, **given)
    assert [x is None for x in found] == [x is None for x in expected]
    for own, other in zip(values_and_gradients(found, inputs), values_and_gradients(expected, inputs), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "hidden_shape", "labels_shape"),
    [("bsh", (2, 4), (2, 4)), ("sbh", (4, 2), (2, 4)), ("sbh", (8, 1), (8,)), ("bsh", (1, 8), (1, 8))],
)
def test_batches_as_models_return_them(layout: Any, hidden_shape: Any, labels_shape: Any) -> None:
    hidden, labels = batch(8)
    head = seeded(LoraHead)
    hidden, labels = hidden.view(*hidden_shape, WIDTH).requires_grad_(), labels.view(labels_shape)
    found = tiled_token_logprobs(head, hidden, labels, tiles=3, layout=layout, entropy=True)
    rows = hidden.transpose(0, 1) if layout == "sbh" else hidden
    expected = dense(head, rows.reshape(-1, WIDTH), labels.flatten(), 1.0)
    for own, other in zip(found, expected, strict=False):
        assert own is not None
        torch.testing.assert_close(own, other.view(labels_shape), rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(x.square().sum(), [hidden])[0] for x in (found.logprobs, expected[0]))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int, tiles: int) -> None:
    hidden, labels = batch()
    head = seeded(LoraHead)
    labels[6] = label
    with pytest.raises(ValueError, match=f"labels: token 6 has {label}, .*give tokens .* ignore_index"):
        tiled_token_logprobs(head, hidden, labels, tiles=tiles)
    with unchecked_values():
        found = tiled_token_logprobs(head, hidden, labels, tiles=tiles).logprobs
    assert found.isnan().tolist() == [False] * 6 + [True]


def test_values_are_checked_once_for_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, labels = batch()
    head, waits, nonzero = seeded(LoraHead), [], Tensor.nonzero
    monkeypatch.setattr(Tensor, "nonzero", lambda x: waits.append(x) or nonzero(x))  # type: ignore[func-returns-value]
    tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs.sum().backward()
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda logits: (logits, None), r"lm_head returned a tuple: expected logits \[7, vocab\]; pass a module"),
        (lambda logits: logits[None], r"lm_head returned \[1, 7, 9\]: expected logits \[7, vocab\]"),
    ],
)
def test_a_head_that_returns_no_logits_is_refused(result: Callable[[Tensor], Any], message: str) -> None:
    class Returns(nn.Linear):
        def forward(self, hidden: Tensor) -> Any:
            return result(super().forward(hidden))

    with pytest.raises(ValueError, match=message):
        tiled_token_logprobs(Returns(WIDTH, VOCAB, dtype=torch.float64), *batch())
