# SPDX-License-Identifier: Apache-2.0
"""The interface of a world, and how the failures of its ranks are reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from lossgate.base.errors import LossgateError
from lossgate.base.layout import Layout
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


T = TypeVar("T")
Task = Callable[[RankContext], T]
"""What a rank is asked to do. A task is data: worlds whose ranks are other processes pickle it."""


class World(Protocol):
    """Runs a task on every rank of a layout."""

    layout: Layout
    repeatable: bool
    """Whether the same task gives the same bits each time."""

    def run(self, task: Task[T], *, order: ReductionOrder = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        """Runs a task on every rank.

        Args:
            task: what to run.
            order, seed: how a simulated world adds up what ranks bring to a collective. Real
                process groups add in an order of their own.
            patience: how many times the timeout of the world a rank may take.

        Returns:
            The results, by rank.

        Raises:
            RankFailure: if a rank failed. The world then serves the next task, unless the rank is
                gone and cannot be replaced.
            WorldLost: if a rank is gone and cannot be replaced.
            UsageError: if the ranks are other processes, and the task can't be sent to them, or
                they have other code.
        """
        ...

    def close(self) -> None: ...


class WorldLost(LossgateError):
    """The ranks can run nothing more."""


class RankFailure(LossgateError):
    """Ranks failed while they ran a task. The message names them, and where."""


class RankRaised(RankFailure):
    """A rank raised an exception, which is the ``__cause__`` where the rank is a thread."""

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
    """Ranks brought different calls to the same collective."""


class Deadlock(RankFailure):
    """No rank can go on: each waits for another that has returned or waits elsewhere."""


class CollectiveMisuse(RankFailure):
    """A rank used another rank's group, made a call in a thread of its own, left out ``wait()``, or
    wrote to a tensor of a call before ``wait()``.
    """


class StateLeak(RankFailure):
    """A rank left state of its process changed, such as the default dtype. The next task has it as
    it was.
    """

    @classmethod
    def of(cls, rank: int, changes: Sequence[str]) -> "StateLeak":
        """Returns the failure of a rank.

        Args:
            rank: the rank.
            changes: what it left changed, in words, as ``ProcessState.changes`` returns them.
        """
        return cls(
            f"rank {rank} left {', '.join(changes)}; restore it before the kernel returns, by a context manager "
            "or try ... finally, or set it where the kernel's module is imported"
        )


class Hang(RankFailure):
    """A rank took too long: a simulated one to reach a collective or to return, a process to
    return.
    """
