# SPDX-License-Identifier: Apache-2.0
"""What a check of a reference asks, and what it has found."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lossgate.cases.bound_problem import BoundProblem
from lossgate.specs.spec import Spec


@dataclass(frozen=True)
class Subject:
    """A spec that is checked, and problems of it."""

    spec: Spec
    problems: Sequence[BoundProblem]
    """Ordinary problems, of every head."""

    @property
    def with_loss(self) -> Sequence[BoundProblem]:
        """The problems, if the spec has a loss."""
        return self.problems if self.spec.reference is not None else ()


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a spec."""

    seen: str
    """What was seen."""
    change: str
    """What to change."""
    problem: str = ""
    """A problem that shows it, in words; empty if it is not a matter of one problem."""


@dataclass(frozen=True)
class Check:
    """Something that a spec must hold to."""

    name: str
    asks: str
    """What must hold, in words."""
    find: Callable[[Subject], Iterator[Finding]]
    """Yields what does not hold."""
    needed: bool = False
    """If it fails, the checks after it say nothing."""


@dataclass(frozen=True)
class Outcome:
    """One check, done."""

    check: Check
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def on(bound: BoundProblem) -> str:
    """Describes a problem."""
    return bound.problem.describe()
