# SPDX-License-Identifier: Apache-2.0
"""The state that the ranks of a simulated world share during a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.simulated.collectives import Call
from lossgate.worlds.simulated.lockstep import Lockstep


@dataclass(frozen=True)
class Logged:
    """One line of a world's log: a call of a collective, or a message that was sent."""

    rank: int
    """The rank in the world that called or sent."""
    group: str
    """Label and ranks of the group, such as ``tp[0, 1]``."""
    collective: str
    shown: str
    """The arguments, such as ``SUM, [float32[2, 3]]``."""
    bytes: int
    """The size of this rank's inputs."""

    @property
    def label(self) -> str:
        """The label of the group."""
        return self.group.partition("[")[0]

    @property
    def members(self) -> int:
        """How many ranks the group has."""
        return self.group.count(",") + 1


@dataclass(frozen=True)
class Route:
    """The way of messages from one rank to another, in one group and under one tag.

    Messages on one route arrive in the order in which they were sent.
    """

    rendezvous: int
    """The ``id`` of the group's rendezvous."""
    source: int
    to: int
    tag: int


@dataclass
class Mailbox:
    """The messages and the receives of one route."""

    sent: list[Tensor] = field(default_factory=list)
    """A copy of each message."""
    received: int = 0
    """The number of receives posted.

    The n-th receive gets the n-th message, in whatever order they are waited for.
    """
    unwaited_sends: dict[int, str] = field(default_factory=dict)
    """Descriptions of the sends without ``wait()`` so far, with their call sites, by number."""
    unwaited_receives: dict[int, str] = field(default_factory=dict)
    """The same for receives."""


@dataclass
class Communicator:
    """The state that the ranks of a simulated world share.

    It holds the lockstep, the reduction order, the log, and the calls and messages under way.
    """

    lockstep: Lockstep
    order: ReductionOrder = "rank"
    seed: int = 0
    log: list[Logged] = field(default_factory=list)
    reductions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """The number of reductions so far, by the ranks of the group."""
    in_flight: list[Call] = field(default_factory=list)
    """Asynchronous calls on which ``wait()`` has not returned."""
    mail: dict[Route, Mailbox] = field(default_factory=dict)

    def start(self, order: ReductionOrder, seed: int) -> None:
        """Clears everything that belongs to the previous run.

        Args:
            order: the order in which reductions add.
            seed: the seed of the permutations, if ``order`` is ``"permuted"``.
        """
        self.order, self.seed = order, seed
        self.reductions.clear()
        self.log, self.in_flight, self.mail = [], [], {}

    def next_seed(self, ranks: Sequence[int]) -> int:
        """Returns the seed of the next reduction in the group of these ranks.

        Reductions are counted per group. Parallel groups, such as the cp group of each tp rank,
        then add in the same order, so a value that is replicated over tp stays replicated.
        """
        group = tuple(ranks)
        self.reductions[group] += 1
        return self.seed * 1_000_003 + self.reductions[group]
