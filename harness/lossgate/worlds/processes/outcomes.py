# SPDX-License-Identifier: Apache-2.0
"""What became of the ranks, in words."""

import pickle
from collections.abc import Iterator

from lossgate.errors import LossgateError
from lossgate.layout import name_ranks
from lossgate.worlds.base import Deadlock, Hang, RankDied, RankFailure, RankRaised
from lossgate.worlds.processes.conductor import Died, Record
from lossgate.worlds.processes.messages import Raised, Returned


def failure_of(record: Record) -> LossgateError | None:
    """Returns why a task failed, or None if it did not.

    It is the first failure that is not the echo of another rank's end. Then come the other ranks,
    each with what it did, and their stacks.
    """
    if not record.failed:
        return None
    rank, cause = _cause(record)
    if isinstance(cause, Died):
        return RankDied(_message(f"rank {rank} died: {cause.how}", rank, record))
    if isinstance(cause, Raised):
        if cause.error is not None:
            return pickle.loads(cause.error)
        text = f"rank {rank} raised {cause.kind}: {cause.text}  [{cause.site}]"
        return RankRaised(_message(text, rank, record), rank)
    return _timed_out(record)


def _cause(record: Record) -> tuple[int, Died | Raised | None]:
    failed = {rank: o for rank, o in record.outcomes.items() if isinstance(o, Died | Raised)}
    causes = {rank: o for rank, o in failed.items() if isinstance(o, Died) or not o.lost_connection}
    if not causes and record.stuck:
        return -1, None
    first = next(iter((causes or failed).values()))
    return min((rank, o) for rank, o in (causes or failed).items() if _same(o, first))


def _same(one: Died | Raised, other: Died | Raised) -> bool:
    """Whether two ranks failed alike. Which came first is then chance: the lowest is named."""
    if isinstance(one, Raised) and isinstance(other, Raised):
        return (one.kind, one.site) == (other.kind, other.site)
    return one == other


def _timed_out(record: Record) -> RankFailure:
    if late := [rank for rank in record.stuck if rank not in record.code]:
        return Hang(_message(f"hang: {name_ranks(late)} did not load the task", None, record))
    if record.deadlocked:
        return Deadlock(_message("deadlock: no rank can go on", None, record))
    busy = [rank for rank, where in record.stuck.items() if where is None or where.collective is None]
    cause = f"hang: {name_ranks(busy or record.stuck)} did not return within {record.timeout:g} s"
    return Hang(_message(cause, None, record))


def _message(cause: str, rank: int | None, record: Record) -> str:
    doing = {other: _doing(other, record) for other in sorted(record.outcomes) if other != rank}
    lines = [cause, *(f"  rank {other}: {text}" for other, text in doing.items()), *_stacks(record)]
    return "\n".join(lines)


def _doing(rank: int, record: Record) -> str:
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


def _stacks(record: Record) -> Iterator[str]:
    """Yields each Python stack, with the ranks that have it, and the last words of those that
    died.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in sorted(record.outcomes.items()):
        source = outcome if isinstance(outcome, Raised) else record.stuck.get(rank)
        if source is not None:
            ranks_of.setdefault(("stack", source.stack.rstrip()), []).append(rank)
        elif isinstance(outcome, Died) and outcome.output:
            ranks_of.setdefault(("last output", outcome.output.rstrip()), []).append(rank)
    for (what, text), ranks in ranks_of.items():
        yield f"{what} of {name_ranks(ranks)}:\n{text}"
