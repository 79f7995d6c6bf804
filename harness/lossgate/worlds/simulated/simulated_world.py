# SPDX-License-Identifier: Apache-2.0
"""``SimulatedWorld``: the rank threads of one layout, with their groups and device meshes."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lossgate.base.layout import AXES, Layout
from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.base import CollectiveMisuse, RankContext, StateLeak, T, Task, ranks_along
from lossgate.worlds.process_state import ProcessState, SharedState, ThreadState
from lossgate.worlds.running import running
from lossgate.worlds.simulated.communicator import Communicator, Logged
from lossgate.worlds.simulated.group import SimulatedGroup
from lossgate.worlds.simulated.lockstep import Lockstep
from lossgate.worlds.simulated.point_to_point import check_mail
from lossgate.worlds.simulated.rank_threads import (
    enter_rank_thread,
    forget,
    helper_threads_find,
    install,
    register,
)
from lossgate.worlds.simulated.rendezvous import Rendezvous

_serial = itertools.count()


class SimulatedWorld:
    """Runs tasks on every rank of a layout, with all ranks in this process.

    The rank threads and their groups are made in the first run and serve later runs, until
    ``close`` or until a failed run leaves them unusable. The next run then makes new ones.

    Args:
        layout: the sizes of the mesh axes.
        timeout: seconds for which a rank may neither reach a collective nor return. The run then
            fails with ``Hang``, after at most twice as long.
        device: where all ranks compute: ``"cpu"``, or ``"cuda"`` for the one GPU that they share.
    """

    def __init__(self, layout: Layout, timeout: float = 60.0, device: str = "cpu") -> None:
        self.layout = layout
        self.timeout = timeout
        self.device = torch.device(device)
        self.repeatable = self.device.type == "cpu"
        self._ranks: _Ranks | None = None

    @property
    def log(self) -> list[Logged]:
        """The collectives and sends of the last run, in the order in which ranks called them."""
        return self._ranks.communicator.log if self._ranks else []

    def run(self, task: Task[T], *, order: ReductionOrder = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        """Runs a task on every rank.

        Args:
            task: receives the context of its rank.
            order: the order in which reductions add what the ranks bring.
            seed: the seed of the permutations, if ``order`` is ``"permuted"``.
            patience: factor by which the timeout is multiplied.

        Returns:
            The results of the task, by rank.

        Raises:
            RankFailure: the first failure of a rank. The world serves further runs.
            LossgateError: the task itself raised it. It passes unchanged.
        """
        if self._ranks is None:
            self._ranks = _Ranks(self.layout, self.device)
        try:
            return self._ranks.run(task, order, seed, patience * self.timeout)
        except BaseException:
            if not self._ranks.reusable:
                self.close()
            raise

    def close(self) -> None:
        """Ends the rank threads and makes torch forget their groups."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class _Ranks:
    """The threads, groups and meshes of the ranks, which serve several runs."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        install()
        self.layout, self.device = layout, device
        self.name = f"simulated{next(_serial)}"
        self.lockstep = Lockstep(layout.ranks, self.name)
        self.communicator = Communicator(self.lockstep)
        self._store = dist.HashStore()
        self._rendezvous: dict[Any, Rendezvous] = {}
        self._groups: list[SimulatedGroup] = []
        self._spawned: dict[tuple[int, tuple[int, ...]], int] = {}
        """The number of groups that ranks have made, by the rank and the members of the group."""
        self._spawned_at_start = 0
        """The number of all such groups at the start of the run."""
        self._contexts: list[RankContext | None] = [None] * layout.ranks
        self._default_groups: list[SimulatedGroup | None] = [None] * layout.ranks
        self.mesh = torch.arange(layout.ranks).view(layout.dp, layout.cp, layout.tp)

    def run(self, task: Task[T], order: ReductionOrder, seed: int, timeout: float) -> list[T]:
        communicator = self.communicator
        communicator.start(order, seed)
        self._spawned_at_start = sum(self._spawned.values())
        for rendezvous in self._rendezvous.values():
            rendezvous.reset()
        process = ProcessState.capture()
        try:
            with helper_threads_find(lambda: self._default_groups[self.lockstep.current]), running(self._running_mesh):
                returned = self.lockstep.run(lambda rank: self._run_on(rank, task, process.shared), timeout)
        finally:
            process.restore()
        check_mail(communicator)
        for rank, (_, changes) in enumerate(returned):
            if changes:
                raise StateLeak.of(rank, changes)
        return [result for result, _ in returned]

    def _run_on(self, rank: int, task: Task[T], shared: SharedState) -> tuple[T, list[str]]:
        """Runs a task in the thread of a rank.

        Args:
            rank: the rank.
            task: the task.
            shared: the state of the process at the start of the run.

        Returns:
            The result, and the state that the task left changed, in words.
        """
        context = self._contexts[rank]
        if context is None:
            context = self._contexts[rank] = self._enter(rank)
        thread = ThreadState.capture()
        try:
            result = task(context)
            changes = [*shared.changes(), *thread.changes()]
        finally:
            thread.restore()
        if unwaited := [str(call) for call in self.communicator.in_flight if call.rank == rank]:
            raise CollectiveMisuse(f"rank {rank} returned without wait() on {', '.join(unwaited)}")
        return result, changes

    def _running_mesh(self) -> DeviceMesh | None:
        """Returns the mesh of the rank that holds the baton."""
        context = self._contexts[self.lockstep.current]
        return context.mesh if context is not None else None

    @property
    def reusable(self) -> bool:
        """Whether another run can use these ranks after a failed run.

        It can't if a rank hangs, or if ranks made new groups in the failed run: another rank may
        have failed before it made its member of the group.
        """
        return not self.lockstep.dead and sum(self._spawned.values()) == self._spawned_at_start

    def close(self) -> None:
        self.lockstep.close()
        for group in self._groups:
            forget(group)

    def _enter(self, rank: int) -> RankContext:
        """Joins the groups that every rank has. Called once in each rank thread."""
        everyone = tuple(range(self.layout.ranks))
        self._default_groups[rank] = default = self._join(everyone, rank, "world", ("world",))
        enter_rank_thread(default)
        per_axis: list[dist.ProcessGroup] = [
            self._join(ranks_along(self.layout, rank, axis), rank, axis, (axis,)) for axis in AXES
        ]
        mesh = DeviceMesh.from_group(per_axis, self.device.type, self.mesh, mesh_dim_names=AXES)
        return RankContext(rank, self.layout, mesh, self.device)

    def _join(
        self, ranks: tuple[int, ...], rank: int, label: str, key: tuple[Any, ...], name: str = ""
    ) -> SimulatedGroup:
        """Makes a rank's member of a group. Ranks that give the same key share the group."""
        rendezvous = self._rendezvous.setdefault((*key, ranks), Rendezvous(self.communicator, ranks, label))
        to_register = not name  # groups of dist.new_group come with a name, and torch registers them
        name = name or f"{self.name}.rank{rank}.{label}"
        group = SimulatedGroup(rendezvous, ranks.index(rank), name, self._spawn)
        self._groups.append(group)
        if to_register:
            register(group, name, ranks, self._store)
        return group

    def _spawn(self, ranks: tuple[int, ...], name: str, label: str | None) -> SimulatedGroup | None:
        """Makes the running rank's member of a new group, for ``dist.new_group``.

        The n-th group that a rank makes of certain ranks is the same group as the n-th that another
        rank makes of them.

        Returns:
            The member, or None if the running rank is not among ``ranks``.
        """
        rank = self.lockstep.current
        if rank not in ranks:
            return None
        count = self._spawned.get((rank, ranks), 0)
        self._spawned[rank, ranks] = count + 1
        return self._join(ranks, rank, label or "group", ("new_group", count), name)
