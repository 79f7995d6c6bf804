# SPDX-License-Identifier: Apache-2.0
"""The process group of a simulated world: one object per rank, as torch has one per process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from lossgate.worlds.base import CollectiveMismatch
from lossgate.worlds.call_sites import call_site
from lossgate.worlds.simulated import collectives
from lossgate.worlds.simulated.collectives import Call, Complete, SimulatedWork, all_of, show, show_list
from lossgate.worlds.simulated.member import Member
from lossgate.worlds.simulated.point_to_point import receive, send
from lossgate.worlds.simulated.reduction import op_name


class SimulatedGroup(Member):
    """One rank's object for a group, with the collectives and the messages between two ranks.

    ``torch.distributed`` functions, functional collectives and DTensor call these methods, in
    forward and in backward. Names and arguments are those of ``torch.distributed.ProcessGroup``.
    Error messages and the log use the names under which torch documents the calls, such as
    ``all_reduce`` for ``allreduce`` and ``all_gather_into_tensor`` for ``all_gather_single``.

    The methods raise ``CollectiveMisuse`` if a thread other than their rank's calls them, and
    ``CollectiveMismatch`` if arguments do not fit together. Unless ``opts.asyncOp`` is set, they
    block, and so can fail with ``Deadlock``.
    """

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        op = _op_of(opts)
        agreed, shown = (op_name(op), *map(show, tensors)), f"{op_name(op)}, {show_list(tensors)}"
        complete = partial(collectives.all_reduce, reduce=self._reducer(op))
        return self._call("all_reduce", agreed, shown, tensors, tensors, complete, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        op, root = opts.reduceOp, opts.rootRank
        agreed = (op_name(op), root, *map(show, tensors))
        shown = f"{op_name(op)}, dst={self.rendezvous.ranks[root]}, {show_list(tensors)}"
        complete = partial(collectives.reduce_to_root, reduce=self._reducer(op), root=root)
        return self._call("reduce", agreed, shown, tensors, tensors, complete, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        root = opts.rootRank
        agreed = (root, *map(show, tensors))
        shown = f"src={self.rendezvous.ranks[root]}, {show_list(tensors)}"
        complete = partial(collectives.broadcast, root=root)
        return self._call("broadcast", agreed, shown, tensors, tensors, complete, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        slots, own = outputs[0], inputs[0]
        self._check_arguments("all_gather", collectives.slots_mismatch(slots, own, self._group_rank, self.size()))
        agreed, shown = tuple(map(show, slots)), f"{show(own)} -> {show_list(slots)}"
        return self._call("all_gather", agreed, shown, [own], list(slots), collectives.all_gather, opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> SimulatedWork:
        name = "all_gather_into_tensor"
        self._check_arguments(name, collectives.size_mismatch("output", output, "input", source, self.size()))
        agreed, shown = (show(output), show(source)), f"{show(source)} -> {show(output)}"
        return self._call(name, agreed, shown, [source], [output], collectives.all_gather_into_tensor, opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        return all_of([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        op, own, parts = _op_of(opts), outputs[0], inputs[0]
        self._check_arguments("reduce_scatter", collectives.parts_mismatch(parts, self.size()))
        agreed = (op_name(op), *map(show, parts))
        shown = f"{op_name(op)}, {show_list(parts)} -> {show(own)}"
        complete = partial(collectives.reduce_scatter, reduce=self._reducer(op))
        return self._call("reduce_scatter", agreed, shown, list(parts), [own], complete, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> SimulatedWork:
        op, name = _op_of(opts), "reduce_scatter_tensor"
        self._check_arguments(name, collectives.size_mismatch("input", source, "output", output, self.size()))
        agreed = (op_name(op), show(output), show(source))
        shown = f"{op_name(op)}, {show(source)} -> {show(output)}"
        complete = partial(collectives.reduce_scatter_tensor, reduce=self._reducer(op))
        return self._call(name, agreed, shown, [source], [output], complete, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        return all_of([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> SimulatedWork:
        name = "all_to_all_single"
        sent = list(input_splits) or [source.shape[0] // self.size()] * self.size()
        received = list(output_splits) or [output.shape[0] // self.size()] * self.size()
        self._check_arguments(name, collectives.cover_mismatch(source, sent, output, received))
        agreed = (str(source.dtype), tuple(source.shape[1:]))
        shown = f"{show(source)}{sent} -> {show(output)}{received}"
        complete = self._if_splits_match(name, collectives.all_to_all_single)
        return self._call(name, agreed, shown, [source], [output], complete, opts, (sent, received))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        agreed, shown = (str(inputs[0].dtype),), f"{show_list(inputs)} -> {show_list(outputs)}"
        splits = ([t.numel() for t in inputs], [t.numel() for t in outputs])
        complete = self._if_splits_match("all_to_all", collectives.all_to_all)
        return self._call("all_to_all", agreed, shown, list(inputs), list(outputs), complete, opts, splits)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        root, parts = opts.rootRank, list(inputs[0]) if inputs else []
        agreed, shown = (root, show(outputs[0])), f"src={self.rendezvous.ranks[root]}, {show(outputs[0])}"
        return self._call("scatter", agreed, shown, parts, outputs, partial(collectives.scatter, root=root), opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        root, slots = opts.rootRank, list(outputs[0]) if outputs else []
        agreed, shown = (root, show(inputs[0])), f"dst={self.rendezvous.ranks[root]}, {show(inputs[0])}"
        return self._call("gather", agreed, shown, inputs, slots, partial(collectives.gather, root=root), opts)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._call("barrier", (), "", [], [], collectives.barrier, opts)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> SimulatedWork:
        self._check_owner("send")
        to = self.rendezvous.ranks[destination]
        return self._work("send", send(self.rendezvous, self._global_rank, tensors[0], to, tag, call_site()))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> SimulatedWork:
        self._check_owner("recv")
        sender = self.rendezvous.ranks[source]
        return self._work("recv", receive(self.rendezvous, self._global_rank, tensors[0], sender, tag, call_site()))

    # Torch calls the same methods by these names too. Its stubs give each its own parameter names.
    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single
    alltoall_base: Any = all_to_all_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    def _if_splits_match(self, name: str, exchange: Complete) -> Complete:
        def complete(calls: Sequence[Call]) -> None:
            if mismatch := collectives.splits_mismatch(calls):
                raise CollectiveMismatch(f"{name} on {self.rendezvous}: {mismatch}")
            exchange(calls)

        return complete


def _op_of(opts: Any) -> Any:
    """Returns the reduce op of torch's options, or a sum if there are no options."""
    return opts.reduceOp if opts is not None else ReduceOp.SUM
