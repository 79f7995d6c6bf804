# SPDX-License-Identifier: Apache-2.0
"""A process group of a simulated world: one object per rank and group, as torch has one per process.

``torch.distributed`` functions, functional collectives and DTensor call its methods, in forward and in backward. The
method names are those that ``torch.distributed.ProcessGroup`` has; what they mean is in torch's documentation of the
function of that name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lossgate.worlds.base import CollectiveMismatch, CollectiveMisuse
from lossgate.worlds.simulated.call_sites import call_site
from lossgate.worlds.simulated.reduction import op_name, reduce_tensors
from lossgate.worlds.simulated.rendezvous import Call, Complete, Rendezvous, receive, send, show

# torch's stubs have no public name for these; the runtime class is what the C++ side accepts.
_WorkBase: Any = dist._Work


class SimulatedWork(_WorkBase):  # type: ignore[misc]
    """The handle of a collective; ``wait`` blocks the rank until every member has brought its call."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        if self._wait is not None:
            self._wait()
            self._wait = None
        return True

    def is_completed(self) -> bool:
        return self._wait is None

    def is_success(self) -> bool:
        return self._wait is None

    def get_future(self) -> torch.futures.Future[None]:
        self.wait()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def _list(tensors: Sequence[Tensor]) -> str:
    return f"[{', '.join(map(show, tensors))}]"


