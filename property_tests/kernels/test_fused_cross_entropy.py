# SPDX-License-Identifier: Apache-2.0
"""Tests of the cross-entropy kernels and of the log-probabilities that they are made of.

lossgate verifies the kernels as candidates: ``ci/gate`` holds them to all properties. The tests
here cover what these do not ask: dtypes, saved tensors, collectives and errors.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lossgate
from fused_losses import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_logprobs,
    vocab_parallel_cross_entropy,
    vocab_parallel_logprobs,
)
from lossgate.observe import MemoryWatch
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.our_candidates import OURS

MakeWorld = Callable[..., SimulatedWorld]


# ``ci/gate`` verifies all kernels on up to two ranks, in every dtype.
test_linear_nll_agrees = pytest.mark.slow(but=1)(
    lossgate.suite(OURS["fused_linear_cross_entropy"], layouts=["tp=3", "dp=2,cp=2,tp=2"], examples=15)
)
test_vocab_parallel_nll_agrees = pytest.mark.slow(
    lossgate.suite(OURS["fused_vocab_parallel_cross_entropy"], layouts=["tp=3"], examples=15)
)
test_linear_agrees = pytest.mark.slow(
    lossgate.suite(OURS["fused_linear_logprobs"], layouts=["tp=3", "dp=2,cp=2,tp=2"], examples=15)
)
test_sequence_parallel_agrees = pytest.mark.slow(
    lossgate.suite(OURS["fused_linear_logprobs_sequence_parallel"], layouts=["tp=3", "dp=2,cp=2,tp=2"], examples=15)
)
test_vocab_parallel_agrees = pytest.mark.slow(
    lossgate.suite(OURS["fused_vocab_parallel_logprobs"], layouts=["tp=4", "dp=2,cp=2,tp=2"], examples=15)
)


def example(
    tokens: int = 6, width: int = 4, vocab: int = 9, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, torch.randint(vocab, (tokens,), generator=generator)


def test_temperature_and_softcap_are_on_logits() -> None:
    """Temperature and soft-cap change logits, so the probabilities of all labels sum to 1.

    NeMo-RL's fused path divided log-probabilities by the temperature instead.
    """
    hidden, weight, bias, labels = example()
    logits = 2.0 * torch.tanh((hidden @ weight.T + bias) / 2.0) / 0.7
    logprobs, entropy, *_ = linear_logprobs(
        hidden, weight, labels, bias=bias, temperature=0.7, softcap=2.0, entropy=True
    )
    expected = torch.log_softmax(logits, 1)
    torch.testing.assert_close(logprobs, expected.gather(1, labels[:, None]).squeeze(1))
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(1))
    everything = torch.stack(
        [
            linear_logprobs(hidden, weight, torch.full((6,), label), bias=bias, temperature=0.7, softcap=2.0)[0]
            for label in range(9)
        ]
    )
    torch.testing.assert_close(everything.exp().sum(0), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("matmul_dtype", [None, torch.float32])
def test_bfloat16_weight_gradients_do_not_suffer_from_small_chunks(
    in_forward: bool, matmul_dtype: torch.dtype | None
) -> None:
    """The products of chunks and their sum are float32, so small chunks do not cost accuracy.

    With a sum in bfloat16, as in NeMo-RL's kernel, the error grows from 0.3% with one chunk to 1.8%
    with one chunk for each token.
    """
    hidden, weight, _, labels = example(2048, 64, 256, torch.bfloat16)
    weight /= 8
    exact = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, labels).backward()

    def error(chunk: int) -> float:
        leaf = weight.clone().requires_grad_()
        if in_forward:
            linear_cross_entropy(hidden, leaf, labels, chunk=chunk, matmul_dtype=matmul_dtype).backward()
        else:
            (-linear_logprobs(hidden, leaf, labels, chunk=chunk, matmul_dtype=matmul_dtype).logprobs.mean()).backward()
        assert leaf.grad is not None
        assert exact.grad is not None
        return float((leaf.grad.double() - exact.grad).norm() / exact.grad.norm())

    whole, errors = error(2048), [error(chunk) for chunk in (256, 16, 1)]
    assert max(errors) < 1.02 * whole
    assert max(errors) < 1.02 * min(errors)


@pytest.mark.parametrize("in_forward", [True, False])
def test_bfloat16_gradients_are_no_less_accurate_than_dense_ones(in_forward: bool) -> None:
    """Each gradient is rounded once. That of hidden was rounded twice, also when divided by n."""
    hidden, weight, _, labels = example(1000, 256, 512, torch.bfloat16)
    weight /= 16

    def errors(loss: Callable[..., Tensor]) -> list[float]:
        leaves, exact = [
            [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
            for dtype in (torch.bfloat16, torch.float64)
        ]
        F.cross_entropy(exact[0] @ exact[1].T, labels).backward()
        loss(*leaves).backward()
        found = [(leaf.grad, own.grad) for leaf, own in zip(leaves, exact, strict=True)]
        return [float((a.double() - b).norm() / b.norm()) for a, b in found if a is not None and b is not None]

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        if in_forward:
            return linear_cross_entropy(hidden, weight, labels)
        return -linear_logprobs(hidden, weight, labels).logprobs.mean()

    dense = errors(lambda hidden, weight: F.cross_entropy((hidden @ weight.T).float(), labels))
    assert all(own < 1.01 * other for own, other in zip(errors(ours), dense, strict=True))


Loss = Callable[..., Tensor]
_LINEAR: dict[str, Loss] = {
    "linear_cross_entropy": linear_cross_entropy,
    "linear_logprobs": lambda h, w, y, **k: -linear_logprobs(h, w, y, **k).logprobs.mean(),
}


def _loss_and_gradients(
    loss_of: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype | None = None, **options: Any
) -> list[Tensor]:
    """Computes them with the forward under autocast to a dtype, and backward outside of it."""
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = loss_of(*leaves, labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("name", _LINEAR)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_hidden", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_linear(
    name: str, cast: torch.dtype, of_hidden: torch.dtype, of_weight: torch.dtype
) -> None:
    """The products have the factors of F.linear's, and gradients the dtypes of the inputs."""
    hidden, weight, _, labels = example(24, 8, 96)
    given = hidden.to(of_hidden), weight.to(of_weight), labels
    found, of_linear, exact = (
        _loss_and_gradients(_LINEAR[name], *given, dtype=cast),
        _loss_and_gradients(lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y), *given, dtype=cast),
        _loss_and_gradients(lambda h, w, y: F.cross_entropy(h @ w.T, y), given[0].double(), given[1].double(), labels),
    )
    assert [x.dtype for x in found] == [torch.float32, of_hidden, of_weight] == [x.dtype for x in of_linear]
    torch.testing.assert_close(found[0], of_linear[0])
    for ours, right in zip(found, exact, strict=True):
        # The factors of a product and its result are each rounded by at most eps / 2 of them.
        assert (ours - right).norm() <= 2 * torch.finfo(cast).eps * right.norm()


