# SPDX-License-Identifier: Apache-2.0
"""A cell of the verdict table: one candidate on one layout in one dtype, and what came of it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from types import MappingProxyType

from lossgate.adequacy.option_mutants import Contrast
from lossgate.cases.examine import Examination
from lossgate.declaration.candidate import Candidate, Finding
from lossgate.engine.failure_files import Frozen
from lossgate.judge.explain import explain_pooled
from lossgate.judge.pooling import Pooled, pool
from lossgate.layout import Layout
from lossgate.losses import find_spec

LARGEST_MDE = 0.01
"""A cell that could not have seen an error of 1% in an output's scale is inconclusive."""


class Verdict(StrEnum):
    """Of a cell. INCONCLUSIVE: nothing wrong was seen, and not enough was seen."""

    AGREE = "AGREE"
    DISAGREE = "DISAGREE"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, eq=False)
class Cell:
    """What is verified: the property "agreement" with the reference, for now the only one."""

    candidate: Candidate
    layout: Layout
    dtype: str
    property: str = "agreement"

    def __str__(self) -> str:
        return f"{self.candidate.name}[{self.property}-{self.layout}-{self.dtype}]"


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What came of a cell."""

    cell: Cell
    verdict: Verdict
    reasons: tuple[str, ...]
    """In words, why the verdict is not AGREE."""
    examined: tuple[Examination, ...]
    """The problems that count, in order."""
    failure: Examination | None = None
    """The smallest problem found on which the candidate disagrees."""
    shrink_calls: int = 0
    pooled: tuple[Pooled, ...] = ()
    branches: frozenset[str] = frozenset()
    untold: tuple[str, ...] = ()
    """The contrasts between choices of options for which no problem spoke; see ``specs.contrasts``."""
    idle: tuple[str, ...] = ()
    """Contrasts that made no difference on any problem that the candidate can be given, and so are not asked for."""
    doubts: tuple[str, ...] = ()
    """In words, what else was not seen enough of."""
    seconds: float = 0.0
    expected: bool = False
    """It disagrees, as a known finding says."""

    @property
    def comparisons(self) -> int:
        return sum(len(examination.comparisons) for examination in self.examined)

    @property
    def margin(self) -> float:
        """The largest statistic of any comparison, as a share of its limit."""
        return max((c.margin for e in self.examined for c in e.comparisons), default=0.0)

    @property
    def mde(self) -> float:
        """Of the pool of the output that was seen least sharply."""
        return max((pooled.mde for pooled in self.pooled), default=float("inf"))

    @property
    def power(self) -> dict[str, float]:
        """The share of the planted errors that were seen, by kind."""
        seen: dict[str, list[bool]] = {}
        for comparison in (c for e in self.examined for c in e.comparisons):
            for name, rejected in comparison.rejected.items():
                seen.setdefault(name, []).append(rejected)
        return {name: sum(told) / len(told) for name, told in seen.items()}

    @property
    def missing_branches(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in find_spec(self.cell.candidate.spec).required(self.cell.candidate, self.cell.layout)
            if name not in self.branches
        )

    @property
    def median_mde(self) -> float:
        """Of the comparisons that could say something."""
        return median(
            [c.mde for e in self.examined for c in e.comparisons if c.values and not c.vacuous] or [float("inf")]
        )


def conclude(
    cell: Cell,
    examined: Sequence[Examination],
    failure: Examination | None,
    shrink_calls: int,
    seconds: float,
    untold: Mapping[str, Contrast] = MappingProxyType({}),
    idle: Collection[str] = (),
) -> CellResult:
    """The verdict on what was examined."""
    pooled = _pool(examined)
    branches = frozenset[str]().union(*(e.branches for e in examined))
    doubts = tuple(_doubts(cell, examined, pooled, branches))
    verdict, reasons = _verdict(failure, pooled, (*doubts, *_untold(untold.values())))
    return CellResult(
        cell=cell,
        verdict=verdict,
        reasons=reasons,
        examined=tuple(examined),
        failure=failure,
        shrink_calls=shrink_calls,
        pooled=pooled,
        branches=branches,
        untold=tuple(untold),
        idle=tuple(sorted(idle)),
        doubts=doubts,
        seconds=seconds,
    )


def conclude_known(cell: Cell, finding: Finding, frozen: Frozen, now: Examination, seconds: float) -> CellResult:
    """The verdict on a known finding: expected if its frozen example still disagrees, in the same outputs."""
    expected = now.symptoms == frozen.symptoms and not now.agrees
    if now.agrees:
        reasons = (
            f"known finding {finding.name} shows no more: its frozen example agrees; verify the candidate without it",
        )
    elif expected:
        reasons = now.findings
    else:
        reasons = (
            f"known finding {finding.name} has changed: it was known by {_and(frozen.symptoms)}, not {_and(now.symptoms)}",
            *now.findings,
        )
    return CellResult(
        cell=cell,
        verdict=Verdict.DISAGREE,
        reasons=reasons,
        examined=(now,),
        failure=None if now.agrees else now,
        pooled=_pool([now]),
        branches=now.branches,
        seconds=seconds,
        expected=expected,
    )


def _and(words: Sequence[str]) -> str:
    return " and ".join(words)


def _pool(examined: Sequence[Examination]) -> tuple[Pooled, ...]:
    outputs = dict.fromkeys(c.output for e in examined for c in e.comparisons)
    return tuple(pool(output, (c for e in examined for c in e.comparisons if c.output == output)) for output in outputs)


def biases(examined: Sequence[Examination]) -> tuple[str, ...]:
    """What shows only when the problems are taken together, in words."""
    return _biases(_pool(examined))


def _biases(pooled: Iterable[Pooled]) -> tuple[str, ...]:
    return tuple(explain_pooled(one) for one in pooled if not one.agrees)


def _verdict(
    failure: Examination | None, pooled: tuple[Pooled, ...], doubts: tuple[str, ...]
) -> tuple[Verdict, tuple[str, ...]]:
    if failure is not None:
        return Verdict.DISAGREE, failure.findings
    if biased := _biases(pooled):
        return Verdict.DISAGREE, biased
    return (Verdict.INCONCLUSIVE if doubts else Verdict.AGREE), doubts


def _doubts(
    cell: Cell, examined: Sequence[Examination], pooled: tuple[Pooled, ...], branches: frozenset[str]
) -> Iterator[str]:
    """What problems of any kind could still show."""
    spec = find_spec(cell.candidate.spec)
    for comparison in (c for e in examined for c in e.comparisons if c.blind):
        yield f"the judge missed planted errors: {', '.join(comparison.blind)} in {comparison.output}"
    for p in pooled:
        if p.mde > LARGEST_MDE and (
            p.problems or p.output not in spec.metrics
        ):  # a count of what an option would do may always be 0
            yield f"{p.output}: an error of {LARGEST_MDE:.0%} in scale could have hidden (seen from {p.mde:.2g} on); try more problems"
    for name, branch in spec.required(cell.candidate, cell.layout).items():
        if name not in branches:
            yield f"never visited: {branch.meaning}; try more problems"


def _untold(contrasts: Iterable[Contrast]) -> Iterator[str]:
    """One line for each choice of an option."""
    others: dict[str, list[str]] = {}
    for contrast in contrasts:
        others.setdefault(contrast.choice, []).append(f"{contrast.other} ({contrast.side})")
    for choice, told in others.items():
        yield f"option {choice}: no problem would have told it from {', '.join(told)}; try more problems, or don't support it"
