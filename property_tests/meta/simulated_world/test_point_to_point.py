# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks: their order, and those that do not fit or never arrive."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.worlds import RankContext
from lossgate.worlds.base import CollectiveMismatch, CollectiveMisuse, Deadlock

from .on_ranks import MakeWorld, failure_of, of_rank


def test_a_ring_of_sends_and_receives(make_world: MakeWorld) -> None:
    def ring(context: RankContext) -> float:
        rank = context.rank
        received = torch.empty(1)
        work = [dist.isend(of_rank(rank, 1), (rank + 1) % 3), dist.irecv(received, (rank - 1) % 3)]
        for handle in work:
            assert handle is not None
            handle.wait()
        return received.item()

    assert make_world("tp=3").run(ring) == [2, 0, 1]


def test_receives_get_messages_in_the_order_in_which_they_were_posted(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> list[float]:
        received = [torch.empty(1), torch.empty(1)]
        if context.rank == 0:
            dist.send(of_rank(1, 1), 1)
            dist.send(of_rank(2, 1), 1)
        else:
            for work in reversed([dist.irecv(tensor, 0) for tensor in received]):
                assert work is not None
                work.wait()
        return [tensor.item() for tensor in received]

    assert make_world("tp=2").run(body)[1] == [1, 2]


def test_batched_and_coalesced_calls(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> list[float]:
        rank, received = context.rank, torch.empty(1)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, of_rank(rank, 1), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        ):
            work.wait()
        a, b = of_rank(rank, 1), of_rank(10 * rank, 2)
        with dist._coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
        return [received.item(), a.item(), *b.tolist()]

    assert make_world("tp=2").run(body) == [[1, 1, 10, 10], [0, 1, 10, 10]]


@pytest.mark.parametrize(
    ("received", "shown"),
    [
        (lambda: torch.empty(3), "rank 1 receives float32[3], but rank 0 sent float32[2]"),
        (lambda: torch.empty(2, 1), "rank 1 receives float32[2, 1], but rank 0 sent float32[2]"),
        (lambda: torch.empty(1), "rank 1 receives float32[1], but rank 0 sent float32[2]"),
        (lambda: torch.empty(2, dtype=torch.bfloat16), "rank 1 receives bfloat16[2], but rank 0 sent float32[2]"),
    ],
)
def test_a_message_that_does_not_fit(make_world: MakeWorld, received: Callable[[], Tensor], shown: str) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(received(), 0)

    assert shown in failure_of(make_world("tp=2"), body, CollectiveMismatch)


def test_a_message_nobody_sends(make_world: MakeWorld) -> None:
    message = failure_of(make_world("tp=2"), lambda context: dist.recv(torch.empty(2), src=1 - context.rank), Deadlock)
    assert "rank 0: in recv(float32[2]) from rank 1 on world[0, 1]" in message


def test_a_send_waits_for_its_receive(make_world: MakeWorld) -> None:
    done: list[str] = []

    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(1), 1)
            done.append("rank 0 sent")
        else:
            dist.barrier(context.mesh.get_group("cp"))  # a group of rank 1 alone: there is nobody to wait for
            done.append("rank 1 receives")
            dist.recv(torch.empty(1), 0)

    make_world("tp=2").run(body)
    assert done == ["rank 1 receives", "rank 0 sent"]


def test_sends_that_cross_are_a_deadlock(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        dist.send(torch.ones(1), 1 - context.rank)
        dist.recv(torch.empty(1), 1 - context.rank)

    lines = failure_of(make_world("tp=2"), body, Deadlock).splitlines()
    for rank, line in enumerate(lines[1:]):
        waits = f"  rank {rank}: in send(float32[1]) to rank {1 - rank} on world[0, 1], tag 0, waits for its receive"
        assert line.startswith(f"{waits}  [")
        assert f"{Path(__file__).name}:" in line
    assert len(lines) == 3


def test_sends_that_cross_in_one_batch(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> list[float]:
        rank, other = context.rank, 1 - context.rank
        received = [torch.empty(1) for _ in range(3)]
        calls = [dist.P2POp(dist.isend, of_rank(10 * rank + i, 1), other) for i in range(3)]
        calls += [dist.P2POp(dist.irecv, tensor, other) for tensor in received]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return [tensor.item() for tensor in received]

    assert make_world("tp=2").run(body) == [[10, 11, 12], [0, 1, 2]]


def test_a_message_to_oneself(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> float:
        received = torch.empty(1)
        for work in (dist.isend(torch.ones(1), 0), dist.irecv(received, 0)):
            assert work is not None
            work.wait()
        return received.item()

    assert make_world("single").run(body) == [1]


def test_a_message_nobody_receives(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(2), 1)

    message = failure_of(make_world("tp=2"), body, Deadlock)
    assert "rank 0: in send(float32[2]) to rank 1 on world[0, 1], tag 0, waits for its receive  [" in message
    assert "rank 1: has returned" in message


def test_a_message_nobody_waits_for_or_receives(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.isend(torch.ones(2), 1)

    message = failure_of(make_world("tp=2"), body, CollectiveMismatch)
    assert message.startswith(
        "rank 0 made a send that rank 1 never received: send(float32[2]) to rank 1 on world[0, 1], tag 0"
    )


def test_a_send_that_is_never_waited_for(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.isend(torch.ones(2), 1)
        else:
            dist.recv(torch.empty(2), 0)

    assert failure_of(make_world("tp=2"), body, CollectiveMisuse).startswith(
        "rank 0 returned without wait() on send(float32[2]) to rank 1 on world[0, 1], tag 0  ["
    )


def test_a_sent_tensor_that_changes_before_wait(make_world: MakeWorld) -> None:
    def body(context: RankContext, early: bool) -> float:
        tensor = of_rank(3, 1)
        if context.rank == 1:
            dist.recv(tensor, 0)
            return tensor.item()
        work = dist.isend(tensor, 1)
        assert work is not None
        if not early:
            work.wait()
        tensor.add_(1)
        work.wait()
        return tensor.item()

    world = make_world("tp=2")
    message = failure_of(world, partial(body, early=True), CollectiveMisuse)
    assert message.startswith(
        "rank 0: the tensor of send(float32[1]) to rank 1 on world[0, 1], tag 0 was changed before wait(); "
    )
    assert world.run(partial(body, early=False)) == [4, 3]


def test_a_receive_that_is_never_waited_for(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            early = torch.zeros(2)
            dist.irecv(early, 0)
            assert early.isnan().all()

    assert failure_of(make_world("tp=2"), body, CollectiveMisuse).startswith(
        "rank 1 returned without wait() on recv(float32[2]) from rank 0 on world"
    )


def test_a_receiving_tensor_that_changes_before_wait(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(1), 1)
            return
        tensor = torch.zeros(1)
        work = dist.irecv(tensor, 0)
        tensor.zero_()
        assert work is not None
        work.wait()

    assert failure_of(make_world("tp=2"), body, CollectiveMisuse).startswith(
        "rank 1: the tensor of recv(float32[1]) from rank 0 on world[0, 1], tag 0 was changed before wait(); "
    )
