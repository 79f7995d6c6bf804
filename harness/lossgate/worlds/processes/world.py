# SPDX-License-Identifier: Apache-2.0
"""A world whose ranks are processes."""

import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.base import T, Task, WorldLost
from lossgate.worlds.processes.conductor import RankHandle, Record, conduct
from lossgate.worlds.processes.messages import Assignment, Returned
from lossgate.worlds.processes.outcomes import failure_of

_MEETINGS = 3
"""How often ranks try to make their groups. Gloo now and then loses a connection that it is making,
tries it again, and waits for ever. No kernel is to blame for that."""


class RankProcesses(ABC):
    """Processes that serve worlds of any layout, one after another."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._met: tuple[int, str] | None = None
        """The number of ranks that have groups with one another, and their device."""
        self._meeting = ""

    def run(self, task: bytes, layout: Layout, device: str, timeout: float) -> list[Any]:
        """Runs a pickled task on the first ranks. Raises what ``World.run`` raises."""
        record = self._conduct(task, layout, device, timeout)
        for _ in range(_MEETINGS - 1):
            if record.met or not record.failed:
                break
            record = self._conduct(task, layout, device, timeout)
        if drift := _drift(record):
            raise UsageError(drift)
        failure = failure_of(record)
        if failure is not None and not record.met:
            raise WorldLost(f"the ranks could not make their groups in {_MEETINGS} tries; the last: {failure}")
        if failure is not None:
            raise failure
        outcomes = [record.outcomes[rank] for rank in range(layout.ranks)]
        return [pickle.loads(outcome.result) for outcome in outcomes if isinstance(outcome, Returned)]

    def _conduct(self, task: bytes, layout: Layout, device: str, timeout: float) -> Record:
        ranks, number = self.ranks(layout.ranks), next(self._numbers)
        if self._met != (layout.ranks, device):
            self._met, self._meeting = (layout.ranks, device), f"meeting{number}"
        try:
            record = conduct(ranks, Assignment(number, layout, self._meeting, device, task), timeout)
        except BaseException:  # such as Ctrl-C in a notebook
            self.forget_groups()
            raise
        if record.failed or not record.groups_agree:
            self.forget_groups()
        for handle in ranks:
            for line in handle.printed().splitlines():
                print(f"[rank {handle.rank}] {line}")
        return record

    def forget_groups(self) -> None:
        """Has the ranks of the next task make their groups anew."""
        self._met = None

    @abstractmethod
    def ranks(self, count: int) -> Sequence[RankHandle]:
        """Returns the first ranks, alive.

        Raises:
            WorldLost: if there are fewer.
        """


def _pickled(task: Task[Any]) -> bytes:
    try:
        return cloudpickle.dumps(task)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"what ranks should run can't be sent to their processes: {error}. Make it there, or run it in world "
            "'simulated', whose ranks are in this process"
        ) from error


def _drift(record: Record) -> str:
    """Returns how the code of the ranks differs, in words; empty if it does not."""
    for rank, code in sorted(record.code.items()):
        for name, checksum in code.items():
            if record.code.get(0, code).get(name, checksum) != checksum:
                return f"rank {rank} has another file of module {name} than rank 0; give all machines the same"
    return ""


class ProcessWorld:
    """Runs tasks on processes that other worlds use as well.

    Args:
        layout: its ranks.
        timeout: seconds that a task may take on all ranks.
        device: where the ranks compute, ``"cpu"`` or ``"cuda"``.
        processes: returns the ranks, which may be others tomorrow.
    """

    repeatable = False

    def __init__(self, layout: Layout, timeout: float, device: str, processes: Callable[[], RankProcesses]) -> None:
        self.layout, self.timeout, self.device = layout, timeout, device
        self._processes = processes

    def run(self, task: Task[T], *, order: ReductionOrder = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        """Runs a task on every rank; see ``World.run``. ``order`` and ``seed`` change nothing."""
        return self._processes().run(_pickled(task), self.layout, self.device, patience * self.timeout)

    def close(self) -> None:
        """Does nothing: the processes serve other worlds."""
