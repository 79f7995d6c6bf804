# SPDX-License-Identifier: Apache-2.0
# Kernels use the older names of collectives too.
# pyright: reportDeprecated=false
"""Asynchronous calls: results after ``wait()``, and detection of tensors touched before it."""

import pytest
import torch
import torch.distributed as dist

from lossgate.worlds import RankContext
from lossgate.worlds.base import CollectiveMisuse

from .checks import MakeWorld, failure_of, of_rank


def test_several_calls_in_flight(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> tuple[bool, list[float]]:
        tensors = [of_rank(context.rank + 10 * i, 1) for i in range(3)]
        handles = [dist.all_reduce(t, async_op=True) for t in tensors]
        poisoned = all(bool(t.isnan()) for t in tensors)
        for handle in reversed(handles):
            assert handle is not None
            handle.wait()
        return poisoned, [t.item() for t in tensors]

    assert make_world("tp=2").run(body) == [(True, [1, 21, 41])] * 2


def test_an_all_gather_from_a_slice_of_its_output(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> list[float]:
        whole = torch.zeros(2)
        whole[context.rank] = context.rank + 1
        work = dist.all_gather_into_tensor(whole, whole[context.rank : context.rank + 1], async_op=True)
        assert work is not None
        work.wait()
        return whole.tolist()

    assert make_world("tp=2").run(body) == [[1, 2], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_that_are_read_before_wait_are_extreme_values(make_world: MakeWorld, dtype: torch.dtype) -> None:
    def body(context: RankContext) -> tuple[int, int]:
        x = torch.tensor([context.rank + 1], dtype=dtype)
        work = dist.all_reduce(x, async_op=True)
        early = int(x.item())
        assert work is not None
        work.wait()
        return early, int(x.item())

    assert make_world("tp=2").run(body) == [(torch.iinfo(dtype).min or torch.iinfo(dtype).max, 3)] * 2


def test_a_result_that_is_never_waited_for(make_world: MakeWorld) -> None:
    message = failure_of(make_world("tp=2"), lambda _: dist.all_reduce(torch.ones(1), async_op=True), CollectiveMisuse)
    assert message == "rank 0 returned without wait() on all_reduce(SUM, [float32[1]])"


def test_an_input_changed_in_flight(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        source = torch.ones(1)
        work = dist.all_gather_into_tensor(torch.empty(2), source, async_op=True)
        source.add_(1)
        assert work is not None
        work.wait()

    assert "was changed before wait()" in failure_of(make_world("tp=2"), body, CollectiveMisuse)
