# SPDX-License-Identifier: Apache-2.0
"""What driver and ranks say to each other."""

from collections.abc import Mapping
from dataclasses import dataclass

from lossgate.base.layout import Layout


@dataclass(frozen=True)
class Assignment:
    """A task, and the groups that it needs."""

    number: int
    """Tells it from those before."""
    layout: Layout
    meeting: str
    """Where the ranks meet to make their groups. Groups of another meeting are made anew."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    task: bytes
    """A pickled ``Task``."""


@dataclass(frozen=True)
class Finish:
    """The rank's process ends, with this exit code, also if a task that can't be stopped runs."""

    code: int


@dataclass(frozen=True)
class Reply:
    """What a rank tells of an assignment."""

    number: int
    """That of the assignment. The driver may have given it up, and ignores what comes late."""
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
    """A checksum of each module that it has loaded, unless installed."""


@dataclass(frozen=True)
class Returned:
    """The task returned."""

    result: bytes
    """Pickled."""
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
    """It says that another rank is gone. So it is an echo, and no cause, if another rank failed."""
    error: bytes | None
    """A ``LossgateError``, pickled: it is raised in the driver as it is."""


@dataclass(frozen=True)
class Stopped:
    """The driver made the rank stop."""


News = Begun | Met | Loaded | Returned | Raised | Stopped


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is. It answers ``WHERE``."""

    collective: str | None
    """The function of torch.distributed that it is in, if any."""
    site: str
    """The line of the kernel."""
    stack: str
    cpu_seconds: float
    """The processor time that the rank's process has used."""
    runnable: bool
    """A thread of the process runs, or waits for a processor. Only Linux tells."""


WHERE = "where"
"""Asks a rank where it is, whatever its task does."""


@dataclass(frozen=True)
class Stop:
    """Makes a rank stop a task. There is no answer but ``Stopped``, or what came first."""

    number: int
    """The number of the assignment. One that has just ended must not stop the next."""
