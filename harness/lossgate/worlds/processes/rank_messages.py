# SPDX-License-Identifier: Apache-2.0
"""What driver and ranks say to each other."""

from collections.abc import Mapping
from dataclasses import dataclass

from lossgate.base.layout import Layout


@dataclass(frozen=True)
class Assignment:
    """A task, and the groups that it needs."""

    number: int
    """A number that no earlier assignment has."""
    layout: Layout
    meeting: str
    """The name under which the ranks meet to make their groups. A new name makes them anew."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    task: bytes
    """A pickled ``Task``."""


@dataclass(frozen=True)
class Finish:
    """Makes the process of a rank end. On the alarm connection it ends even a task that can't be
    stopped.
    """

    code: int
    """The exit code."""


@dataclass(frozen=True)
class Reply:
    """News from a rank about an assignment."""

    number: int
    """The number of the assignment. The driver ignores news of one that it has given up."""
    news: "News"


@dataclass(frozen=True)
class Begun:
    """The rank has begun with the assignment."""


@dataclass(frozen=True)
class Met:
    """The rank has made its groups, together with the others."""


@dataclass(frozen=True)
class Loaded:
    """The rank has loaded the task. Its time counts from here."""

    code: Mapping[str, int]
    """A checksum of each module that it has loaded, without installed packages."""


@dataclass(frozen=True)
class Returned:
    """The task returned."""

    result: bytes
    """The pickled result."""
    calls: Mapping[str, int]
    """How many calls the rank made on each group, by the group's name."""


@dataclass(frozen=True)
class Raised:
    """The task, or loading it, raised an exception."""

    kind: str
    """The name of the exception's class."""
    text: str
    site: str
    """The line of the kernel."""
    collective: str | None
    """The function of torch.distributed that raised it, if one did."""
    stack: str
    lost_connection: bool
    """Whether the exception says that another rank is gone. If another rank failed, this exception
    is then an echo and not the cause."""
    error: bytes | None
    """The pickled exception if it is a ``LossgateError`` or a fault of lossgate: the driver raises
    it as it is."""


@dataclass(frozen=True)
class Stopped:
    """The driver made the rank stop."""


News = Begun | Met | Loaded | Returned | Raised | Stopped


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is, in answer to ``WHERE``."""

    collective: str | None
    """The function of torch.distributed that it is in, if any."""
    site: str
    """The line of the kernel."""
    stack: str
    cpu_seconds: float
    """The processor time that the rank's process has used."""
    runnable: bool
    """Whether a thread of the process runs or waits for a processor. Only Linux tells."""


WHERE = "where"
"""Asks a rank where it is, whatever its task does."""


@dataclass(frozen=True)
class Stop:
    """Makes a rank stop a task. The rank answers ``Stopped``, unless the task has ended before."""

    number: int
    """The number of the assignment. If that has just ended, the next one is not stopped."""
