# SPDX-License-Identifier: Apache-2.0
"""One problem, from its description to what was found."""

from dataclasses import dataclass, field

from lossgate.declaration.candidate import Candidate
from lossgate.execution.execute import execute
from lossgate.judge.agreement import Comparison, judge
from lossgate.judge.explain import explain
from lossgate.problems.problem import Problem
from lossgate.specs import find_spec
from lossgate.specs.materialize import materialize
from lossgate.worlds import RankFailure, World


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found on one problem. ``findings`` tell in words what is wrong; there are none if the candidate agrees."""

    problem: Problem
    comparisons: tuple[Comparison, ...] = ()
    findings: tuple[str, ...] = ()
    branches: frozenset[str] = field(default_factory=frozenset)
    failure: str | None = None
    """The kind of ``RankFailure`` that ended it before its outputs could be compared."""

    @property
    def symptoms(self) -> tuple[str, ...]:
        """What it is known by: the outputs that disagree, or how it failed."""
        return (self.failure,) if self.failure else tuple(sorted(c.output for c in self.comparisons if not c.agrees))

    @property
    def agrees(self) -> bool:
        return not self.findings


def examine(candidate: Candidate, problem: Problem, world: World) -> Examination:
    """Run and judge ``candidate`` on ``problem``. Raises ``CandidateError`` if it breaks its declared interface."""
    batch = materialize(problem)
    try:
        result = execute(candidate, batch, world)
    except RankFailure as failure:
        return Examination(problem=problem, findings=(str(failure),), failure=type(failure).__name__)
    comparisons = tuple(judge(candidate, batch, result))
    findings = tuple(line for comparison in comparisons for line in explain(comparison))
    return Examination(
        problem=problem,
        comparisons=comparisons,
        findings=findings,
        branches=frozenset(find_spec(problem.spec).visited(batch)),
    )
