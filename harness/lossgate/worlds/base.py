# SPDX-License-Identifier: Apache-2.0
"""The interface of a world, and how the failure of its ranks is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from lossgate.errors import LossgateError
from lossgate.layout import Layout
from lossgate.problems.problem import ReductionOrder


@dataclass(frozen=True)
class RankContext:
    """What a body knows of the rank that it runs on."""

    rank: int
    layout: Layout
    mesh: DeviceMesh
    """Dims ``dp``, ``cp``, ``tp``."""


T = TypeVar("T")
Body = Callable[[RankContext], T]


class World(Protocol):
    """Runs a body on every rank of a layout."""

    layout: Layout

    def run(self, body: Body[T], *, order: ReductionOrder = "rank", seed: int = 0) -> list[T]:
        """The results, by rank. Raises ``RankFailure`` if a rank failed; the world then serves the next body.

        order, seed: how a simulated world adds up what ranks bring to a collective.
        """
        ...

    def close(self) -> None: ...


class RankFailure(LossgateError):
    """Ranks failed while they ran a body; the message names them, and where."""


class RankRaised(RankFailure):
    """A rank raised an exception, which is the ``__cause__``."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveMismatch(RankFailure):
    """Ranks brought different calls to the same collective."""


class Deadlock(RankFailure):
    """No rank can go on: each waits for another that has returned or waits elsewhere."""


class CollectiveMisuse(RankFailure):
    """A rank used another rank's group, an output before ``wait()``, or changed an input in flight."""


class Hang(RankFailure):
    """A rank neither reached a collective nor returned in time."""
