# SPDX-License-Identifier: Apache-2.0
"""The simulated world: ordinary torch.distributed calls work, and misuse is an error at once that says what and where."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from lossgate import Layout
from lossgate.problems.problem import ReductionOrder
from lossgate.worlds import RankContext, SimulatedWorld
from lossgate.worlds.base import CollectiveMismatch, CollectiveMisuse, Deadlock, Hang, RankFailure, RankRaised

MakeWorld = Callable[..., SimulatedWorld]


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.full(shape, float(rank))


def healthy(world: SimulatedWorld) -> bool:
    """The world serves the next example."""

    def total(context: RankContext) -> float:
        x = of_rank(context.rank, 1)
        dist.all_reduce(x)
        return x.item()

    ranks = world.layout.ranks
    return world.run(total) == [ranks * (ranks - 1) / 2] * ranks


# What works


def test_ranks_know_who_they_are(make_world: MakeWorld) -> None:
    def who(context: RankContext) -> tuple[int, int, list[int], bool]:
        mesh = context.mesh
        assert mesh.mesh_dim_names == ("dp", "cp", "tp")
        return (
            dist.get_rank(),
            dist.get_world_size(),
            [mesh.get_local_rank(axis) for axis in ("dp", "cp", "tp")],
            dist.is_initialized(),
        )

    told = make_world("dp=2,tp=3").run(who)
    assert told == [(rank, 6, [rank // 3, 0, rank % 3], True) for rank in range(6)]
    assert not dist.is_initialized()  # the process itself has joined nothing


def test_collectives(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> dict[str, Any]:
        rank, found = context.rank, {}
        for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
            x = of_rank(rank + 1, 2)
            dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
            found[name] = x.tolist()
        gathered = [torch.zeros(r + 1) for r in range(3)]
        dist.all_gather(gathered, of_rank(rank, rank + 1))
        found["all_gather"] = [t.tolist() for t in gathered]
        whole = torch.empty(6)
        dist.all_gather_into_tensor(whole, of_rank(rank, 2))
        found["all_gather_into_tensor"] = whole.tolist()
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(6.0) + rank)
        found["reduce_scatter_tensor"] = part.tolist()
        dist.reduce_scatter(part, list((torch.arange(6.0) * rank).split(2)))
        found["reduce_scatter"] = part.tolist()
        x = of_rank(rank, 1)
        dist.broadcast(x, src=1)
        found["broadcast"] = x.item()
        x = of_rank(rank, 1)
        dist.reduce(x, dst=2)
        found["reduce"] = x.item()
        sent = [1, 2, 3] if rank == 0 else [0, 1, 0]
        received = [([1, 0, 0], [2, 1, 1], [3, 0, 0])[rank][sender] for sender in range(3)]
        out = torch.empty(sum(received))
        dist.all_to_all_single(out, of_rank(rank, sum(sent)), received, sent)
        found["all_to_all_single"] = out.tolist()
        outs = [torch.empty(1) for _ in range(3)]
        dist.all_to_all(outs, [of_rank(10 * rank + to, 1) for to in range(3)])
        found["all_to_all"] = [t.item() for t in outs]
        slots = [torch.empty(1) for _ in range(3)] if rank == 0 else None
        dist.gather(of_rank(rank, 1), slots, dst=0)
        found["gather"] = [t.item() for t in slots] if slots else None
        own = torch.empty(1)
        dist.scatter(own, [of_rank(r, 1) for r in (7, 8, 9)] if rank == 0 else None, src=0)
        found["scatter"] = own.item()
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        found["objects"] = [o["rank"] for o in objects]
        dist.barrier()
        return found

    first, second, third = make_world("tp=3").run(body)
    assert first["SUM"] == second["SUM"] == [6, 6]
    assert [first[name] for name in ("AVG", "MAX", "MIN", "PRODUCT")] == [[2, 2], [3, 3], [1, 1], [6, 6]]
    assert second["all_gather"] == [[0], [1, 1], [2, 2, 2]]
    assert third["all_gather_into_tensor"] == [0, 0, 1, 1, 2, 2]
    assert second["reduce_scatter_tensor"] == [9, 12]
    assert third["reduce_scatter"] == [12, 15]
    assert first["broadcast"] == 1
    assert third["reduce"] == 3
    assert second["all_to_all_single"] == [0, 0, 1, 2]
    assert third["all_to_all"] == [2, 12, 22]
    assert first["gather"] == [0, 1, 2]
    assert third["scatter"] == 9
    assert first["objects"] == [0, 1, 2]


def test_point_to_point(make_world: MakeWorld) -> None:
    def ring(context: RankContext) -> float:
        rank = context.rank
        received = torch.empty(1)
        work = [dist.isend(of_rank(rank, 1), (rank + 1) % 3), dist.irecv(received, (rank - 1) % 3)]
        for handle in work:
            assert handle is not None
            handle.wait()
        return received.item()

    assert make_world("tp=3").run(ring) == [2, 0, 1]


def test_messages_arrive_in_the_order_in_which_receives_were_posted(make_world: MakeWorld) -> None:
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


def test_in_place_into_the_inputs_own_rows(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> list[float]:
        whole = torch.zeros(2)
        whole[context.rank] = context.rank + 1
        work = dist.all_gather_into_tensor(whole, whole[context.rank : context.rank + 1], async_op=True)
        assert work is not None
        work.wait()
        return whole.tolist()

    assert make_world("tp=2").run(body) == [[1, 2], [1, 2]]


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


def test_subgroups(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> list[float]:
        mesh, rank = context.mesh, context.rank
        found: list[float] = []
        for group in (mesh.get_group("tp"), mesh["dp", "tp"]._flatten("dptp").get_group(), dist.new_group([1, 2])):
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            x = of_rank(rank, 1)
            dist.all_reduce(x, group=group)
            found.append(x.item())
        return found

    assert make_world("dp=2,tp=2").run(body) == [[1, 6], [1, 6, 3], [5, 6, 3], [5, 6]]


def test_asynchronous_work_of_several_calls_in_flight(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> tuple[bool, list[float]]:
        tensors = [of_rank(context.rank + 10 * i, 1) for i in range(3)]
        handles = [dist.all_reduce(t, async_op=True) for t in tensors]
        poisoned = all(bool(t.isnan()) for t in tensors)
        for handle in reversed(handles):
            assert handle is not None
            handle.wait()
        return poisoned, [t.item() for t in tensors]

    assert make_world("tp=2").run(body) == [(True, [1, 21, 41])] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_that_are_read_before_they_are_there_are_wrong(make_world: MakeWorld, dtype: torch.dtype) -> None:
    def body(context: RankContext) -> tuple[int, int]:
        x = torch.tensor([context.rank + 1], dtype=dtype)
        work = dist.all_reduce(x, async_op=True)
        early = int(x.item())
        assert work is not None
        work.wait()
        return early, int(x.item())

    assert make_world("tp=2").run(body) == [(torch.iinfo(dtype).min or torch.iinfo(dtype).max, 3)] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_in_backward(make_world: MakeWorld, asynchronous: bool) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            total = upstream.clone()
            work = dist.all_reduce(total, async_op=asynchronous)
            if work is not None:
                work.wait()
            return total * 2

    def body(context: RankContext) -> float:
        x = torch.ones(1, requires_grad=True)
        (Sum.apply(x) * (context.rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    assert make_world("tp=3").run(body) == [12, 12, 12]


def test_functional_collectives_forward_and_backward(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> tuple[list[float], float]:
        mesh = context.mesh["tp"]
        x = of_rank(context.rank + 1, 2).requires_grad_()
        gathered = (
            funcol.all_gather_single_autograd(x, 0, mesh)
            if hasattr(funcol, "all_gather_single_autograd")
            else funcol.all_gather_tensor_autograd(x, 0, mesh)
        )
        (gathered * (context.rank + 1)).sum().backward()
        assert x.grad is not None
        return funcol.all_reduce(x.detach(), "sum", mesh).tolist(), x.grad[0].item()

    assert make_world("tp=2").run(body) == [([3, 3], 3), ([3, 3], 3)]


def test_dtensor(make_world: MakeWorld) -> None:
    whole = torch.arange(10.0).view(2, 5)

    def body(context: RankContext) -> list[list[float]]:
        mesh = context.mesh["tp"]
        local = whole.chunk(2, 1)[mesh.get_local_rank()]
        tensor = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride())
        return F.relu(tensor - 4).sum(1, keepdim=True).full_tensor().tolist()

    assert make_world("tp=2").run(body) == [[[0], [15]]] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_a_collective(make_world: MakeWorld, reentrant: bool) -> None:
    def body(context: RankContext) -> float:
        def scaled(x: Tensor) -> Tensor:
            factor = of_rank(context.rank, 1)
            dist.all_reduce(factor)
            return x * factor

        x = torch.ones(1, requires_grad=True)
        checkpoint(scaled, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    assert make_world("tp=3").run(body) == [3, 3, 3]


def test_two_worlds_and_a_real_group_in_one_process(make_world: MakeWorld) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one, other = make_world("tp=2"), make_world("dp=3")
        assert healthy(one)
        assert healthy(other)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert (x.item(), dist.get_world_size()) == (1, 1)
        assert healthy(one)
    finally:
        dist.destroy_process_group()


def test_runs_are_deterministic_and_logged(make_world: MakeWorld) -> None:
    world = make_world("dp=2,tp=2")

    def body(context: RankContext) -> None:
        dist.all_reduce(torch.ones(2, 3), group=context.mesh.get_group("tp"))
        dist.all_reduce(torch.ones(1, dtype=torch.bfloat16))

    world.run(body)
    first = [(entry.rank, entry.group, entry.collective, entry.shown, entry.bytes) for entry in world.log]
    world.run(body)
    assert first == [(entry.rank, entry.group, entry.collective, entry.shown, entry.bytes) for entry in world.log]
    assert first[0] == (0, "tp[0, 1]", "all_reduce", "SUM, [float32[2, 3]]", 24)
    assert sum(1 for entry in first if entry[1] == "world[0, 1, 2, 3]") == 4
    assert len(first) == 8


def test_sixty_four_ranks(make_world: MakeWorld) -> None:
    assert healthy(make_world("dp=4,cp=4,tp=4"))


def test_ranks_stay_alive_between_runs(make_world: MakeWorld) -> None:
    import threading

    world = make_world("tp=2")
    idents = world.run(lambda context: threading.get_ident())
    assert world.run(lambda context: threading.get_ident()) == idents
    thread = weakref.ref(next(t for t in threading.enumerate() if t.ident == idents[0]))
    world.close()
    assert thread() is None or not thread().is_alive()  # type: ignore[union-attr]


# Reduction orders


@pytest.mark.parametrize("order", ["rank", "permuted", "tree", "ring"])
def test_groups_beside_one_another_add_in_the_same_order(make_world: MakeWorld, order: ReductionOrder) -> None:
    """What each tp rank sums over its own cp group is the same on all of them, bit for bit, whatever the order."""

    def body(context: RankContext) -> list[Tensor]:
        cp, tp = context.mesh.get_group("cp"), context.mesh.get_group("tp")
        sums = []
        for call in range(5):
            if tp.rank() == call % 2:  # other calls in between, of one of them alone
                dist.all_reduce(torch.ones(1), group=context.mesh.get_group("dp"))
            x = 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(10 * call + cp.rank()))
            dist.all_reduce(x, group=cp)
            sums.append(x)
        return sums

    for seed in range(5):
        first, *others = make_world("cp=5,tp=2").run(body, order=order, seed=seed)
        assert all(torch.equal(torch.stack(first), torch.stack(other)) for other in others)


@pytest.mark.parametrize("order", ["rank", "permuted", "tree", "ring"])
def test_orders_agree_up_to_rounding_and_differ_in_it(make_world: MakeWorld, order: ReductionOrder) -> None:
    numbers = torch.randn(7, 501, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    world = make_world("tp=7")

    def body(context: RankContext) -> Tensor:
        x = numbers[context.rank].float()
        dist.all_reduce(x)
        return x

    results = world.run(body, order=order, seed=1)
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0].double() - numbers.sum(0)).abs().max() < 1e-5
    differs = order != "rank"
    assert differs == (not torch.equal(results[0], world.run(body, order="rank")[0]))


def test_permutation_hangs_on_the_seed(make_world: MakeWorld) -> None:
    world = make_world("tp=8")

    def body(context: RankContext) -> Tensor:
        x = torch.randn(100, generator=torch.Generator().manual_seed(context.rank))
        dist.all_reduce(x)
        return x

    one, again, other = (world.run(body, order="permuted", seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


# What fails, how it is told, and that the world serves the next example


def fails(world: SimulatedWorld, body: Callable[[RankContext], Any], kind: type[RankFailure]) -> str:
    assert healthy(world)
    with pytest.raises(kind) as error:
        world.run(body)
    assert healthy(world)
    return str(error.value)


@pytest.mark.parametrize(
    ("bring", "told"),
    [
        (
            lambda r: dist.all_reduce(torch.ones(2 + r)),
            ("all_reduce(SUM, [float32[2]])", "all_reduce(SUM, [float32[3]])"),
        ),
        (lambda r: dist.all_reduce(torch.ones(2, 1) if r else torch.ones(2)), ("float32[2]", "float32[2, 1]")),
        (
            lambda r: dist.all_reduce(torch.ones(1, dtype=torch.bfloat16 if r else torch.float32)),
            ("float32[1]", "bfloat16[1]"),
        ),
        (
            lambda r: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if r else dist.ReduceOp.SUM),
            ("all_reduce(SUM", "all_reduce(MAX"),
        ),
        (
            lambda r: dist.broadcast(torch.ones(1), src=0) if r else dist.all_reduce(torch.ones(1)),
            ("all_reduce(SUM", "broadcast(src=0"),
        ),
        (lambda r: dist.broadcast(torch.ones(1), src=r), ("broadcast(src=0", "broadcast(src=1")),
        (lambda r: dist.barrier() if r else dist.all_reduce(torch.ones(1)), ("all_reduce(SUM", "barrier()")),
    ],
)
def test_mismatched_collectives(make_world: MakeWorld, bring: Callable[[int], Any], told: tuple[str, str]) -> None:
    message = fails(make_world("tp=2"), lambda context: bring(context.rank), CollectiveMismatch)
    lines = message.splitlines()
    assert lines[0] == "collective mismatch on world[0, 1] at call #0:"
    for rank, line in enumerate(lines[1:]):
        assert line.startswith(f"  rank {rank}: {told[rank]}") or told[rank] in line
        assert "test_simulated_world.py:" in line  # where it was called


def test_splits_that_do_not_fit(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        dist.all_to_all_single(torch.empty(2), torch.ones(2), [1, 1], [2, 0] if context.rank else [1, 1])

    assert "rank 1 sends 2 to rank 0, which expects 1" in fails(make_world("tp=2"), body, CollectiveMismatch)


def test_local_misfits_are_told_at_once(make_world: MakeWorld) -> None:
    world = make_world("tp=2")
    cases: dict[str, Callable[[RankContext], Any]] = {
        "output float32[3] is not 2 times input float32[2]": lambda _: dist.all_gather_into_tensor(
            torch.empty(3), torch.ones(2)
        ),
        "input float32[3] is not 2 times output float32[1]": lambda _: dist.reduce_scatter_tensor(
            torch.empty(1), torch.ones(3)
        ),
        "1 outputs for 2 ranks": lambda _: dist.all_gather([torch.empty(1)], torch.ones(1)),
        "its own output slot is float32[2], its input float32[1]": lambda _: dist.all_gather(
            [torch.empty(2)] * 2, torch.ones(1)
        ),
        "1 inputs for 2 ranks": lambda _: dist.reduce_scatter(torch.empty(1), [torch.ones(1)]),
    }
    for told, body in cases.items():
        assert told in fails(world, body, CollectiveMismatch)


@pytest.mark.parametrize(
    ("received", "told"),
    [
        (lambda: torch.empty(3), "rank 1 receives float32[3], rank 0 sent float32[2]"),
        (lambda: torch.empty(2, 1), "rank 1 receives float32[2, 1], rank 0 sent float32[2]"),
        (lambda: torch.empty(1), "rank 1 receives float32[1], rank 0 sent float32[2]"),
        (lambda: torch.empty(2, dtype=torch.bfloat16), "rank 1 receives bfloat16[2], rank 0 sent float32[2]"),
    ],
)
def test_a_message_that_does_not_fit(make_world: MakeWorld, received: Callable[[], Tensor], told: str) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(received(), 0)

    assert told in fails(make_world("tp=2"), body, CollectiveMismatch)


def test_a_missing_call_is_a_deadlock(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank != 2:
            dist.all_reduce(torch.ones(5), group=context.mesh.get_group("tp"))

    start = time.perf_counter()
    message = fails(make_world("tp=3"), body, Deadlock)
    assert time.perf_counter() - start < 5  # found, not timed out
    assert "rank 0: in all_reduce(SUM, [float32[5]]) #0 on tp[0, 1, 2], waits for ranks [2]" in message
    assert "rank 2: has returned" in message
    assert "test_simulated_world.py:" in message


def test_calls_in_another_order_are_a_deadlock(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        groups = [context.mesh.get_group("tp"), dist.new_group([0, 1])]
        for group in reversed(groups) if context.rank else groups:
            dist.all_reduce(torch.ones(1), group=group)

    assert "rank 1: in all_reduce" in fails(make_world("tp=2"), body, Deadlock)


def test_a_message_nobody_sends(make_world: MakeWorld) -> None:
    message = fails(make_world("tp=2"), lambda context: dist.recv(torch.empty(2), src=1 - context.rank), Deadlock)
    assert "rank 0: in recv(float32[2]) from rank 1 on world[0, 1]" in message


def test_a_message_nobody_receives(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(2), 1)

    message = fails(make_world("tp=2"), body, CollectiveMismatch)
    assert message.startswith("rank 0 sent what rank 1 never received: float32[2] to rank 1 on world[0, 1], tag 0  [")


def test_a_receive_that_is_never_waited_for(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            early = torch.zeros(2)
            dist.irecv(early, 0)
            assert early.isnan().all()

    assert fails(make_world("tp=2"), body, CollectiveMisuse).startswith(
        "rank 1 returned without wait() in recv(float32[2]) from rank 0 on world"
    )


def test_a_raising_rank_is_named(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 1:
            raise ValueError("no such thing")
        dist.barrier()

    world = make_world("tp=3")
    message = fails(world, body, RankRaised)
    assert message.startswith("rank 1 raised ValueError: no such thing  [")
    assert "test_simulated_world.py:" in message
    with pytest.raises(RankRaised) as error:
        world.run(body)
    assert error.value.rank == 1
    assert isinstance(error.value.__cause__, ValueError)


def test_a_failure_can_not_be_swallowed_by_other_ranks(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 1:
            raise ValueError("first")
        try:
            dist.barrier()
        except Exception as error:  # a kernel that catches too much
            raise RuntimeError("second") from error

    assert "rank 1 raised ValueError: first" in fails(make_world("tp=2"), body, RankRaised)


def test_a_hanging_rank_is_named_with_its_stack(make_world: MakeWorld) -> None:
    def spin(context: RankContext) -> None:
        while context.rank == 1:
            pass

    message = fails(make_world("tp=2", timeout=0.5), spin, Hang)
    assert "hang: rank 1 neither reached a collective nor returned within 0.5 s" in message
    assert "while context.rank == 1" in message


def test_a_slow_run_that_goes_on_is_no_hang(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        for _ in range(8):
            time.sleep(0.1)
            dist.barrier()

    make_world("tp=2", timeout=0.5).run(body)


def test_a_rank_that_hangs_where_python_can_not_interrupt_it(make_world: MakeWorld) -> None:
    def sleep(context: RankContext) -> None:
        if context.rank == 0:
            time.sleep(2.5)
        dist.barrier()

    assert "time.sleep(2.5)" in fails(make_world("tp=2", timeout=0.5), sleep, Hang)


def test_use_of_another_ranks_group(make_world: MakeWorld) -> None:
    world, cache = make_world("tp=2"), dict[str, Any]()

    def body(context: RankContext) -> None:
        dist.all_reduce(torch.ones(1), group=cache.setdefault("tp", context.mesh.get_group("tp")))

    message = fails(world, body, CollectiveMisuse)
    assert (
        "rank 1 called all_reduce on the group object of rank 0 (tp[0, 1]): it leaked from one rank to another"
        in message
    )
    with pytest.raises(CollectiveMisuse, match="outside of its world's run"):
        dist.all_reduce(torch.ones(1), group=cache["tp"])


def test_a_result_that_is_never_waited_for(make_world: MakeWorld) -> None:
    message = fails(make_world("tp=2"), lambda _: dist.all_reduce(torch.ones(1), async_op=True), CollectiveMisuse)
    assert message == "rank 0 returned without wait() on all_reduce(SUM, [float32[1]])"


def test_an_input_changed_in_flight(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        source = torch.ones(1)
        work = dist.all_gather_into_tensor(torch.empty(2), source, async_op=True)
        source.add_(1)
        assert work is not None
        work.wait()

    assert "was changed before wait()" in fails(make_world("tp=2"), body, CollectiveMisuse)


def test_a_reduction_that_can_not_be_simulated(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))

    with pytest.raises(RankFailure, match="PREMUL_SUM can't be simulated; use SUM"):
        make_world("tp=2").run(body)


def test_groups_made_by_some_ranks_of_a_failed_run_do_no_harm(make_world: MakeWorld) -> None:
    world = make_world("tp=2")

    def body(context: RankContext, fail: bool) -> float:
        if fail and context.rank == 1:
            raise ValueError
        x = of_rank(context.rank, 1)
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        return x.item()

    with pytest.raises(RankRaised):
        world.run(lambda context: body(context, fail=True))
    assert world.run(lambda context: body(context, fail=False)) == [1, 1]


def test_layout_is_kept(make_world: MakeWorld) -> None:
    assert make_world("dp=2,tp=2").layout == Layout(dp=2, tp=2)