@pytest.mark.parametrize("name", _LINEAR)
def test_a_matmul_dtype_and_float64_are_stronger_than_autocast(name: str) -> None:
    loss_of, (hidden, weight, _, labels) = _LINEAR[name], example(24, 8, 96)
    float32 = hidden.float(), weight.float(), labels
    for given, options in ((float32, {"matmul_dtype": torch.float32}), ((hidden, weight, labels), {})):
        expected = _loss_and_gradients(loss_of, *given, **options)
        found = _loss_and_gradients(loss_of, *given, dtype=torch.bfloat16, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match=r"expected one dtype; cast one of them, or enter torch\.autocast"):
        loss_of(hidden.bfloat16(), weight.float(), labels)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="expected one dtype"):
        loss_of(hidden, weight.float(), labels)


def test_autocast_does_not_change_what_is_computed_from_logits() -> None:
    hidden, weight, _, labels = example(24, 8, 96, torch.float32)
    logits = hidden @ weight.T
    found, expected = (
        _loss_and_gradients(
            lambda z, w, y: vocab_parallel_cross_entropy(z, y) + 0 * w.sum(), logits, weight, labels, dtype=dtype
        )
        for dtype in (torch.bfloat16, None)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_logits_of_minus_infinity_do_not_contribute(make_world: MakeWorld) -> None:
    """Masked entries of the vocabulary do not contribute, even if they are all that a rank has."""
    logits = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]])
    expected = torch.log_softmax(logits[:, :2], 1)

    def body(context: RankContext) -> None:
        group = context.mesh.get_group("tp")
        part = logits[:, 2 * group.rank() :][:, : 4 // group.size()].clone().requires_grad_()
        given: Any = {"entropy": True, "vocab_start": 2 * group.rank(), "tp_group": group}
        found = vocab_parallel_logprobs(part, torch.tensor([0]), **given)
        assert found.entropy is not None
        torch.testing.assert_close(found.logprobs, expected[:, 0])
        torch.testing.assert_close(found.entropy, -(expected.exp() * expected).sum(1))
        (found.logprobs + found.entropy).sum().backward()
        assert part.grad is not None
        assert part.grad.isfinite().all()

    for layout in ("single", "tp=2"):
        make_world(layout).run(body)


def test_tied_weights() -> None:
    """The weight may also be the embedding; both parts of its gradient arrive.

    With tied embeddings, the output layer of Megatron-LM has no weight of its own.
    """
    hidden, weight, _, labels = example()
    tied, dense = (weight.clone().requires_grad_() for _ in range(2))
    linear_cross_entropy(tied[labels] + hidden, tied, labels).backward()
    F.cross_entropy((dense[labels] + hidden) @ dense.T, labels).backward()
    torch.testing.assert_close(tied.grad, dense.grad)


def test_nothing_is_computed_or_saved_for_backward_without_gradients() -> None:
    hidden, weight, bias, labels = (
        t.requires_grad_() if t.is_floating_point() else t for t in example(64, 8, 96, torch.float32)
    )
    with torch.no_grad(), MemoryWatch() as seen:
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=4)
        logprobs = linear_logprobs(hidden, weight, labels, bias=bias, chunk=4).logprobs
    assert loss.grad_fn is None
    assert logprobs.grad_fn is None
    assert max(seen.sizes) == 8 * 96  # That is the weight, cut to its rows.


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_that_of_torch(reduction: Any) -> None:
    hidden, weight, bias, labels = example()
    labels[2] = -100
    expected = F.cross_entropy(hidden @ weight.T + bias, labels, reduction=reduction)
    found = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(hidden @ weight.T + bias, labels, reduction=reduction), expected
    )


