# SPDX-License-Identifier: Apache-2.0
"""A collective in a thread that a kernel starts itself fails the run, whatever becomes of it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossgate.worlds import RankContext
from lossgate.worlds.base import CollectiveMisuse

from .on_ranks import MakeWorld, failure_of, of_rank


def in_helper(call: Callable[[], Any]) -> None:
    """Runs a call in a thread that swallows its exceptions, and waits for it."""

    def swallow() -> None:
        with suppress(Exception):
            call()

    thread = threading.Thread(target=swallow, name="mine")
    thread.start()
    thread.join()


CALLS: dict[str, Callable[[RankContext], Any]] = {
    "all_reduce on tp[0, 1]": lambda c: dist.all_reduce(torch.ones(1), group=c.mesh.get_group("tp")),
    "all_reduce on world[0, 1]": lambda _: dist.all_reduce(torch.ones(1)),
    "send on world[0, 1]": lambda c: dist.send(torch.ones(1), 1 - c.rank),
    "recv on world[0, 1]": lambda c: dist.recv(torch.ones(1), 1 - c.rank),
    "new_group on world[0, 1]": lambda _: dist.new_group([0, 1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_helper_thread(make_world: MakeWorld, call: str) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 1:
            in_helper(partial(CALLS[call], context))

    message = failure_of(make_world("tp=2"), body, CollectiveMisuse)
    assert message.startswith(
        f"rank 1 called {call} from the helper thread 'mine'; make the call in the thread in which"
    )
    assert f"{Path(__file__).name}:" in message


def test_a_wait_in_a_helper_thread(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        in_helper(work.wait)
        work.wait()

    message = failure_of(make_world("tp=2"), body, CollectiveMisuse)
    assert message.startswith("rank 0 called wait() of all_reduce on world[0, 1] from the helper thread 'mine'; ")


def test_a_call_in_a_thread_pool_whose_rank_waits_in_a_collective(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
            pool.submit(dist.all_reduce, torch.ones(1), group=context.mesh.get_group("tp"))
            dist.barrier()

    message = failure_of(make_world("tp=2"), body, CollectiveMisuse)
    assert "called all_reduce on tp[0, 1] from the helper thread 'pool_0'" in message


def test_threads_without_collectives_do_no_harm(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> float:
        x = of_rank(context.rank, 1)
        in_helper(lambda: x.add_(dist.get_rank() + dist.get_world_size()))
        in_helper(lambda: 1 / 0)  # with real processes an error in a thread ends nothing else
        dist.all_reduce(x)
        return x.item()

    assert make_world("tp=2").run(body) == [6, 6]


def test_other_threads_have_no_default_group_after_a_run(make_world: MakeWorld) -> None:
    make_world("tp=2").run(lambda context: None)
    found: list[bool] = []
    in_helper(lambda: found.append(dist.is_initialized()))
    assert found == [False]
