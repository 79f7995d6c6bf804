# SPDX-License-Identifier: Apache-2.0
"""The data of a cell that is opened on the page, small enough for thousands of cells.

Each text and each problem is kept once, and cells have its number.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil, inf, log10
from typing import Any, NamedTuple

import msgspec

from lossgate.engine.cell_record import CellRecord, Failure, PropertyRecord, WorstExample
from lossgate.engine.output_record import OutputRecord, PooledRecord
from lossgate.evidence.records import RunRecord, parse_time
from lossgate.reports.describe import in_pairs
from lossgate.reports.page.entries import PageCell
from lossgate.reports.shown_verdict import broken_in_words

BINS_PER_DECADE = 4
"""Bins for shares between a number and ten times that number."""
LOWEST, HIGHEST = -3 * BINS_PER_DECADE, 6 * BINS_PER_DECADE
"""The first and the last bin. The first also holds zero, and the last also infinity."""


class Histogram(NamedTuple):
    """A statistic of an output on all problems, as shares of its limit.

    Bin ``k`` holds the shares over ``10 ** ((k - 1) / BINS_PER_DECADE)`` and up to
    ``10 ** (k / BINS_PER_DECADE)``. So bins up to 0 are within the limit, and later bins over it.
    """

    statistic: str
    problems: int
    largest: float | None
    """The largest share; None if it is infinite."""
    over: int
    """How many shares were over the limit."""
    first: int
    """The number of the first bin in ``counts``."""
    counts: tuple[int, ...]


def histograms_of(output: OutputRecord) -> Iterator[Histogram]:
    """Yields the histogram of each statistic of an output that was compared."""
    shares = list(_scales(output))
    if shares:
        yield _histogram("scale", shares)
    for statistic, found in output.shares.items():
        if found:
            yield _histogram(statistic, [inf if share is None else share for share in found])


def _scales(output: OutputRecord) -> Iterator[float]:
    """Yields the scale on each problem as a share of its limit, unless the problem says nothing."""
    vacuous = frozenset(output.vacuous)
    for i, (scale, limit) in enumerate(zip(output.scale, output.limit, strict=False)):
        if i in vacuous and abs(scale) <= limit:
            continue
        if limit:
            yield abs(scale) / limit
        else:
            yield inf if scale else 0.0


def _histogram(statistic: str, shares: Sequence[float]) -> Histogram:
    bins = Counter(map(_bin, shares))
    first, last, largest = min(bins), max(bins), max(shares)
    return Histogram(
        statistic=statistic,
        problems=len(shares),
        largest=None if largest == inf else float(f"{largest:.3g}"),
        over=sum(share > 1 for share in shares),
        first=first,
        counts=tuple(bins[k] for k in range(first, last + 1)),
    )


def _bin(share: float) -> int:
    if share <= 0:
        return LOWEST
    if share == inf:
        return HIGHEST
    return max(LOWEST, min(HIGHEST, ceil(log10(share) * BINS_PER_DECADE)))


LONGEST_TREND = 30
"""The most runs in the trend of a cell. More would make the page large."""

_DIGITS = 4
"""The significant digits of numbers. The page shows three."""
_TREND_DIGITS = 3


class Kept:
    """Values that are kept once. The same value always has the same number."""

    def __init__(self) -> None:
        self._numbers: dict[str | bytes, int] = {}
        self.values: list[Any] = []

    def number(self, value: Any) -> int:
        key = value if isinstance(value, str) else msgspec.json.encode(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


class Details:
    """Makes the details of cells, and keeps their texts, problems and runs.

    Args:
        runs: the runs by name.
    """

    def __init__(self, runs: Mapping[str, RunRecord]) -> None:
        self.texts, self.problems, self.runs = Kept(), Kept(), Kept()
        self._runs = runs

    def of(self, entry: PageCell, older: Sequence[CellRecord]) -> dict[str, Any]:
        """Returns the data of a cell, without empty values."""
        shown = self._of_gate(entry)
        if entry.record is not None:
            shown |= self._of_record(entry.record)
            moments = records_of_trend(entry.record, older)
            if len(moments) > 1:
                shown["trend"] = self._trend(moments[-LONGEST_TREND:])
                shown["moments"] = len(moments)
        elif entry.gated is not None and (summary := entry.gated.summary) is not None:
            shown |= {
                "reasons": self._all(summary.told),
                "failure": self._failure(summary.failure),
                "replay": self._text(summary.replay or ""),
            }
        return {name: value for name, value in shown.items() if value not in (None, "", [], {})}

    def _of_gate(self, entry: PageCell) -> dict[str, Any]:
        cell = entry.gated
        if cell is None:
            return {}
        blockers = [[self._text(b.reason), self._text(b.message), self._text(b.where)] for b in cell.blockers]
        line = "" if cell.summary is None else str(cell.summary.where)
        return {"blockers": blockers, "required": int(cell.required), "excused": cell.excused, "line": line}

    def _of_record(self, record: CellRecord) -> dict[str, Any]:
        known = record.known_failure
        run = self._runs.get(record.run)
        return {
            "reasons": self._all(record.told),
            "broken": self._text(broken_in_words([record])),
            "faults": self._all(record.faults),
            "explains": self._text(record.explains),
            "failure": self._failure(record.failure),
            "replay": self._text(record.replay or ""),
            "known": [self._text(known.name), int(known.expected), self._text(known.example)] if known else None,
            "outputs": [self._output(output) for output in record.outputs],
            "coverage": list(self._coverage(record)),
            "killed": record.killed,
            "surviving": self._all(goal for goal in record.surviving if goal not in record.equivalent),
            "equivalent": self._all(record.equivalent),
            "shown": record.mistakes_shown,
            "unseen": self._all(record.mistakes_surviving),
            "small": self._all(record.mistakes_too_small),
            "alike": self._all(record.not_distinguished),
            "excluded": self._all(in_pairs(record.excluded)),
            "properties": [self._property(held_to) for held_to in record.properties],
            "worst": [self._worst(worst) for worst in record.worst],
            "resources": {name: dict(sorted(numbers.items())) for name, numbers in sorted(record.resources.items())},
            "mde": _short(record.mde),
            "problems": record.problems,
            "comparisons": record.comparisons,
            "source": self._text(record.source),
            "digest": self._text(record.source_digest or ""),
            "seconds": _short(record.seconds),
            "time": self._text(record.time),
            "run": self.runs.number(_about(record.run, run)),
        }

    def _text(self, text: str) -> int:
        return self.texts.number(text)

    def _all(self, texts: Sequence[str] | Iterator[str]) -> list[int]:
        return [self._text(text) for text in texts]

    def _failure(self, failure: Failure | None) -> list[Any] | None:
        """Returns the problem, its description, the findings, the number of tries to make it
        smaller, and the statistics that are over their limit.
        """
        if failure is None:
            return None
        return [
            self.problems.number(failure.problem),
            self._text(failure.description),
            self._all(failure.findings),
            failure.shrink_calls,
            self._all(failure.statistics),
        ]

    def _output(self, output: OutputRecord) -> list[Any]:
        """Returns name, pool, histograms, faults, planted errors that passed, and blind spots."""
        pooled = output.pooled
        return [
            self._text(output.name),
            [pooled.problems, _short(pooled.scale), _short(pooled.limit)] if pooled else None,
            [[self._text(h.statistic), *h[1:]] for h in histograms_of(output)],
            self._all(output.faults),
            [[self._text(name), share] for name, share in output.planted.items() if share < 1],
            self._all(output.blind),
        ]

    def _property(self, found: PropertyRecord) -> list[Any]:
        """Returns name, problems, comparisons, margin, seconds, whether it is broken, and why the
        candidate is exempt. The findings are among the reasons.
        """
        numbers = found.problems, found.comparisons, _short(found.margin), _short(found.seconds)
        return [self._text(found.name), *numbers, int(bool(found.findings)), self._text(found.exempt)]

    def _coverage(self, record: CellRecord) -> Iterator[list[int]]:
        """Yields each goal, how many problems reach it, and whether it is required."""
        required = frozenset(record.required)
        for goal in dict.fromkeys([*record.required, *record.coverage]):
            yield [self._text(goal), record.coverage.get(goal, 0), int(goal in required)]

    def _worst(self, worst: WorstExample) -> list[Any]:
        problem = self.problems.number(worst.problem)
        return [
            self._text(worst.output),
            self._text(worst.statistic),
            _short(worst.value),
            _short(worst.limit),
            problem,
        ]

    def _trend(self, records: Sequence[CellRecord]) -> dict[str, Any]:
        """Returns the times, commits, verdicts and pooled scales of a cell, run by run."""
        runs = [self._runs.get(record.run) for record in records]
        pools = [{output.name: output.pooled for output in record.outputs} for record in records]
        names = dict.fromkeys(name for pool in pools for name in pool)
        return {
            "times": self._all(record.time for record in records),
            "commits": self._all((run.commit or "")[:12] if run else "" for run in runs),
            "verdicts": self._all(record.outcome.lower() for record in records),
            "outputs": [[self._text(name), *_columns([pool.get(name) for pool in pools])] for name in names],
        }


def _columns(pools: Sequence[PooledRecord | None]) -> tuple[list[float | None], list[float | None]]:
    """Returns the scales and the limits of an output, run by run; None if a run did not pool it."""
    scales = [None if pool is None else _short(pool.scale, _TREND_DIGITS) for pool in pools]
    return scales, [None if pool is None else _short(pool.limit, _TREND_DIGITS) for pool in pools]


def _about(name: str, run: RunRecord | None) -> dict[str, Any]:
    """Returns the host, commit, versions and settings of a run, and so on."""
    if run is None:
        return {"run": name}
    return {
        "run": name,
        "started": run.started,
        "commit": run.commit,
        "modified": run.modified,
        "host": run.host,
        "versions": run.versions,
        "settings": run.settings,
        "part": run.part,
    }


def _short(number: float | None, digits: int = _DIGITS) -> float | None:
    return None if number is None else float(f"{number:.{digits}g}")


_NEVER = datetime.min.replace(tzinfo=UTC)


def records_of_trend(current: CellRecord, history: Iterable[CellRecord]) -> list[CellRecord]:
    """Returns the current record and the earlier records of its cell, the oldest first.

    Records of the current run and copies of a record are left out.
    """
    chosen: dict[tuple[str, str], list[CellRecord]] = {}
    for record in history:
        alike = chosen.setdefault((record.run, record.time), [])
        if record.run != current.run and record not in alike:
            alike.append(record)
    earlier = [record for alike in chosen.values() for record in alike]
    return sorted([*earlier, current], key=_when)


def _when(record: CellRecord) -> tuple[datetime, str, str]:
    """A key that sorts by time, then by run. Records without a valid time come first."""
    return parse_time(record.time) or _NEVER, record.time, record.run
