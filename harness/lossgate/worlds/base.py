# SPDX-License-Identifier: Apache-2.0
"""The interface of a world, and how the failures of its ranks are reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from lossgate.base.errors import LossgateError
from lossgate.base.layout import Axis, Layout
from lossgate.problems.problem import ReductionOrder


@dataclass(frozen=True)
class RankContext:
    """What a task knows about the rank that it runs on."""

    rank: int
    layout: Layout
    mesh: DeviceMesh
    """Its dims are ``dp``, ``cp``, ``tp``."""
    device: torch.device
    """Where the rank computes. Its problem is made on the CPU and moved there."""


def ranks_along(layout: Layout, rank: int, axis: Axis) -> tuple[int, ...]:
    """Returns the ranks of a rank's group on an axis: they differ from it on this axis alone."""
    own = layout.coordinate(rank)
    return tuple(other for other in range(layout.ranks) if {**layout.coordinate(other), axis: own[axis]} == own)


T = TypeVar("T")
Task = Callable[[RankContext], T]
"""The function that a rank runs. It is data: worlds whose ranks are other processes pickle it."""


class World(Protocol):
    """Runs a task on every rank of a layout."""

    layout: Layout
    repeatable: bool
    """Whether the same task gives the same bits each time."""

    def run(self, task: Task[T], *, order: ReductionOrder = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        """Runs a task on every rank.

        Args:
            task: what to run.
            order, seed: the order in which a simulated world adds up the tensors of a collective,
                and the seed of its permutations. Real process groups add in an order of their own.
            patience: factor by which the timeout of the world is multiplied.

        Returns:
            The results, by rank.

        Raises:
            RankFailure: if a rank failed. The world then serves the next task, unless the rank is
                gone and cannot be replaced.
            WorldLost: if a rank is gone and cannot be replaced.
            UsageError: if the ranks are other processes and the task can't be sent to them, or if
                their code differs.
        """
        ...

    def close(self) -> None: ...


class WorldLost(LossgateError):
    """The ranks of a world can't run any further task."""


class RankFailure(LossgateError):
    """Ranks failed while they ran a task. The message names the ranks, and where they were."""


class RankRaised(RankFailure):
    """A rank raised an exception. It is the ``__cause__`` of this error if the rank is a thread."""

    def __init__(self, message: str, rank: int, kind: str = "", site: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        """The type of the exception."""
        self.site = site
        """The line that raised it."""

    def __reduce__(self) -> tuple[type["RankRaised"], tuple[str, int, str, str]]:
        return type(self), (str(self), self.rank, self.kind, self.site)


class RankDied(RankFailure):
    """The process of a rank ended: by a signal, an abort, or an exit."""


class CollectiveMismatch(RankFailure):
    """Ranks made calls that do not match, or a call whose arguments do not fit together."""


class Deadlock(RankFailure):
    """No rank can go on: each waits for a rank that has returned, or that waits elsewhere."""


class CollectiveMisuse(RankFailure):
    """A rank used another rank's group, made a call in a thread of its own, left out ``wait()``, or
    wrote to a tensor of a call before ``wait()``.
    """


class StateLeak(RankFailure):
    """A rank left state of its process changed, such as the default dtype. The world restores the
    state before the next task.
    """

    @classmethod
    def of(cls, rank: int, changes: Sequence[str]) -> "StateLeak":
        """Returns the failure of a rank.

        Args:
            rank: the rank.
            changes: the changes that it left, in the words of ``ProcessState.changes``.
        """
        return cls(
            f"rank {rank} left {', '.join(changes)}; restore it before the kernel returns, by a context manager "
            "or try ... finally, or set it where the kernel's module is imported"
        )


class Hang(RankFailure):
    """A rank took too long. A simulated rank must reach a collective or return in time, and a rank
    in another process must return in time.
    """
