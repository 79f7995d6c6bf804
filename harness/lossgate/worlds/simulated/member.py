# SPDX-License-Identifier: Apache-2.0
"""One rank's membership of a group: its identity, its calls, and who may use the object."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lossgate.worlds.base import CollectiveMismatch, CollectiveMisuse
from lossgate.worlds.call_sites import call_site
from lossgate.worlds.simulated.collectives import Call, Complete, Reduce, SimulatedWork
from lossgate.worlds.simulated.in_flight import post_in_flight
from lossgate.worlds.simulated.rank_threads import BACKEND
from lossgate.worlds.simulated.reduction import reduce_tensors
from lossgate.worlds.simulated.rendezvous import Rendezvous


class Member(dist.ProcessGroup):
    """One rank's object for a group, without the collectives.

    Args:
        rendezvous: the meeting point that the members share.
        group_rank: the rank within the group.
        name: the name under which functional collectives find this object.
        spawn: makes the rank's member of a new group, given ranks, name and label.
    """

    def __init__(self, rendezvous: Rendezvous, group_rank: int, name: str, spawn: Callable[..., Any]) -> None:
        # The stub has another constructor.
        super().__init__(group_rank, len(rendezvous.ranks))  # pyright: ignore[reportCallIssue]
        self.rendezvous = rendezvous
        self._group_rank = group_rank
        self._name = name
        self._spawn = spawn

    def __repr__(self) -> str:
        return f"SimulatedGroup({self.rendezvous}, rank {self._global_rank})"

    def size(self) -> int:
        return len(self.rendezvous.ranks)

    def rank(self) -> int:
        return self._group_rank

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self.rendezvous.label

    def _get_backend(self, device: Any) -> Any:
        """Returns this object. Torch 2.14 and newer ones ask it whether sends can be coalesced."""
        return self

    def shutdown(self) -> None:
        """Does nothing, because there is nothing to free."""

    def new_group(
        self, ranks: Sequence[int], *, group_name: str = "", group_desc: str | None = None, **others: Any
    ) -> Any:
        """Makes this rank's member of a new group. ``dist.new_group`` and ``DeviceMesh`` call this.

        Args:
            ranks: the members of the new group, as ranks of the world.
            group_name: the name under which functional collectives find the new object.
            group_desc: the label in messages and in the log.
            others: ignored. Which there are hangs on the version of torch.

        Returns:
            The member, or None if this rank is not in the new group.
        """
        self._check_owner("new_group")
        return self._spawn(tuple(ranks), group_name, group_desc)

    @property
    def _global_rank(self) -> int:
        return self.rendezvous.ranks[self._group_rank]

    def _call(
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
        """Makes this member's call of a collective. Waits for the others, unless asynchronous.

        Args:
            name, agreed, shown, inputs, outputs, splits: the fields of ``Call``.
            complete: does the work once all members have called.
            opts: torch's options of the collective; ``asyncOp`` makes it asynchronous.
        """
        self._check_owner(name)
        call = Call(self._global_rank, name, agreed, shown, inputs, outputs, splits, site=call_site())
        if opts is not None and getattr(opts, "asyncOp", False):
            return self._work(name, post_in_flight(self.rendezvous, call, complete))
        self.rendezvous.post(call, complete)
        self.rendezvous.wait(call)
        return SimulatedWork()

    def _work(self, name: str, wait: Callable[[], None]) -> SimulatedWork:
        """Returns the handle of a call. Only the thread of this member's rank may wait on it."""

        def wait_here() -> None:
            self._check_owner(f"wait() of {name}")
            wait()

        return SimulatedWork(wait_here)

    def _reducer(self, op: Any) -> Reduce:
        """Returns the function that reduces by ``op`` in the order of the run."""

        def reduce(parts: Sequence[Tensor]) -> Tensor:
            communicator = self.rendezvous.communicator
            return reduce_tensors(parts, op, communicator.order, communicator.next_seed(self.rendezvous.ranks))

        return reduce

    def _check_owner(self, name: str) -> None:
        """Raises ``CollectiveMisuse`` unless the thread of this member's rank is running.

        In a thread that the kernel started itself, it also fails the run: the exception may end
        only that thread, and the rank would go on.
        """
        lockstep = self.rendezvous.communicator.lockstep
        current = lockstep.rank_of_this_thread()
        if current is None and lockstep.running:
            misuse = CollectiveMisuse(
                f"rank {self._global_rank} called {name} on {self.rendezvous} from the helper thread "
                f"{threading.current_thread().name!r}; make the call in the thread in which the kernel was called: "
                f"calls of several threads have no order that all ranks share  [{call_site()}]"
            )
            lockstep.fail(misuse)
            raise misuse
        if current is None:
            raise CollectiveMisuse(f"{name} on {self.rendezvous} was called outside of its world's run")
        if current != self._global_rank:
            raise CollectiveMisuse(
                f"rank {current} called {name} on the group object of rank {self._global_rank} ({self.rendezvous}): "
                "the object leaked from one rank to another, perhaps by a cache or a global; code that keeps groups in "
                f"variables of its process can get them from lossgate.current_mesh()  [{call_site()}]"
            )

    def _check_arguments(self, name: str, mismatch: str | None) -> None:
        """Raises ``CollectiveMismatch`` if this member's own arguments do not fit together."""
        if mismatch is not None:
            raise CollectiveMismatch(
                f"rank {self._global_rank}: {name} on {self.rendezvous}: {mismatch}  [{call_site()}]"
            )
