# SPDX-License-Identifier: Apache-2.0
"""Makes the record of a cell from what came of it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from math import ceil, copysign, floor, isfinite, log10
from typing import Any

import msgspec

from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.property_result import PropertyResult
from lossgate.evidence.checkout import digest_of_source, is_source_modified
from lossgate.evidence.records import (
    SCHEMA,
    CellKey,
    CellRecord,
    Failure,
    KnownFailureRecord,
    OutputRecord,
    PooledNoiseRecord,
    PooledRecord,
    PropertyRecord,
    WorstExample,
)
from lossgate.evidence.redo import largest_mde, redo
from lossgate.judge.comparison import Comparison
from lossgate.judge.pooled_output import Pooled
from lossgate.judge.pooling import PooledNoise
from lossgate.judge.statistics import SCALE
from lossgate.problems.problem import Problem

_DIGITS = (5, 17)
"""Significant digits of numbers: few, or all if the verdict hangs on them."""
_SHARE_DIGITS = 3
_LEAST_SHARE = 1e-9
"""Smaller shares of a limit are rounded up to this."""
LARGEST = 1e308
_WORST = 3
"""How many of the worst examples are kept, with their problems."""


def key_of(cell: Cell) -> CellKey:
    """Returns what identifies a cell in evidence."""
    return CellKey(cell.candidate.name, cell.property.name, str(cell.layout), cell.dtype, cell.world, cell.device)


def record_of(result: CellResult, run: str, time: str, replay: str | None = None) -> CellRecord:
    """Returns the record of a cell.

    Args:
        result: what came of it.
        run: the name of the run.
        time: when it was done.
        replay: the command that judges its failure again, if there is one.
    """
    record, *others = (_record(result, run, time, replay, digits) for digits in _DIGITS)
    return others[-1] if redo([record])[0].contradiction else record


def _record(result: CellResult, run: str, time: str, replay: str | None, digits: int) -> CellRecord:
    cell, candidate = result.cell, result.cell.candidate
    outputs = tuple(_outputs(result, digits))
    record = CellRecord(
        schema=SCHEMA,
        run=run,
        **msgspec.structs.asdict(key_of(cell)),
        spec=candidate.spec.name,
        head=candidate.head,
        source=candidate.source,
        source_digest=digest_of_source(candidate.source),
        source_modified=is_source_modified(candidate.source),
        verdict=result.verdict.value,
        reasons=result.reasons,
        problems=len(result.cases),
        comparisons=result.comparisons,
        needs_adequacy=cell.property.needs_adequacy and candidate.known_failure is None,
        outputs=outputs,
        properties=tuple(_property(one) for one in result.properties),
        faults=tuple(dict.fromkeys(fault for case in result.cases for fault in _faults(case))),
        mde=None,
        coverage=dict(sorted(Counter(goal for case in result.cases for goal in case.covered).items())),
        required=() if candidate.known_failure else tuple(cell.required_goals),
        killed=len(frozenset[str]().union(*(case.killed for case in result.cases))),
        surviving=result.surviving,
        equivalent=result.equivalent,
        not_distinguished=result.not_distinguished,
        excluded=candidate.exclusions,
        mistakes_shown=result.mistakes.shown,
        mistakes_surviving=result.mistakes.surviving,
        mistakes_too_small=result.mistakes.too_small,
        mistakes_seconds=round(result.mistakes.seconds, 3),
        untried=result.untried,
        worst=tuple(_worst(result.cases)),
        failure=_failure(result, replay),
        resources={name: dict(numbers) for name, numbers in result.resources.items()},
        known_failure=_known_failure(result),
        seconds=round(result.seconds, 3),
        time=time,
        causes=result.causes,
    )
    return msgspec.structs.replace(record, mde=largest_mde(record))


def _property(found: PropertyResult) -> PropertyRecord:
    return PropertyRecord(
        name=found.name,
        problems=found.problems,
        comparisons=found.comparisons,
        margin=_share(found.margin),
        seconds=round(found.seconds, 4),
        findings=found.findings,
        on=found.on,
        remedy=found.remedy if found.findings else "",
        exempt=found.exempt,
    )


def _faults(case: CaseResult) -> Sequence[str]:
    """Returns what disagreed in a case beside its outputs, as its symptoms have it."""
    return (case.failure,) if case.failure else case.faults


def _outputs(result: CellResult, digits: int) -> Iterator[OutputRecord]:
    pools = {pooled.output: pooled for pooled in result.pooled}
    outputs = dict.fromkeys(c.output for case in result.cases for c in case.comparisons)
    for output in outputs:
        found = [(i, c) for i, case in enumerate(result.cases) for c in case.comparisons if c.output == output]
        yield _output(found, pools[output], digits)


def _output(found: Sequence[tuple[int, Comparison]], pooled: Pooled, digits: int) -> OutputRecord:
    """Returns the record of an output, which was compared on problems with these numbers."""
    used = [c for _, c in found if c.values]
    others = dict.fromkeys(name for c in used for name in c.values if name != SCALE)
    planted = dict.fromkeys(name for c in used for name in c.rejected)
    return OutputRecord(
        name=str(pooled.output),
        metric=pooled.output.kind == "metric",
        cases=tuple(number for number, c in found if c.values),
        without_numbers=tuple(number for number, c in found if not c.values),
        scale=tuple(_rounded((c.values[SCALE] for c in used), digits)),
        limit=tuple(_rounded((c.limits[SCALE] for c in used), digits)),
        sd=tuple(_rounded((c.sd for c in used), digits)),
        mean=tuple(_rounded((c.mean for c in used), digits)),
        noise=tuple(None if c.noise is None else next(_rounded([c.noise], digits)) for c in used),
        vacuous=tuple(i for i, c in enumerate(used) if c.vacuous),
        silent=tuple(i for i, c in enumerate(used) if c.silent),
        shares={name: tuple(_share(c.shares.get(name, 0.0)) for c in used) for name in others},
        unit=max((c.unit for c in used if c.tells_scale), default=0.0),
        kernels=max((c.kernels for c in used if c.tells_scale), default=1),
        faults=tuple(dict.fromkeys(fault for _, c in found for fault in c.faults)),
        pooled=_pooled(pooled, digits),
        planted={name: _share_of(c.rejected[name] for c in used if name in c.rejected) for name in planted},
        blind=tuple(dict.fromkeys(name for c in used for name in c.blind)),
    )


def _pooled(pooled: Pooled, digits: int) -> PooledRecord | None:
    if not pooled.problems:
        return None
    scale, limit = _rounded((pooled.scale, pooled.limit), digits)
    return PooledRecord(problems=pooled.problems, scale=scale, limit=limit, noise=_pooled_noise(pooled.noise, digits))


def _pooled_noise(pooled: PooledNoise | None, digits: int) -> PooledNoiseRecord | None:
    if pooled is None:
        return None
    noise, limit = _rounded((pooled.noise, pooled.limit), digits)
    return PooledNoiseRecord(problems=pooled.problems, noise=noise, limit=limit)


def _rounded(values: Iterable[float], digits: int) -> Iterator[float]:
    """Rounds numbers. JSON has none that are not finite, so those become the largest one."""
    return (float(f"{value:.{digits}g}") if isfinite(value) else copysign(LARGEST, value) for value in values)


def _share(share: float) -> float | None:
    """Rounds a share of a limit up, so that it stays over 1 if it is."""
    if not isfinite(share):
        return None
    if share < _LEAST_SHARE:
        return _LEAST_SHARE if share else 0.0
    size = 10.0 ** (_SHARE_DIGITS - 1 - floor(log10(share)))
    return float(f"{ceil(share * size) / size:.{_SHARE_DIGITS}g}")


def _share_of(answers: Iterable[bool]) -> float:
    given = list(answers)
    return round(sum(given) / len(given), 4)


def _worst(cases: Sequence[CaseResult]) -> Iterator[WorstExample]:
    """Yields the worst examples, at most one for each output and statistic."""
    found = [
        (share, str(c.output), name, c, case.problem)
        for case in cases
        for c in case.comparisons
        for name, share in c.shares.items()
    ]
    listed = set[tuple[str, str]]()
    for _, output, statistic, comparison, problem in sorted(found, key=lambda one: -one[0]):
        if len(listed) < _WORST and (output, statistic) not in listed:
            listed.add((output, statistic))
            value, limit = _rounded((comparison.values[statistic], comparison.limits[statistic]), _DIGITS[-1])
            yield WorstExample(
                output=output,
                statistic=statistic,
                value=value,
                limit=limit,
                problem=_as_json(problem),
            )


def _failure(result: CellResult, replay: str | None) -> Failure | None:
    if result.failure is None:
        return None
    return Failure(
        problem=_as_json(result.failure.problem),
        description=result.failure.problem.describe(),
        findings=result.failure.findings,
        symptoms=result.failure.symptoms,
        shrink_calls=result.shrink_calls,
        replay=replay,
        side_by_side=result.failure.side_by_side,
    )


def _as_json(problem: Problem) -> dict[str, Any]:
    return msgspec.json.decode(problem.to_json())


def _known_failure(result: CellResult) -> KnownFailureRecord | None:
    known = result.cell.candidate.known_failure
    if known is None:
        return None
    digest = sha256(known.example.read_bytes()).hexdigest()
    return KnownFailureRecord(name=known.name, example=digest, expected=result.expected)
