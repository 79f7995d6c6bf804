# SPDX-License-Identifier: Apache-2.0
"""Makes the record of a cell from what was run in it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from math import ceil, copysign, floor, isfinite, log10
from typing import Any

import msgspec

from lossgate.cases.large import is_large
from lossgate.diagnosis.cause import Diagnosis
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellRun
from lossgate.engine.cell_record import (
    SCHEMA,
    CellKey,
    CellRecord,
    Failure,
    KnownFailureRecord,
    LargeProblems,
    Verdict,
    WorstExample,
    with_sums,
)
from lossgate.engine.output_record import OutputRecord, PooledNoiseRecord, PooledRecord
from lossgate.engine.own_mistakes import gaps_of
from lossgate.judge.comparison import Comparison
from lossgate.judge.pooled_output import Pooled
from lossgate.judge.pooling import PooledNoise
from lossgate.judge.statistics import SCALE
from lossgate.problems.problem import Problem
from lossgate.specs.heads import HEADS

_SHARE_DIGITS = 3
_LEAST_SHARE = 1e-9
"""Smaller shares of a limit are rounded up to this."""
LARGEST = 1e308
"""Stands for numbers that are not finite: JSON has none."""
_WORST = 3
"""How many of the worst examples are kept, with their problems."""


def key_of(cell: Cell) -> CellKey:
    """Returns the key that identifies a cell."""
    return CellKey(cell.candidate.name, cell.property.name, str(cell.layout), cell.dtype, cell.world, cell.device)


def record_of(
    run: CellRun,
    pooled: Sequence[Pooled],
    verdict: Verdict,
    reasons: tuple[str, ...],
    numbers: Verdict | None = None,
) -> CellRecord:
    """Returns the record of a cell from what was run, the pooled outputs, and the verdicts."""
    cell, candidate, cases = run.cell, run.cell.candidate, run.cases
    diagnosis = run.diagnosis or Diagnosis()
    known = candidate.known_failure is not None
    disagrees = verdict is Verdict.DISAGREE and numbers in (None, Verdict.DISAGREE)
    record = CellRecord(
        schema=SCHEMA,
        run="",
        time="",
        **msgspec.structs.asdict(key_of(cell)),
        spec=candidate.spec.name,
        head=candidate.head,
        good_for=candidate.good_for,
        source=candidate.source,
        verdict=verdict,
        numbers=numbers,
        reasons=reasons,
        causes=diagnosis.sentences,
        cause=diagnosis.named,
        explains=diagnosis.explains,
        problems=len(cases),
        tokens=max((case.problem.tokens for case in cases), default=0),
        tokens_in_all=sum(case.problem.tokens for case in cases),
        vocab=_vocab([case.problem for case in cases]),
        large=_large(cases),
        comparisons=sum(len(case.comparisons) for case in cases),
        needs_adequacy=cell.property.needs_adequacy and not known,
        outputs=tuple(_outputs(cases, pooled)),
        properties=run.properties,
        faults=tuple(dict.fromkeys(fault for case in cases for fault in _faults(case))),
        coverage=dict(sorted(Counter(goal for case in cases for goal in case.covered).items())),
        required=() if known else tuple(cell.required_goals),
        killed=len(frozenset[str]().union(*(case.killed for case in cases))),
        surviving=tuple(run.surviving),
        equivalent=tuple(sorted(run.equivalent)),
        # Wrong numbers end the search before all choices and mistakes could be asked about.
        not_distinguished=() if disagrees else run.not_distinguished,
        excluded=candidate.exclusions,
        conventions=candidate.conventions.declared,
        gaps=() if disagrees else gaps_of(cell.property, [case.said for case in cases]),
        mistakes_shown=run.mistakes.shown,
        mistakes_surviving=() if disagrees else run.mistakes.surviving,
        mistakes_too_small=() if disagrees else run.mistakes.too_small,
        mistakes_seconds=round(run.mistakes.seconds, 3),
        untried=tuple(run.untried),
        worst=tuple(_worst(cases)),
        failure=_failure(run),
        known_failure=_known_failure(run),
        resources={name: dict(numbers) for name, numbers in run.resources.items()},
        seconds=round(run.seconds, 3),
    )
    return with_sums(record)


def _vocab(problems: Sequence[Problem]) -> int | None:
    has_logits = bool(problems) and HEADS[problems[0].head].has_logits
    return max(one.vocab for one in problems) if has_logits else None


def _large(cases: Iterable[CaseResult]) -> tuple[LargeProblems, ...]:
    """Returns the sizes of large problems, each with the largest margin of every output."""
    margins_by_size: dict[tuple[int, int | None, int], dict[str, float]] = {}
    for case in cases:
        problem = case.problem
        if not is_large(problem):
            continue
        hidden = problem.hidden if problem.head == "hidden" else None
        margins = margins_by_size.setdefault((problem.tokens, hidden, problem.vocab), {})
        for comparison in case.comparisons:
            if comparison.values:
                name = str(comparison.output)
                margins[name] = max(comparison.margin, margins.get(name, 0.0))
    return tuple(
        LargeProblems(
            tokens=tokens,
            hidden=hidden,
            vocab=vocab,
            margins={output: share_of(margin) for output, margin in margins.items()},
        )
        for (tokens, hidden, vocab), margins in margins_by_size.items()
    )


def _faults(case: CaseResult) -> Sequence[str]:
    """Returns the symptoms of a case that are no outputs."""
    return (case.failure,) if case.failure else case.faults


def _outputs(cases: Sequence[CaseResult], pools: Iterable[Pooled]) -> Iterator[OutputRecord]:
    for pooled in pools:
        found = [(i, c) for i, case in enumerate(cases) for c in case.comparisons if c.output == pooled.output]
        yield _output(found, pooled)


def _output(found: Sequence[tuple[int, Comparison]], pooled: Pooled) -> OutputRecord:
    """Returns the record of an output from its comparisons, each with the number of its problem."""
    used = [c for _, c in found if c.values]
    others = dict.fromkeys(name for c in used for name in c.values if name != SCALE)
    rejected: dict[str, list[bool]] = {}
    for comparison in used:
        for name, is_rejected in comparison.rejected.items():
            rejected.setdefault(name, []).append(is_rejected)
    return OutputRecord(
        name=str(pooled.output),
        metric=pooled.output.kind == "metric",
        cases=tuple(number for number, c in found if c.values),
        without_numbers=tuple(number for number, c in found if not c.values),
        scale=tuple(_finite(c.values[SCALE]) for c in used),
        limit=tuple(_finite(c.limits[SCALE]) for c in used),
        sd=tuple(_finite(c.sd) for c in used),
        mean=tuple(_finite(c.mean) for c in used),
        noise=tuple(None if c.noise is None else _finite(c.noise) for c in used),
        vacuous=tuple(i for i, c in enumerate(used) if c.vacuous),
        silent=tuple(i for i, c in enumerate(used) if c.silent),
        shares={name: tuple(share_of(c.shares.get(name, 0.0)) for c in used) for name in others},
        unit=max((c.unit for c in used if c.tells_scale), default=0.0),
        kernels=max((c.kernels for c in used if c.tells_scale), default=1),
        faults=tuple(dict.fromkeys(fault for _, c in found for fault in c.faults)),
        pooled=_pooled(pooled),
        planted={name: round(sum(answers) / len(answers), 4) for name, answers in rejected.items()},
        blind=tuple(dict.fromkeys(name for c in used for name in c.blind)),
    )


def _pooled(pooled: Pooled) -> PooledRecord | None:
    if not pooled.problems:
        return None
    scale, limit = _finite(pooled.scale), _finite(pooled.limit)
    return PooledRecord(problems=pooled.problems, scale=scale, limit=limit, noise=_pooled_noise(pooled.noise))


def _pooled_noise(pooled: PooledNoise | None) -> PooledNoiseRecord | None:
    if pooled is None:
        return None
    return PooledNoiseRecord(problems=pooled.problems, noise=_finite(pooled.noise), limit=_finite(pooled.limit))


def _finite(value: float) -> float:
    """Replaces a number that is not finite, because JSON has none."""
    return value if isfinite(value) else copysign(LARGEST, value)


def share_of(share: float) -> float | None:
    """Rounds a share of a limit up to few digits, so that a share over 1 stays over 1; None if it
    is infinite.
    """
    if not isfinite(share):
        return None
    if share < _LEAST_SHARE:
        return _LEAST_SHARE if share else 0.0
    size = 10.0 ** (_SHARE_DIGITS - 1 - floor(log10(share)))
    return float(f"{ceil(share * size) / size:.{_SHARE_DIGITS}g}")


def _worst(cases: Sequence[CaseResult]) -> Iterator[WorstExample]:
    """Yields the worst examples, at most one for each output and statistic."""
    found = [
        (share, statistic, comparison, case.problem)
        for case in cases
        for comparison in case.comparisons
        for statistic, share in comparison.shares.items()
    ]
    worst: dict[tuple[str, str], tuple[Comparison, Problem]] = {}
    for _, statistic, comparison, problem in sorted(found, key=lambda one: -one[0]):
        worst.setdefault((str(comparison.output), statistic), (comparison, problem))
    for (output, statistic), (comparison, problem) in islice(worst.items(), _WORST):
        yield WorstExample(
            output=output,
            statistic=statistic,
            value=_finite(comparison.values[statistic]),
            limit=_finite(comparison.limits[statistic]),
            problem=_as_json(problem),
        )


def _failure(run: CellRun) -> Failure | None:
    if run.failure is None:
        return None
    return Failure(
        problem=_as_json(run.failure.problem),
        description=run.failure.problem.describe(),
        findings=run.failure.findings,
        todo=run.failure.todo,
        symptoms=run.failure.symptoms,
        shrink_calls=run.shrink_calls,
        statistics=run.failure.statistics,
    )


def _as_json(problem: Problem) -> dict[str, Any]:
    return msgspec.json.decode(problem.to_json())


def _known_failure(run: CellRun) -> KnownFailureRecord | None:
    known = run.cell.candidate.known_failure
    if known is None:
        return None
    digest = sha256(known.example.read_bytes()).hexdigest()
    return KnownFailureRecord(name=known.name, example=digest, expected=run.expected, beside=run.beside)
