# SPDX-License-Identifier: Apache-2.0
"""Our own kernels: verified as candidates, and what a verdict does not speak of: memory, communication, frozen inputs, errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lossgate
from fused_losses import linear_cross_entropy, linear_logprobs, vocab_parallel_cross_entropy, vocab_parallel_logprobs
from lossgate.engine.loading import load_candidates
from lossgate.worlds import RankContext, SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

OURS = Path(__file__).parents[2] / "ci/candidates/ours.py"
linear, vocab_parallel = load_candidates(str(OURS))

test_linear_agrees = lossgate.suite(linear, layouts=["single", "tp=3", "cp=2", "dp=2", "dp=2,cp=2,tp=2"], examples=15)
test_vocab_parallel_agrees = lossgate.suite(vocab_parallel, layouts=["single", "tp=4", "dp=2,cp=2,tp=2"], examples=15)


def example(tokens: int = 6, width: int = 4, vocab: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, torch.randint(vocab, (tokens,), generator=generator)


class Largest(TorchDispatchMode):
    """The number of elements of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sizes |= {leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(temperature: float) -> None:
    hidden, weight, bias, labels = example()
    leaves = tuple(leaf.requires_grad_() for leaf in (hidden, weight, bias))
    chunks: Any = {"token_chunk": 4, "vocab_chunk": 5, "temperature": temperature}
    assert gradcheck(lambda h, w, b: linear_logprobs(h, w, labels, bias=b, **chunks)[0], leaves)
    assert gradcheck(lambda z: vocab_parallel_logprobs(z, labels, temperature=temperature)[0], ((hidden @ weight.T).detach().requires_grad_(),))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_as_torch_has_it(reduction: Any) -> None:
    hidden, weight, bias, labels = example()
    labels[2] = -100
    expected = F.cross_entropy(hidden @ weight.T + bias, labels, reduction=reduction)
    found = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(vocab_parallel_cross_entropy(hidden @ weight.T + bias, labels, reduction=reduction), expected)


def test_parts_of_a_batch_add_up() -> None:
    hidden, weight, _, labels = example()
    mask = torch.tensor([True, False, True, True, False, True])
    whole = linear_cross_entropy(hidden, weight, labels, mask=mask)
    parts = [linear_cross_entropy(hidden[s], weight, labels[s], mask=mask[s], valid_tokens=4) for s in (slice(0, 1), slice(1, 6))]
    torch.testing.assert_close(sum(parts), whole)
    assert linear_cross_entropy(hidden, weight, labels, mask=torch.zeros(6, dtype=torch.bool)) == 0


@pytest.mark.parametrize("frozen", [(), ("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("hidden", "weight")])
def test_frozen_inputs(frozen: tuple[str, ...]) -> None:
    """Each gradient is right whatever else is frozen, and frozen inputs get none."""
    leaves = dict(zip(("hidden", "weight", "bias"), example()[:3], strict=True))
    labels = example()[3]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    linear_logprobs(leaves["hidden"], leaves["weight"], labels, bias=leaves["bias"])[0].sum().backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    logits = leaves["hidden"] @ leaves["weight"].T + leaves["bias"]
    torch.log_softmax(logits, -1).gather(1, labels[:, None]).sum().backward()
    for name, leaf in leaves.items():
        if name in frozen:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], leaf.grad)


@pytest.mark.parametrize("upstream", ["random", "strided", "expanded", "first zero"])
def test_any_upstream_gradient(upstream: str) -> None:
    hidden, weight, _, labels = example()
    given = {
        "random": torch.linspace(-1, 2, 6, dtype=torch.float64),
        "strided": torch.linspace(-1, 2, 12, dtype=torch.float64)[::2],
        "expanded": torch.tensor(0.37, dtype=torch.float64).expand(6),
        "first zero": torch.tensor([0.0, 1, 2, 3, 4, 5], dtype=torch.float64),
    }[upstream]
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    found = torch.autograd.grad(linear_logprobs(hidden, weight, labels)[0], (hidden, weight), given)
    dense = torch.log_softmax(hidden @ weight.T, -1).gather(1, labels[:, None]).squeeze(1)
    for a, b in zip(found, torch.autograd.grad(dense, (hidden, weight), given), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_garbage_at_masked_tokens_has_no_effect(garbage: float) -> None:
    hidden, weight, _, labels = example()
    mask = torch.tensor([True, False, True, True, False, True])
    spoilt = hidden.masked_fill(~mask[:, None], garbage)

    def gradients(h: Tensor) -> list[Tensor]:
        leaves = h.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(*leaves, labels, mask=mask, token_chunk=4, vocab_chunk=5)
        logits = (h @ weight.T).detach().requires_grad_()
        parallel = vocab_parallel_cross_entropy(logits, labels, mask=mask)
        return [loss.detach(), *torch.autograd.grad(loss, leaves), parallel.detach(), *torch.autograd.grad(parallel, logits)]

    for clean, dirty in zip(gradients(hidden), gradients(spoilt), strict=True):
        assert torch.equal(clean, dirty)


def test_inputs_are_left_as_they_were_and_backward_can_run_twice() -> None:
    hidden, weight, bias, labels = example(dtype=torch.bfloat16)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    before = [leaf.detach().clone() for leaf in leaves]
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, leaves), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))
    assert all(leaf.grad is None for leaf in leaves)


