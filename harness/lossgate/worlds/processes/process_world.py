# SPDX-License-Identifier: Apache-2.0
"""A world whose ranks are processes, and the messages about ranks that failed."""

import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout, name_ranks
from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.base import Deadlock, Hang, RankDied, RankFailure, RankRaised, T, Task, WorldLost
from lossgate.worlds.processes.conductor import Died, RankHandle, TaskOutcome, conduct
from lossgate.worlds.processes.rank_messages import Assignment, Raised, Returned


def failure_of(record: TaskOutcome) -> Exception | None:
    """Returns why a task failed, or None if it did not fail.

    The message names the cause first: the first failure that is not the echo of another rank's end.
    Then it says what each other rank did, and shows the stacks.
    """
    if not record.failed:
        return None
    found = _cause(record)
    if found is None:
        return _timed_out(record)
    rank, cause = found
    if isinstance(cause, Died):
        return RankDied(_message(f"rank {rank} died: {cause.how}", rank, record))
    if cause.error is not None:
        return pickle.loads(cause.error)
    text = f"rank {rank} raised {cause.kind}: {cause.text}  [{cause.site}]"
    return RankRaised(_message(text, rank, record), rank, cause.kind, cause.site)


def _cause(record: TaskOutcome) -> tuple[int, Died | Raised] | None:
    """Returns the rank that failed first, and how; None if ranks are only stuck.

    If several ranks failed like the first, chance decided which was first: the lowest is returned.
    """
    failed = {rank: o for rank, o in record.outcomes.items() if isinstance(o, Died | Raised)}
    causes = {rank: o for rank, o in failed.items() if isinstance(o, Died) or not o.lost_connection}
    if not causes and record.stuck:
        return None
    possible = causes or failed
    first = next(iter(possible.values()))
    return min((rank, o) for rank, o in possible.items() if _same(o, first))


def _same(one: Died | Raised, other: Died | Raised) -> bool:
    """Returns whether two ranks failed alike."""
    if isinstance(one, Raised) and isinstance(other, Raised):
        return (one.kind, one.site) == (other.kind, other.site)
    return one == other


def _timed_out(record: TaskOutcome) -> RankFailure:
    if late := [rank for rank in record.stuck if rank not in record.code]:
        return Hang(_message(f"hang: {name_ranks(late)} did not load the task", None, record))
    if record.deadlocked:
        return Deadlock(_message("deadlock: no rank can go on", None, record))
    busy = [rank for rank, where in record.stuck.items() if where is None or where.collective is None]
    cause = f"hang: {name_ranks(busy or record.stuck)} did not return within {record.timeout:g} s"
    return Hang(_message(cause, None, record))


def _message(cause: str, rank: int | None, record: TaskOutcome) -> str:
    doing = {other: _doing(other, record) for other in sorted(record.outcomes) if other != rank}
    lines = [cause, *(f"  rank {other}: {text}" for other, text in doing.items()), *_stacks(record)]
    return "\n".join(lines)


def _doing(rank: int, record: TaskOutcome) -> str:
    outcome = record.outcomes[rank]
    if isinstance(outcome, Returned):
        return "has returned"
    if isinstance(outcome, Died):
        return f"died: {outcome.how}"
    if isinstance(outcome, Raised):
        if outcome.lost_connection:
            return f"in {outcome.collective or 'a collective'}  [{outcome.site}]"
        return f"raised {outcome.kind}: {outcome.text}  [{outcome.site}]"
    where = record.stuck.get(rank)
    if where is None:
        return "gave no answer"
    return f"in {where.collective}  [{where.site}]" if where.collective else f"at [{where.site}]"


def _stacks(record: TaskOutcome) -> Iterator[str]:
    """Yields each Python stack and each last output of a rank that died, with the ranks that have
    it.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}  # by the kind of text, and the text
    for rank, outcome in sorted(record.outcomes.items()):
        source = outcome if isinstance(outcome, Raised) else record.stuck.get(rank)
        if source is not None:
            ranks_of.setdefault(("stack", source.stack.rstrip()), []).append(rank)
        elif isinstance(outcome, Died) and outcome.output:
            ranks_of.setdefault(("last output", outcome.output.rstrip()), []).append(rank)
    for (what, text), ranks in ranks_of.items():
        yield f"{what} of {name_ranks(ranks)}:\n{text}"


_MEETINGS = 3
"""How often ranks try to make their groups. Gloo sometimes loses a connection that it is making,
tries again, and waits for ever. No kernel is to blame for that."""


class RankProcesses(ABC):
    """Processes that serve worlds of any layout, one after another."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._met: tuple[int, str] | None = None
        """The number of ranks that have groups with one another, and their device."""
        self._meeting = ""

    def run(self, task: bytes, layout: Layout, device: str, timeout: float) -> list[Any]:
        """Runs a pickled task on the first ranks. Returns and raises the same as ``World.run``."""
        record = self._conduct(task, layout, device, timeout)
        for _ in range(_MEETINGS - 1):
            if record.met or not record.failed:
                break
            record = self._conduct(task, layout, device, timeout)
        if drift := _drift(record):
            raise UsageError(drift)
        failure = failure_of(record)
        if failure is not None and not record.met:
            raise WorldLost(f"the ranks could not make their groups in {_MEETINGS} tries; the last failure: {failure}")
        if failure is not None:
            raise failure
        outcomes = [record.outcomes[rank] for rank in range(layout.ranks)]
        return [pickle.loads(outcome.result) for outcome in outcomes if isinstance(outcome, Returned)]

    def _conduct(self, task: bytes, layout: Layout, device: str, timeout: float) -> TaskOutcome:
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
        """Makes the ranks of the next task create their groups anew."""
        self._met = None

    @abstractmethod
    def ranks(self, count: int) -> Sequence[RankHandle]:
        """Returns the first ``count`` ranks, all alive.

        Raises:
            WorldLost: if there are fewer.
        """


def _pickled(task: Task[Any]) -> bytes:
    try:
        return cloudpickle.dumps(task)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the function for the ranks can't be sent to their processes: {error}. Create what can't be sent inside "
            "the function, or run it in world 'simulated', whose ranks are in this process"
        ) from error


def _drift(record: TaskOutcome) -> str:
    """Returns a difference between the code of the ranks, in words; "" if there is none."""
    of_rank_0 = record.code.get(0, {})
    for rank, code in sorted(record.code.items()):
        for name, checksum in code.items():
            if name in of_rank_0 and of_rank_0[name] != checksum:
                return f"module {name} on rank {rank} differs from that on rank 0; give all machines the same files"
    return ""


class ProcessWorld:
    """Runs tasks on processes that other worlds use as well.

    Args:
        layout: the layout of its ranks.
        timeout: seconds that a task may take on all ranks.
        device: where the ranks compute, ``"cpu"`` or ``"cuda"``.
        processes: returns the processes. Each task asks for them anew, as they may be replaced.
    """

    repeatable = False

    def __init__(self, layout: Layout, timeout: float, device: str, processes: Callable[[], RankProcesses]) -> None:
        self.layout, self.timeout, self.device = layout, timeout, device
        self._processes = processes

    def run(self, task: Task[T], *, order: ReductionOrder = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        """Runs a task on every rank; see ``World.run``. ``order`` and ``seed`` have no effect."""
        return self._processes().run(_pickled(task), self.layout, self.device, patience * self.timeout)

    def close(self) -> None:
        """Does nothing: the processes serve other worlds."""
