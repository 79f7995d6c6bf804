# SPDX-License-Identifier: Apache-2.0
# Kernels use the older names of collectives too.
# pyright: reportDeprecated=false
"""Asynchronous calls: results after ``wait()``, and detection of tensors touched before it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.worlds import RankContext
from lossgate.worlds.base import CollectiveMisuse

from .on_ranks import MakeWorld, failure_of, of_rank


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

    message = failure_of(make_world("tp=2"), body, CollectiveMisuse)
    assert message.startswith(
        "rank 0: the input float32[1] of all_gather_into_tensor(float32[1] -> float32[2]) #0 on world[0, 1] "
        "was changed before wait(); call wait() first, or use another tensor  ["
    )
    assert f"{Path(__file__).name}:" in message


WRITES: dict[str, Callable[[Tensor], object]] = {
    "multiplies a part": lambda t: t[:1].mul_(t[:1]),  # NaN times NaN is NaN
    "fills it with what it finds": lambda t: t.fill_(t[0].item()),
    "copies to it": lambda t: t.copy_(torch.ones_like(t)),
    "fills its data": lambda t: t.data.fill_(0),
    "fills it as an array": lambda t: t.numpy().fill(0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("write", WRITES)
def test_an_output_written_to_in_flight(make_world: MakeWorld, write: str, dtype: torch.dtype) -> None:
    def body(context: RankContext) -> None:
        tensor = torch.ones(2, dtype=dtype)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
        if context.rank == 1:
            WRITES[write](tensor)
        assert work is not None
        work.wait()

    name = str(dtype).removeprefix("torch.")
    assert failure_of(make_world("tp=2"), body, CollectiveMisuse).startswith(
        f"rank 1: the output {name}[2] of all_reduce(MAX, [{name}[2]]) #0 on world[0, 1] was changed before wait(); "
    )


def test_a_slot_written_to_in_flight(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        buffer = torch.zeros(4)
        work = dist.all_gather(list(buffer.split(2)), torch.ones(2), async_op=True)
        buffer[3] = 1
        assert work is not None
        work.wait()

    assert "the output float32[2] of all_gather" in failure_of(make_world("tp=2"), body, CollectiveMisuse)


def test_a_kernel_may_read_and_may_write_beside_what_is_in_flight(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> tuple[list[float], float]:
        buffer = torch.zeros(5)
        buffer[:2], buffer[4] = context.rank, 7 + context.rank
        whole, empty, leaf = torch.ones(2), torch.ones(0), torch.ones(2, requires_grad=True)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (buffer[:2], whole, empty)]
        works += [dist.all_gather(list(buffer[2:4].split(1)), buffer[4:], async_op=True)]
        works += [dist.all_gather_into_tensor(torch.empty(4), leaf, async_op=True)]
        (leaf * whole * buffer[:2]).sum().backward()
        empty.add_(1)
        for work in works:
            assert work is not None
            work.wait()
        buffer[:2].add_(whole)
        return buffer.tolist(), whole[0].item()

    assert make_world("tp=2").run(body) == [([3, 3, 7, 8, 7], 2), ([3, 3, 7, 8, 8], 2)]


def test_inference_tensors_in_flight(make_world: MakeWorld) -> None:
    """Torch counts no writes to them."""

    def body(context: RankContext, write: bool) -> float:
        with torch.inference_mode():
            tensor = of_rank(context.rank, 1)
            work = dist.all_reduce(tensor, async_op=True)
            if write:
                tensor.fill_(1)
            assert work is not None
            work.wait()
            return tensor.item()

    world = make_world("tp=2")
    assert world.run(partial(body, write=False)) == [1, 1]
    assert "was changed before wait()" in failure_of(world, partial(body, write=True), CollectiveMisuse)