def test_the_logits_never_exist() -> None:
    """No tensor of tokens x vocab, nor one that grows with both: beside weight-shaped ones, tiles are the largest."""
    tokens, width, vocab, chunk = 96, 4, 160, 16
    hidden, weight, bias, labels = (t.requires_grad_() if t.is_floating_point() else t for t in example(tokens, width, vocab, torch.float32))
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels, bias=bias, token_chunk=chunk, vocab_chunk=chunk).backward()
    assert max(seen.sizes) == max(vocab * width, tokens * width)
    with Largest() as dense:
        F.cross_entropy(hidden @ weight.T, labels).backward()
    assert max(dense.sizes) == tokens * vocab


def test_saved_for_backward() -> None:
    """The inputs, and two numbers for each token."""
    saved: list[int] = []
    hidden, weight, bias, labels = (t.requires_grad_() if t.is_floating_point() else t for t in example(dtype=torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):  # type: ignore[func-returns-value]
        linear_logprobs(hidden, weight, labels, bias=bias)
    assert len(set(saved) - {t.data_ptr() for t in (hidden, weight, bias)}) == 2


@pytest.mark.parametrize("chunk", [2, 64])
def test_collectives(make_world: MakeWorld, chunk: int) -> None:
    """As documented, whatever the chunks: forward a MAX of T and a SUM of 3 T numbers, backward a SUM of T H."""
    hidden, weight, _, labels = example(tokens=8, vocab=8, dtype=torch.bfloat16)

    def body(context: RankContext) -> None:
        rank, group = context.rank, context.mesh.get_group("tp")
        local = weight[4 * rank : 4 * rank + 4].clone().requires_grad_()
        linear_cross_entropy(
            hidden.clone().requires_grad_(), local, labels, vocab_start=4 * rank, tp_group=group, token_chunk=chunk, vocab_chunk=chunk
        ).backward()

    world = make_world("tp=2")
    world.run(body)
    assert [(e.collective, e.shown) for e in world.log if e.rank == 0] == [
        ("all_reduce", "MAX, [float32[8]]"),
        ("all_reduce", "SUM, [float32[3, 8]]"),
        ("all_reduce", "SUM, [float32[8, 4]]"),
    ]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda h, w, b, y: linear_logprobs(h, w[:, :3], y), r"hidden \[6, 4\] and weight \[9, 3\]: expected \[tokens, H\] and \[vocab, H\]"),
        (lambda h, w, b, y: linear_logprobs(h, w, y[:5]), r"labels \[5\]: expected one for each of 6 tokens"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, bias=b[:5]), r"bias \[5\]: expected one for each of 9 rows of weight"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, temperature=0.0), "temperature 0.0: expected a positive number"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, vocab_rows=10), "vocab_rows 10: weight has 9 rows"),
        (lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y[:5]), r"logits \[6, 9\] and labels \[5\]"),
        (lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y, temperature=-1.0), "temperature -1.0: expected a positive number"),
        (lambda h, w, b, y: linear_cross_entropy(h, w, y, reduction="none"), "reduction 'none': expected 'mean' or 'sum'"),
    ],
)
def test_bad_arguments_are_told(call: Callable[..., Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call(*example())
