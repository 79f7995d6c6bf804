# SPDX-License-Identifier: Apache-2.0
"""Tests of ``SimulatedRanks``, and of the fixture ``simulated_ranks`` that the plugin gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor, nn

from lossgate import RankContext, RankFailure, SimulatedRanks, UsageError
from lossgate import strategies as drawn
from lossgate.worlds.base import CollectiveMismatch, Deadlock, RankRaised

pytest_plugins = ["pytester"]


def summed(context: RankContext, x: Tensor, axis: str) -> float:
    total = x + context.rank
    dist.all_reduce(total, group=context.mesh.get_group(axis))
    return total.item()


@pytest.mark.parametrize(
    ("layout", "axis", "results"),
    [
        ({}, "tp", [10.0]),
        ({"tp": 2}, "tp", [21.0, 21.0]),
        ({"dp": 2, "cp": 2}, "cp", [21.0, 21.0, 25.0, 25.0]),
        ({"dp": 2, "cp": 2}, "dp", [22.0, 24.0, 22.0, 24.0]),
    ],
)
def test_results_come_by_rank(
    simulated_ranks: SimulatedRanks, layout: dict[str, int], axis: str, results: list[float]
) -> None:
    assert simulated_ranks(summed, torch.tensor(10.0), axis, **layout) == results


@given(layout=drawn.layouts(4))
def test_it_serves_tests_with_hypothesis(simulated_ranks: SimulatedRanks, layout: Any) -> None:
    found = simulated_ranks(lambda context: context.layout, **layout.sizes)
    assert found == [layout] * layout.ranks


def gradient(context: RankContext, weight: Tensor) -> Tensor:
    (weight * (context.rank + 1)).sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_each_rank_has_gradients_of_its_own(simulated_ranks: SimulatedRanks) -> None:
    """Shared leaves would add up the gradients of all ranks."""
    weight = torch.ones(2, requires_grad=True)
    assert [g.tolist() for g in simulated_ranks(gradient, weight, dp=3)] == [[1, 1], [2, 2], [3, 3]]
    assert weight.grad is None


def test_what_arguments_share_their_copies_share(simulated_ranks: SimulatedRanks) -> None:
    model = nn.Linear(2, 2)

    def same(context: RankContext, model: nn.Linear, weight: nn.Parameter) -> bool:
        return model.weight is weight

    assert simulated_ranks(same, model, model.weight, tp=2) == [True, True]


def test_the_log_is_that_of_the_last_call(simulated_ranks: SimulatedRanks) -> None:
    simulated_ranks(summed, torch.tensor(0.0), "tp", tp=2)
    assert [(logged.rank, logged.collective) for logged in simulated_ranks.log] == [
        (0, "all_reduce"),
        (1, "all_reduce"),
    ]
    simulated_ranks(lambda context: None, tp=2)
    assert simulated_ranks.log == []


@pytest.mark.parametrize("order", ["rank", "permuted", "tree", "ring"])
def test_sums_are_added_in_the_order_that_is_asked_for(simulated_ranks: SimulatedRanks, order: Any) -> None:
    numbers = [1e8, 1.0, -1e8, 1.0]

    def total(context: RankContext) -> float:
        x = torch.tensor(numbers[context.rank])
        dist.all_reduce(x)
        return x.item()

    found = simulated_ranks(total, dp=4, order=order, seed=1)
    assert len(set(found)) == 1
    assert found[0] == {"rank": 1.0}.get(order, found[0])


def one_raises(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("no such token")
    dist.barrier()


def one_returns(context: RankContext) -> None:
    if context.rank == 0:
        dist.barrier()


def other_shapes(context: RankContext) -> None:
    dist.all_reduce(torch.zeros(context.rank + 1))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (one_raises, RankRaised, r"rank 1 raised ValueError: no such token  \[.*test_simulated_ranks.py"),
        (one_returns, Deadlock, "rank 1"),
        (other_shapes, CollectiveMismatch, "all_reduce"),
    ],
)
def test_failures_of_ranks_are_named_and_the_next_call_is_served(
    simulated_ranks: SimulatedRanks, function: Callable[..., None], kind: type[RankFailure], message: str
) -> None:
    with pytest.raises(kind, match=message):
        simulated_ranks(function, tp=2)
    assert simulated_ranks(summed, torch.tensor(0.0), "tp", tp=2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "layout", "message"),
    [
        ((3,), {"tp": 2}, r"simulated_ranks\(3\): expected a function of a RankContext"),
        ((summed,), {"tp": 0}, "layout: tp=0 is not a positive whole number"),
        ((summed,), {"tp": 99}, "at most 64 can be simulated"),
        (
            (summed, 1, torch.ones(1, requires_grad=True) * 2),
            {},
            "argument 2, a Tensor, can't be copied for each rank: .*Detach a tensor that has a graph",
        ),
    ],
)
def test_misuse_is_refused(
    simulated_ranks: SimulatedRanks, arguments: tuple[Any, ...], layout: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        simulated_ranks(*arguments, **layout)


def test_closing_ends_the_ranks() -> None:
    import threading

    before = threading.active_count()
    with SimulatedRanks() as ranks:
        ranks(summed, torch.tensor(0.0), "tp", tp=2)
        ranks.world("dp=2").run(lambda context: None)
        assert threading.active_count() == before + 4
    assert threading.active_count() == before


USERS = """
import torch
import torch.distributed as dist

def total(context, x):
    dist.all_reduce(x)
    return x.item()

def test_sum(simulated_ranks):
    assert simulated_ranks(total, torch.tensor(2.0), tp=2, cp=2) == [8.0] * 4

def test_again(simulated_ranks):
    assert simulated_ranks(total, torch.tensor(2.0), tp=2) == [4.0] * 2

def test_failure(simulated_ranks):
    def body(context):
        assert context.rank != 1, "not here"
    simulated_ranks(body, tp=2)
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_failing_test_shows_the_rank_and_no_frames_of_lossgate(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_users=USERS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *workers)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["E *RankRaised: rank 1 raised AssertionError: not here", "E *test_users.py:* in body]"]
    )
    assert "harness/lossgate" not in result.stdout.str()