def test_the_module_passes_its_options_on() -> None:
    hidden, weight, bias, labels = example()
    options: dict[str, Any] = {"reduction": "sum", "ignore_index": 3, "temperature": 0.7, "softcap": 5.0, "chunk": 2}
    module = LinearCrossEntropyLoss(**options)
    torch.testing.assert_close(
        module(hidden, weight, labels, bias), linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    )
    assert "temperature=0.7, softcap=5.0" in str(module)
    assert not list(module.parameters())


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_garbage_at_masked_tokens_has_no_effect(garbage: float) -> None:
    hidden, weight, _, labels = example()
    mask = torch.tensor([True, False, True, True, False, True])
    spoilt = hidden.masked_fill(~mask[:, None], garbage)

    def gradients(h: Tensor) -> list[Tensor]:
        leaves = h.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(*leaves, labels, mask=mask, chunk=4)
        logits = (h @ weight.T).detach().requires_grad_()
        parallel = vocab_parallel_cross_entropy(logits, labels, mask=mask)
        return [
            loss.detach(),
            *torch.autograd.grad(loss, leaves),
            parallel.detach(),
            *torch.autograd.grad(parallel, logits),
        ]

    for clean, dirty in zip(gradients(hidden), gradients(spoilt), strict=True):
        assert torch.equal(clean, dirty)


def test_saved_for_backward() -> None:
    """Only the inputs and two numbers for each token are saved."""
    saved: list[int] = []
    hidden, weight, bias, labels = (
        t.requires_grad_() if t.is_floating_point() else t for t in example(dtype=torch.float32)
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):  # type: ignore[func-returns-value]
        linear_logprobs(hidden, weight, labels, bias=bias, entropy=True)
    # The labels, and two numbers for each token.
    assert len(set(saved) - {t.data_ptr() for t in (hidden, weight, bias)}) == 3


@pytest.mark.parametrize("chunk", [2, 64])
def test_collectives(make_world: MakeWorld, chunk: int) -> None:
    """Collectives are those documented, for any number of chunks.

    Forward: a MAX of ``[tokens]`` and a SUM of ``[2, tokens]``. Backward: a SUM of
    ``[tokens, hidden]``.
    """
    hidden, weight, _, labels = example(tokens=8, vocab=8, dtype=torch.bfloat16)

    def body(context: RankContext) -> None:
        rank, group = context.rank, context.mesh.get_group("tp")
        local = weight[4 * rank : 4 * rank + 4].clone().requires_grad_()
        linear_cross_entropy(
            hidden.clone().requires_grad_(), local, labels, vocab_start=4 * rank, tp_group=group, chunk=chunk
        ).backward()

    world = make_world("tp=2")
    world.run(body)
    assert [(e.collective, e.shown) for e in world.log if e.rank == 0] == [
        ("all_reduce", "MAX, [float32[8]]"),
        ("all_reduce", "SUM, [float32[3, 8]]"),
        ("all_reduce", "SUM, [float32[8, 4]]"),
    ]


def test_collectives_of_sequence_parallelism(make_world: MakeWorld) -> None:
    hidden, weight, _, labels = example(tokens=8, vocab=8, dtype=torch.bfloat16)

    def body(context: RankContext) -> None:
        rank, group = context.rank, context.mesh.get_group("tp")
        own, local = (
            hidden[4 * rank : 4 * rank + 4].clone().requires_grad_(),
            weight[4 * rank : 4 * rank + 4].clone().requires_grad_(),
        )
        given: Any = {"vocab_start": 4 * rank, "tp_group": group, "sequence_parallel": True, "chunk": 3}
        linear_logprobs(own, local, labels, entropy=True, **given).logprobs.sum().backward()
        assert own.grad is not None
        assert own.grad.shape == own.shape

    world = make_world("tp=2")
    world.run(body)
    assert [
        e.collective.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")
        for e in world.log
        if e.rank == 0
    ] == [
        "all_gather",
        "all_reduce",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    ]


def test_hidden_states_of_all_tokens_with_sequence_parallelism_are_refused(make_world: MakeWorld) -> None:
    """Sequence parallelism refuses hidden states that every rank has in full.

    In NeMo-RL's kernel, forward then returns right log-probabilities and backward fails.
    """
    hidden, weight, _, labels = example(tokens=8, vocab=8)

    def body(context: RankContext) -> None:
        with pytest.raises(
            ValueError, match=r"hidden \[8, 4\] and labels \[8\]: .* a part of 2; pass this rank's part alone"
        ):
            linear_logprobs(hidden, weight[:4], labels, tp_group=context.mesh.get_group("tp"), sequence_parallel=True)

    make_world("tp=2").run(body)
