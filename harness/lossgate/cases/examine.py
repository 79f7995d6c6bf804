# SPDX-License-Identifier: Apache-2.0
"""One problem, from its description to what was found."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lossgate.adequacy.kills import told
from lossgate.adequacy.option_mutants import Contrast
from lossgate.cases.execute import execute
from lossgate.cases.materialize import materialize
from lossgate.declaration.candidate import Candidate
from lossgate.judge.comparison import Comparison, Yardstick
from lossgate.judge.explain import explain
from lossgate.losses import find_spec
from lossgate.problems.batch import Batch
from lossgate.problems.problem import Problem
from lossgate.worlds import RankFailure, World


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found on one problem. ``findings`` tell in words what is wrong; there are none if the candidate agrees."""

    problem: Problem
    comparisons: tuple[Comparison, ...] = ()
    findings: tuple[str, ...] = ()
    branches: frozenset[str] = field(default_factory=frozenset)
    told: frozenset[str] = field(default_factory=frozenset)
    """The contrasts that it speaks for, by name; see ``specs.contrasts``."""
    failure: str | None = None
    """The kind of ``RankFailure`` that ended it before its outputs could be compared."""

    @property
    def symptoms(self) -> tuple[str, ...]:
        """What it is known by: the outputs that disagree, or how it failed."""
        return (self.failure,) if self.failure else tuple(sorted(c.output for c in self.comparisons if not c.agrees))

    @property
    def agrees(self) -> bool:
        return not self.findings


def examine(candidate: Candidate, problem: Problem, world: World, contrasts: Iterable[Contrast] = ()) -> Examination:
    """Run and judge ``candidate`` on ``problem``, and see for which of ``contrasts`` it speaks.

    Raises ``CandidateError`` if the candidate breaks its declared interface.
    """
    batch = materialize(problem)
    try:
        result = execute(candidate, batch, world)
    except RankFailure as failure:
        return Examination(problem=problem, findings=(str(failure),), failure=type(failure).__name__)
    yardstick = Yardstick(candidate, batch, result.outputs)
    comparisons = tuple(yardstick.judge(result))
    findings = tuple(line for comparison in comparisons for line in explain(comparison))
    return Examination(
        problem=problem,
        comparisons=comparisons,
        findings=findings,
        branches=_branches(batch),
        told=frozenset(str(contrast) for contrast in told(contrasts, yardstick, result.dtypes)),
    )


def branches_of(problem: Problem) -> frozenset[str]:
    """The branches that a problem visits, or would but for tokens that are masked since rounding decides about them."""
    return _branches(materialize(problem, settled=False))


def _branches(batch: Batch) -> frozenset[str]:
    return frozenset(find_spec(batch.problem.spec).visited_by(batch))
