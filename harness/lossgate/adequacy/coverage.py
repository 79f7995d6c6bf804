# SPDX-License-Identifier: Apache-2.0
"""Which coverage goals the problems of a candidate on a layout must reach."""

from lossgate.declaration.any_value import ANY
from lossgate.declaration.candidate import Candidate
from lossgate.layout import Layout
from lossgate.specs.coverage import CoverageGoal


def required_goals(candidate: Candidate, layout: Layout, dtype: str) -> dict[str, CoverageGoal]:
    """Returns the goals that a problem of this candidate on this layout can reach, by name."""
    goals = candidate.spec.all_goals
    return {name: goal for name, goal in goals.items() if _reachable(goal, candidate, layout, dtype)}


def _reachable(goal: CoverageGoal, candidate: Candidate, layout: Layout, dtype: str) -> bool:
    if (goal.heads and candidate.head not in goal.heads) or (goal.dtypes and dtype not in goal.dtypes):
        return False
    if goal.axes and all(layout.sizes[axis] < goal.least_ranks for axis in goal.axes):
        return False
    for option, unreachable in goal.unreachable_if.items():
        values = candidate.supported(option)
        if values is not ANY and all(value in unreachable for value in values):
            return False
    return True
