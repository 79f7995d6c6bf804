# SPDX-License-Identifier: Apache-2.0
"""Redoes verdicts from the numbers in evidence, without running anything."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from lossgate.evidence.columns import Columns
from lossgate.evidence.records import CellRecord, OutputRecord, VerdictName
from lossgate.judge.pooled_scale import LARGEST_MDE

_ROUNDING = 1e-3
"""Relative error of a pooled scale or limit that is explained by the digits that evidence keeps."""


@dataclass(frozen=True)
class Redone:
    """What the numbers of a record say."""

    verdict: VerdictName
    margin: float
    """The largest statistic of any comparison, as a share of its limit."""
    contradiction: str
    """How the record contradicts its own numbers, in words; empty if it does not."""


def redo(records: Sequence[CellRecord]) -> list[Redone]:
    """Returns what the numbers of each record say."""
    columns = Columns(records)
    margins, pooled = columns.margins(), _pool(columns)
    return [_redo(record, margin, pooled) for record, margin in zip(records, margins, strict=True)]


def _redo(record: CellRecord, margin: float, pooled: Iterator[str]) -> Redone:
    wrong_pools = "; ".join(dict.fromkeys(filter(None, islice(pooled, len(record.outputs)))))
    verdict = _verdict(record, margin)
    return Redone(verdict, margin, wrong_pools or _contradiction(record, verdict))


def _contradiction(record: CellRecord, redone: VerdictName) -> str:
    count = sum(len(output.cases) for output in record.outputs)
    if count > record.comparisons:
        return f"it says {record.comparisons} comparisons, and has the numbers of {count}"
    if not _near(record.mde, (mde := largest_mde(record))):
        return f"its mde is {record.mde}, and its numbers give {mde}"
    last = max((max(output.cases) for output in record.outputs if output.cases), default=-1)
    if last >= record.problems:
        return f"it says {record.problems} problems, and has the numbers of problem {last}, counted from 0"
    if record.known_failure is not None:
        if record.verdict != "DISAGREE":
            return f"its verdict is {record.verdict}, and a known failure disagrees"
        if record.known_failure.expected and redone != "DISAGREE":
            return f"its known failure is said to be as expected, and its numbers give {redone}"
        return ""
    if redone != record.verdict:
        return f"its verdict is {record.verdict}, and its numbers give {redone}"
    return ""


def largest_mde(record: CellRecord) -> float | None:
    """Returns the minimum detectable effect of the output with the least power; None if it is
    infinite.

    Metrics that were zero on every problem are left out.
    """
    told = [output for output in record.outputs if output.pooled is not None or not output.metric]
    effects = [output.pooled.mde for output in told if output.pooled is not None]
    return max(effects) if effects and len(effects) == len(told) else None


def _verdict(record: CellRecord, margin: float) -> VerdictName:
    """Returns the verdict that numbers give, by the rules of ``engine/verdict.py``."""
    if record.faults or record.failure is not None or not margin <= 1 or any(map(_disagrees, record.outputs)):
        return "DISAGREE"
    return "INCONCLUSIVE" if any(True for _ in _gaps(record)) else "AGREE"


def _disagrees(output: OutputRecord) -> bool:
    if output.faults:
        return True
    return output.pooled is not None and abs(output.pooled.scale) > output.pooled.limit


def _gaps(record: CellRecord) -> Iterator[str]:
    """Yields what was not seen enough of."""
    if not record.problems:
        yield "problems"
    for output in record.outputs:
        yield from output.blind
        if record.needs_adequacy and (not output.metric if output.pooled is None else output.pooled.mde > LARGEST_MDE):
            yield output.name
    yield from (goal for goal in record.required if not record.coverage.get(goal))
    yield from set(record.surviving).difference(record.equivalent)


def _pool(columns: Columns) -> Iterator[str]:
    """Yields for each output how it contradicts its own pool, in words; empty if it does not."""
    sizes, pools = columns.pooled()
    size, scales, limits = iter(sizes), iter(pools.scale.tolist()), iter(pools.limit.tolist())
    for output, fits in zip(columns.outputs, columns.fitting, strict=True):
        if not fits:
            yield f"the lists of {output.name} do not have one entry for each comparison"
        elif problems := next(size):
            yield _compare(output, problems, next(scales), next(limits))
        else:
            yield f"{output.name} is pooled, and no problem says anything about its scale" if output.pooled else ""


def _compare(output: OutputRecord, problems: int, scale: float, limit: float) -> str:
    said = output.pooled
    if said is None:
        return f"{output.name} is not pooled, and {problems} problems say something about its scale"
    if said.problems != problems:
        return f"{output.name} is pooled over {said.problems} problems, and has the numbers of {problems}"
    near = _ROUNDING * (abs(limit) + abs(scale))
    if not (abs(said.scale - scale) <= near and abs(said.limit - limit) <= near):  # also if one is no number
        return (
            f"{output.name} has a pooled scale of {said.scale:.6g} +- {said.limit:.6g}, "
            f"and its numbers give {scale:.6g} +- {limit:.6g}"
        )
    return ""


def _near(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= _ROUNDING * max(abs(a), abs(b))
