# SPDX-License-Identifier: Apache-2.0
"""Tests of top-k and top-p filtering inside kernels, against the dense reference in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dense_losses import filtered_token_entropy, filtered_token_logprobs, kept_tokens, token_logprobs
from fused_losses import linear_logprobs, vocab_parallel_logprobs
from fused_losses.filtering import LogitFilter
from lossgate.worlds import RankContext, SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]
TEMPERATURE = 0.7

FILTERS: dict[str, dict[str, Any]] = {
    "NeMo-RL's tests": {"top_k": 8, "top_p": 0.9},
    "top-k": {"top_k": 3},
    "the largest alone": {"top_k": 1},
    "top-p": {"top_p": 0.6},
    "a small nucleus": {"top_p": 1e-3},
    "more than the vocabulary": {"top_k": 100, "top_p": 0.8},
    "no filter": {},
}


def example(tokens: int = 13, width: int = 5, vocab: int = 21, ties: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    if ties:
        hidden, weight = hidden.round(), weight.round()
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "labels": (hidden @ weight.T).detach().topk(4).indices[:, tokens % 4],
        "upstream": torch.randn(3, tokens, generator=generator, dtype=torch.float64),
    }


def weighted(parts: tuple[Tensor, Tensor, Tensor], upstream: Tensor) -> Tensor:
    """Sums all three, each times its upstream gradients."""
    return sum((u * torch.where(x > -torch.inf, x, 0.0) for u, x in zip(upstream, parts, strict=True))).sum()  # type: ignore[union-attr]


def dense(one: dict[str, Tensor], how: dict[str, Any]) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    logits, labels = one["hidden"] @ one["weight"].T, one["labels"]
    parts = (
        filtered_token_logprobs(logits, labels, TEMPERATURE, **how),
        filtered_token_entropy(logits, TEMPERATURE, **how),
        token_logprobs(logits, labels, TEMPERATURE),
    )
    return parts, torch.autograd.grad(weighted(parts, one["upstream"]), [one["hidden"], one["weight"]])


def fused(kernel: str, one: dict[str, Tensor], how: dict[str, Any], **split: Any) -> Any:
    given: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "entropy": True,
        "unfiltered": True,
        "chunk": 4,
        **how,
        **split,
    }
    if kernel == "linear_logprobs":
        return linear_logprobs(one["hidden"], one["weight"], one["labels"], **given)
    return vocab_parallel_logprobs(one["hidden"] @ one["weight"].T, one["labels"], **given)


@pytest.mark.parametrize("kernel", ["linear_logprobs", "vocab_parallel_logprobs"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("ties", [False, True])
def test_values_and_gradients_are_the_references(kernel: str, name: str, ties: bool) -> None:
    one = example(ties=ties)
    expected, gradients = dense(one, FILTERS[name])
    found = fused(kernel, one, FILTERS[name])
    parts = (found.logprobs, found.entropy, found.unfiltered_logprobs)
    torch.testing.assert_close(parts, expected)
    torch.testing.assert_close(
        torch.autograd.grad(weighted(parts, one["upstream"]), [one["hidden"], one["weight"]]), gradients
    )


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kernel", ["linear_logprobs", "vocab_parallel_logprobs"])
def test_a_split_vocabulary_is_filtered_as_a_whole(make_world: MakeWorld, kernel: str, name: str, ties: bool) -> None:
    """Shards of 1, 12 and 8 rows; the filter's bound is that of the whole vocabulary."""
    one = example(ties=ties)
    edges = [0, 1, 13, 21]
    expected, (grad_hidden, grad_weight) = dense(one, FILTERS[name])

    def body(context: RankContext) -> tuple[Tensor, ...]:
        start, end = edges[context.rank : context.rank + 2]
        own = {**one, "hidden": one["hidden"].detach().requires_grad_()}
        own["weight"] = one["weight"].detach()[start:end].requires_grad_()
        found = fused(kernel, own, FILTERS[name], vocab_start=start, tp_group=context.mesh.get_group("tp"))
        parts = (found.logprobs, found.entropy, found.unfiltered_logprobs)
        gradients = torch.autograd.grad(weighted(parts, one["upstream"]), [own["hidden"], own["weight"]])
        return *(part.detach() for part in parts), *gradients

    ranks = make_world("tp=3").run(body)
    for rank in ranks:
        torch.testing.assert_close(rank[:3], tuple(x.detach() for x in expected))
    torch.testing.assert_close(torch.cat([rank[4] for rank in ranks]), grad_weight)
    hidden = [rank[3] for rank in ranks]
    torch.testing.assert_close(hidden[0] if kernel == "linear_logprobs" else sum(hidden), grad_hidden)


@given(
    logits=st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 2.0, 2.5]), min_size=1, max_size=12),
    top_k=st.none() | st.integers(1, 13),
    top_p=st.sampled_from([1e-6, 0.3, 0.5, 0.77, 0.99, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_bound_divides_what_stays_from_what_goes(
    logits: list[float], top_k: int | None, top_p: float, dtype: torch.dtype
) -> None:
    z = torch.tensor([logits], dtype=dtype)
    how = LogitFilter(top_k, top_p)
    kept = z >= how.bound(z, None)[:, None] if how else torch.ones_like(z, dtype=torch.bool)
    assert kept.tolist() == kept_tokens(z.double(), top_k, top_p).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_lies_halfway_so_that_another_rounding_changes_nothing(dtype: torch.dtype) -> None:
    z = torch.tensor([[4.0, 3.0, 1.0, 0.0]], dtype=dtype)
    assert LogitFilter(top_k=2).bound(z, None).item() == 2.0
    assert LogitFilter(top_p=0.9).bound(z, None).item() == 2.0
    assert LogitFilter(top_k=4).bound(z, None).item() == -torch.inf


@pytest.mark.parametrize("kernel", ["linear_logprobs", "vocab_parallel_logprobs"])
def test_chunks_change_nothing(kernel: str) -> None:
    one, how = example(), FILTERS["NeMo-RL's tests"]
    whole, cut = (fused(kernel, one, how, chunk=chunk) for chunk in (100, 3))
    torch.testing.assert_close(cut.logprobs, whole.logprobs)


@pytest.mark.parametrize("kernel", ["linear_logprobs", "vocab_parallel_logprobs"])
def test_no_tokens(kernel: str) -> None:
    one = example(tokens=0)
    assert fused(kernel, one, FILTERS["NeMo-RL's tests"]).unfiltered_logprobs.shape == (0,)


def test_without_a_filter_both_log_probabilities_are_one() -> None:
    found = fused("linear_logprobs", example(), {})
    torch.testing.assert_close(found.unfiltered_logprobs, found.logprobs, rtol=0, atol=0)
    assert linear_logprobs(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1).long()).unfiltered_logprobs is None