class SimulatedGroup(dist.ProcessGroup):
    """Member ``group_rank`` of the group that meets at ``rendezvous``."""

    def __init__(self, rendezvous: Rendezvous, group_rank: int, name: str, spawn: Callable[..., Any]) -> None:
        super().__init__(group_rank, len(rendezvous.ranks))  # pyright: ignore[reportCallIssue]  the stub has another constructor
        self.rendezvous = rendezvous
        self._group_rank = group_rank
        self._name = name
        self._spawn = spawn

    def __repr__(self) -> str:
        return f"SimulatedGroup({self.rendezvous}, rank {self._global_rank})"

    # What a group is

    def size(self) -> int:
        return len(self.rendezvous.ranks)

    def rank(self) -> int:
        return self._group_rank

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "simulated"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self.rendezvous.label

    def shutdown(self) -> None:
        """Nothing to free."""

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> Any:
        """Hook of ``dist.new_group`` and DeviceMesh: the new group's member for this rank, None if it is not in."""
        return self._spawn(tuple(ranks), group_name, group_desc)

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        op = opts.reduceOp if opts is not None else ReduceOp.SUM

        def complete(calls: Sequence[Call]) -> None:
            totals = [self._reduce([call.inputs[i] for call in calls], op) for i in range(len(tensors))]
            for call in calls:
                _write(call.outputs, totals)

        return self._collective(
            "all_reduce",
            (op_name(op), *map(show, tensors)),
            f"{op_name(op)}, {_list(tensors)}",
            tensors,
            tensors,
            complete,
            opts,
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        op, root = opts.reduceOp, opts.rootRank

        def complete(calls: Sequence[Call]) -> None:
            _write(calls[root].outputs, [self._reduce([call.inputs[0] for call in calls], op)])

        shown = f"{op_name(op)}, dst={self.rendezvous.ranks[root]}, {_list(tensors)}"
        return self._collective(
            "reduce", (op_name(op), root, *map(show, tensors)), shown, tensors, tensors, complete, opts
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        root = opts.rootRank

        def complete(calls: Sequence[Call]) -> None:
            source = [tensor.clone() for tensor in calls[root].inputs]
            for call in calls:
                _write(call.outputs, source)

        shown = f"src={self.rendezvous.ranks[root]}, {_list(tensors)}"
        return self._collective("broadcast", (root, *map(show, tensors)), shown, tensors, tensors, complete, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        slots, own = outputs[0], inputs[0]
        if len(slots) != self.size():
            raise CollectiveMismatch(self._bad("all_gather", f"{len(slots)} outputs for {self.size()} ranks"))
        if slots[self._group_rank].shape != own.shape:
            raise CollectiveMismatch(
                self._bad(
                    "all_gather", f"its own output slot is {show(slots[self._group_rank])}, its input {show(own)}"
                )
            )

        def complete(calls: Sequence[Call]) -> None:
            sources = [call.inputs[0].clone() for call in calls]
            for call in calls:
                _write(call.outputs, sources)

        return self._collective(
            "all_gather", tuple(map(show, slots)), f"{show(own)} -> {_list(slots)}", [own], list(slots), complete, opts
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> SimulatedWork:
        if output.numel() != source.numel() * self.size() or output.dtype != source.dtype:
            raise CollectiveMismatch(
                self._bad(
                    "all_gather_into_tensor", f"output {show(output)} is not {self.size()} times input {show(source)}"
                )
            )

        def complete(calls: Sequence[Call]) -> None:
            gathered = torch.cat([call.inputs[0].reshape(-1) for call in calls])
            for call in calls:
                call.outputs[0].detach().copy_(gathered.view(call.outputs[0].shape))

        return self._collective(
            "all_gather_into_tensor",
            (show(output), show(source)),
            f"{show(source)} -> {show(output)}",
            [source],
            [output],
            complete,
            opts,
        )

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        return _all_of([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        op, own, parts = (opts.reduceOp if opts is not None else ReduceOp.SUM), outputs[0], inputs[0]
        if len(parts) != self.size():
            raise CollectiveMismatch(self._bad("reduce_scatter", f"{len(parts)} inputs for {self.size()} ranks"))

        def complete(calls: Sequence[Call]) -> None:
            totals = [self._reduce([call.inputs[i] for call in calls], op) for i in range(len(calls))]
            for call, total in zip(calls, totals, strict=True):
                _write(call.outputs, [total])

        shown = f"{op_name(op)}, {_list(parts)} -> {show(own)}"
        return self._collective(
            "reduce_scatter", (op_name(op), *map(show, parts)), shown, list(parts), [own], complete, opts
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> SimulatedWork:
        op = opts.reduceOp if opts is not None else ReduceOp.SUM
        if source.numel() != output.numel() * self.size() or output.dtype != source.dtype:
            raise CollectiveMismatch(
                self._bad(
                    "reduce_scatter_tensor", f"input {show(source)} is not {self.size()} times output {show(output)}"
                )
            )

        def complete(calls: Sequence[Call]) -> None:
            total = self._reduce([call.inputs[0].reshape(len(calls), -1) for call in calls], op)
            for call, part in zip(calls, total, strict=True):
                call.outputs[0].detach().copy_(part.view(call.outputs[0].shape))

        shown = f"{op_name(op)}, {show(source)} -> {show(output)}"
        return self._collective(
            "reduce_scatter_tensor",
            (op_name(op), show(output), show(source)),
            shown,
            [source],
            [output],
            complete,
            opts,
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        return _all_of([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> SimulatedWork:
        sent = list(input_splits) or [source.shape[0] // self.size()] * self.size()
        received = list(output_splits) or [output.shape[0] // self.size()] * self.size()
        if sum(sent) != source.shape[0] or sum(received) != output.shape[0]:
            raise CollectiveMismatch(
                self._bad(
                    "all_to_all_single", f"splits {sent} -> {received} do not cover {show(source)} -> {show(output)}"
                )
            )

        def complete(calls: Sequence[Call]) -> None:
            self._check_splits("all_to_all_single", calls)
            parts = [call.inputs[0].split(call.splits[0]) for call in calls]
            for i, call in enumerate(calls):
                call.outputs[0].detach().copy_(torch.cat([part[i] for part in parts]))

        agreed = (str(source.dtype), tuple(source.shape[1:]))
        return self._collective(
            "all_to_all_single",
            agreed,
            f"{show(source)}{sent} -> {show(output)}{received}",
            [source],
            [output],
            complete,
            opts,
            (sent, received),
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        def complete(calls: Sequence[Call]) -> None:
            self._check_splits("all_to_all", calls)
            sources = [[tensor.clone() for tensor in call.inputs] for call in calls]
            for i, call in enumerate(calls):
                _write(call.outputs, [source[i] for source in sources])

        splits = ([t.numel() for t in inputs], [t.numel() for t in outputs])
        return self._collective(
            "all_to_all",
            (str(inputs[0].dtype),),
            f"{_list(inputs)} -> {_list(outputs)}",
            list(inputs),
            list(outputs),
            complete,
            opts,
            splits,
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        root = opts.rootRank

        def complete(calls: Sequence[Call]) -> None:
            for call, part in zip(calls, [tensor.clone() for tensor in calls[root].inputs], strict=True):
                _write(call.outputs, [part])

        shown = f"src={self.rendezvous.ranks[root]}, {show(outputs[0])}"
        return self._collective(
            "scatter", (root, show(outputs[0])), shown, list(inputs[0]) if inputs else [], outputs, complete, opts
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        root = opts.rootRank

        def complete(calls: Sequence[Call]) -> None:
            _write(calls[root].outputs, [call.inputs[0].clone() for call in calls])

        shown = f"dst={self.rendezvous.ranks[root]}, {show(inputs[0])}"
        return self._collective(
            "gather", (root, show(inputs[0])), shown, inputs, list(outputs[0]) if outputs else [], complete, opts
        )

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._collective("barrier", (), "", [], [], _nothing, opts)

    # Point to point

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> SimulatedWork:
        self._check_owner("send")
        send(self.rendezvous, self._global_rank, tensors[0], self.rendezvous.ranks[destination], tag, call_site())
        return SimulatedWork()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> SimulatedWork:
        self._check_owner("recv")
        return SimulatedWork(
            receive(self.rendezvous, self._global_rank, tensors[0], self.rendezvous.ranks[source], tag, call_site())
        )

    # Names of the same methods in other places of torch; the stubs give each its own parameter names
    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single
    alltoall_base: Any = all_to_all_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    @property
    def _global_rank(self) -> int:
        return self.rendezvous.ranks[self._group_rank]

    def _reduce(self, parts: Sequence[Tensor], op: Any) -> Tensor:
        communicator = self.rendezvous.communicator
        return reduce_tensors(parts, op, communicator.order, communicator.next_seed(self.rendezvous.ranks))

    def _collective(
        self,
        name: str,
        agreed: tuple[Any, ...],
        shown: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        complete: Complete,
        opts: Any,
        splits: tuple[list[int], list[int]] = ([], []),
    ) -> SimulatedWork:
        self._check_owner(name)
        call = Call(self._global_rank, name, agreed, shown, inputs, outputs, splits, site=call_site())
        if opts is not None and getattr(opts, "asyncOp", False):
            return SimulatedWork(self.rendezvous.post_in_flight(call, complete))
        self.rendezvous.post(call, complete)
        self.rendezvous.wait(call)
        return SimulatedWork()

    def _check_owner(self, name: str) -> None:
        current = self.rendezvous.communicator.running_rank()
        if current is None:
            raise CollectiveMisuse(f"{name} on {self.rendezvous} outside of its world's run")
        if current != self._global_rank:
            raise CollectiveMisuse(
                f"rank {current} called {name} on the group object of rank {self._global_rank} ({self.rendezvous}): "
                f"it leaked from one rank to another, perhaps by a cache or a global  [{call_site()}]"
            )

    def _check_splits(self, name: str, calls: Sequence[Call]) -> None:
        for i, receiver in enumerate(calls):
            for j, sender in enumerate(calls):
                if sender.splits[0][i] != receiver.splits[1][j]:
                    raise CollectiveMismatch(
                        f"{name} on {self.rendezvous}: rank {sender.rank} sends {sender.splits[0][i]} to rank {receiver.rank}, "
                        f"which expects {receiver.splits[1][j]}  [{sender.site}] [{receiver.site}]"
                    )

    def _bad(self, name: str, why: str) -> str:
        return f"rank {self._global_rank}: {name} on {self.rendezvous}: {why}  [{call_site()}]"


def _nothing(calls: Sequence[Call]) -> None:
    """What a barrier does once everybody has come."""


def _write(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)


def _all_of(works: Sequence[SimulatedWork]) -> SimulatedWork:
    def wait() -> None:
        for work in works:
            work.wait()

    return SimulatedWork(wait)
