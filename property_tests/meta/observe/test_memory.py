# SPDX-License-Identifier: Apache-2.0
"""The watch counts what operations make and what of it lives, each storage once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lossgate.observe import MemoryWatch

FLOATS = 4
"""Bytes of a float32."""


def test_what_lives_is_counted_until_it_is_dropped() -> None:
    watch = MemoryWatch()
    with watch:
        one = torch.ones(100)
        two = one + 1
        assert watch.alive == 200 * FLOATS
        del one
        assert watch.alive == 100 * FLOATS
        del two
    assert watch.alive == 0
    assert watch.peak_bytes == 200 * FLOATS


def test_views_and_inputs_are_not_counted() -> None:
    given = torch.ones(10, 10)
    watch = MemoryWatch([given])
    with watch:
        view = given[2:].t()
        given.add_(1)
        wide = torch.ones(()).expand(1000, 1000)
    assert (watch.alive, watch.peak_bytes) == (FLOATS, FLOATS)
    assert view.numel() in watch.sizes
    assert wide.numel() == 1_000_000
    assert (made := watch.largest["forward"]) is not None
    assert made.elements == 1


def test_a_storage_that_grows_counts_with_its_new_size() -> None:
    watch = MemoryWatch()
    with watch:
        tensor = torch.empty(0)
        torch.add(torch.ones(50), 1.0, out=tensor)
        assert watch.alive == 50 * FLOATS
    assert tensor.numel() == 50


def test_what_autograd_keeps_lives_until_backward() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    watch = MemoryWatch([leaf])
    with watch.during("forward"):
        loss = leaf.exp().exp().sum()  # each exp keeps its result
    assert watch.alive_without([loss]) == 2000 * FLOATS
    with watch.during("backward"):
        loss.backward()
    assert leaf.grad is not None
    assert watch.alive_without([loss]) == 1000 * FLOATS
    assert watch.peak["backward"] >= 3000 * FLOATS
    assert watch.peak["forward"] == 2001 * FLOATS


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros(777, dtype=torch.float64).sum().float() + gradient.expand(10)


def test_a_backward_of_its_own_is_seen() -> None:
    leaf = torch.ones(10, requires_grad=True)
    watch = MemoryWatch([leaf])
    with watch.during("forward"):
        loss = OwnBackward.apply(leaf)
    with watch.during("backward"):
        loss.backward()  # type: ignore[union-attr]
    made = watch.largest["backward"]
    assert made is not None
    assert (made.elements, made.bytes, made.shown, made.phase) == (777, 777 * 8, "float64[777]", "backward")
    assert watch.largest_bytes == 777 * 8


def test_what_the_host_would_wait_for_is_counted() -> None:
    values = torch.arange(4.0)
    watch = MemoryWatch([values])
    with watch:
        _ = values.sum().item(), bool(values.any()), values[values > 1], torch.equal(values, values)
        _ = values + 1, torch.where(values > 1, values, 0.0), values[torch.tensor([0, 2])]
    assert watch.host_waits == [
        "aten._local_scalar_dense.default",
        "aten._local_scalar_dense.default",
        "aten.index.Tensor",
        "aten.equal.default",
    ]


def test_of_a_wrapper_the_tensor_inside_is_counted() -> None:
    """As of a DTensor, which says that it has the size of the whole."""
    from torch.testing._internal.two_tensor import TwoTensor

    one = TwoTensor(torch.ones(100), torch.ones(100))
    watch = MemoryWatch()
    with watch:
        two = one + 1
    assert isinstance(two, TwoTensor)
    assert watch.alive == 2 * 100 * FLOATS  # those of both tensors inside


@pytest.mark.parametrize("tokens", [8, 64])
def test_it_counts_what_torchs_own_tracker_counts(tokens: int) -> None:
    """Torch's tracker knows no phases and no largest tensor, and takes twice as long."""
    from torch.distributed._tools.mem_tracker import MemTracker

    def step() -> None:
        hidden, weight = torch.ones(tokens, 5, requires_grad=True), torch.ones(31, 5, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.long)
        torch.nn.functional.cross_entropy(hidden @ weight.T, labels).backward()

    tracker, watch = MemTracker(), MemoryWatch()
    with tracker:
        step()
    with watch:
        step()
    (counted,) = tracker.get_tracker_snapshot("peak").values()
    assert watch.peak_bytes == counted["Total"]
