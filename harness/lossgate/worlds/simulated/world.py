# SPDX-License-Identifier: Apache-2.0
"""The ranks of one layout, their groups and their meshes."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lossgate.layout import AXES, Layout
from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.base import Body, CollectiveMisuse, RankContext, T
from lossgate.worlds.simulated.group import SimulatedGroup
from lossgate.worlds.simulated.lockstep import Lockstep
from lossgate.worlds.simulated.registry import enter_rank_thread, forget, install, register
from lossgate.worlds.simulated.rendezvous import Communicator, Logged, Rendezvous, check_mail

_serial = itertools.count()


class SimulatedWorld:
    """See the package. ``timeout``: seconds after which a rank that reaches no collective is taken to hang."""

    def __init__(self, layout: Layout, timeout: float = 60.0) -> None:
        self.layout = layout
        self.timeout = timeout
        self._ranks: _Ranks | None = None

    @property
    def log(self) -> list[Logged]:
        """What the ranks sent in the last run, in order."""
        return self._ranks.communicator.log if self._ranks else []

    def run(self, body: Body[T], *, order: ReductionOrder = "rank", seed: int = 0) -> list[T]:
        if self._ranks is None:
            self._ranks = _Ranks(self.layout)
        try:
            return self._ranks.run(body, order, seed, self.timeout)
        except BaseException:
            if not self._ranks.reusable:
                self.close()
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class _Ranks:
    """Threads, groups and meshes, made once and kept."""

    def __init__(self, layout: Layout) -> None:
        install()
        self.layout = layout
        self.name = f"simulated{next(_serial)}"
        self.lockstep = Lockstep(layout.ranks, self.name)
        self.communicator = Communicator(self.lockstep)
        self._store = dist.HashStore()
        self._rendezvous: dict[Any, Rendezvous] = {}
        self._groups: list[SimulatedGroup] = []
        self._spawned: dict[Any, int] = {}
        self._spawned_at_start = 0
        self._contexts: list[RankContext | None] = [None] * layout.ranks
        self.mesh = torch.arange(layout.ranks).view(layout.dp, layout.cp, layout.tp)

    def run(self, body: Body[T], order: ReductionOrder, seed: int, timeout: float) -> list[T]:
        communicator = self.communicator
        communicator.start(order, seed)
        self._spawned_at_start = sum(self._spawned.values())
        for rendezvous in self._rendezvous.values():
            rendezvous.reset()

        def on_rank(rank: int) -> T:
            context = self._contexts[rank]
            if context is None:
                context = self._contexts[rank] = self._enter(rank)
            result = body(context)
            if left := [str(call) for _, call in communicator.in_flight if call.rank == rank]:
                raise CollectiveMisuse(f"rank {rank} returned without wait() on {', '.join(left)}")
            return result

        results = self.lockstep.run(on_rank, timeout)
        check_mail(communicator)
        return results

    @property
    def reusable(self) -> bool:
        """After a failed run: no rank hangs, and none is left with a new group that the others did not make."""
        return not self.lockstep.dead and sum(self._spawned.values()) == self._spawned_at_start

    def close(self) -> None:
        self.lockstep.close()
        for group in self._groups:
            forget(group)

    def _enter(self, rank: int) -> RankContext:
        """In a new rank thread: join the groups that every rank has."""
        everyone = tuple(range(self.layout.ranks))
        enter_rank_thread(self._join(everyone, rank, "world", ("world",)))
        per_axis: list[dist.ProcessGroup] = [
            self._join(self._fiber(rank, axis), rank, name, (name,)) for axis, name in enumerate(AXES)
        ]
        mesh = DeviceMesh.from_group(per_axis, "cpu", self.mesh, mesh_dim_names=AXES)
        return RankContext(rank, self.layout, mesh)

    def _fiber(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along one mesh axis alone."""
        at = list(self.layout.coordinate(rank).values())
        index = [slice(None) if i == axis else at[i] for i in range(len(AXES))]
        return tuple(self.mesh[tuple(index)].tolist())

    def _join(
        self, ranks: tuple[int, ...], rank: int, label: str, key: tuple[Any, ...], name: str = ""
    ) -> SimulatedGroup:
        rendezvous = self._rendezvous.setdefault((*key, ranks), Rendezvous(self.communicator, ranks, label))
        ours = not name
        name = name or f"{self.name}.rank{rank}.{label}"
        group = SimulatedGroup(rendezvous, ranks.index(rank), name, self._spawn)
        self._groups.append(group)
        if ours:
            register(group, name, ranks, self._store)
        return group

    def _spawn(self, ranks: tuple[int, ...], name: str, label: str | None) -> SimulatedGroup | None:
        """``dist.new_group`` in a rank: its n-th group of these ranks meets the n-th of the others."""
        rank = self.lockstep.current
        if rank not in ranks:
            return None
        count = self._spawned.get((rank, ranks), 0)
        self._spawned[rank, ranks] = count + 1
        return self._join(ranks, rank, label or "group", ("new_group", count), name)
