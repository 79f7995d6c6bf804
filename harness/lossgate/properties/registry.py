# SPDX-License-Identifier: Apache-2.0
"""The registry of properties."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import look_up
from lossgate.cases.case import Case
from lossgate.declaration.candidate import Candidate, Kernel
from lossgate.judge.comparison import Comparison, Manner
from lossgate.judge.explain import explain
from lossgate.specs.outputs import Output

Resources = Mapping[str, Mapping[str, float]]
"""What a call used: numbers by name. See ``observe``."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a property found on one case."""

    comparisons: tuple[Comparison, ...] = ()
    """Outputs that were compared by the judge; those that disagree are findings."""
    faults: tuple[str, ...] = ()
    """Other mistakes, in words."""
    resources: Resources = field(default_factory=dict)
    """What the call used, if that was measured."""
    says_nothing: bool = False
    """Whether the case turned out to say nothing about the property; see ``Property.fits``."""

    @property
    def findings(self) -> tuple[str, ...]:
        """Everything that is wrong, in words; nothing if the property holds."""
        return (*self.faults, *explain(self.comparisons))


def called(words: str, comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """Yields comparisons whose findings say how the kernel was called, such as "with weight
    frozen".
    """
    yield from (replace(comparison, called=words) for comparison in comparisons)


class Said(Enum):
    """Whether a problem would show a mistake."""

    SAME = auto()
    """With the options of the problem, it is no mistake: a right kernel gives the same."""
    HIDDEN = auto()
    """With the options of the problem it is a mistake, but the problem would not show it."""
    SHOWN = auto()
    """The problem would show it."""


@dataclass(frozen=True, kw_only=True)
class OwnMistake:
    """A mistake that a property is there to find.

    A problem that would not show it says nothing about kernels that make it.
    """

    sentence: str
    """What a kernel with it does, such as "the loss is divided by a count of 0"."""
    matters: Callable[[Case], bool]
    """Whether it changes anything with the options of a problem. The candidate does not run."""
    can_show: Callable[[Case], bool] = lambda case: True
    """Whether a problem on which it matters could show it. The candidate does not run."""
    shows: Callable[[Case], bool] = lambda case: True
    """Whether a problem that could show it indeed shows it. The candidate may have to run, once."""
    needed: bool = True
    """Whether a verdict needs a problem that shows it. If not, one is taken where there is one."""
    metric: Output | None = None
    """The metric that it changes. A kernel need not return it."""

    def said_by(self, case: Case) -> Said:
        """Returns whether a problem would show it."""
        if not self.matters(case):
            return Said.SAME
        if self.can_show(case) and self.shows(case):
            return Said.SHOWN
        return Said.HIDDEN if self.needed else Said.SAME


Check = Callable[[Case], Checked]


@dataclass(frozen=True, kw_only=True)
class Property:
    """A rule that every correct kernel keeps, as a check of a case."""

    name: str
    summary: str
    """One line of documentation: the first line of the check's docstring."""
    check: Check
    applies: Callable[[Candidate], bool]
    runs: int
    """How often a check runs the candidate on every rank: its cost."""
    needs_adequacy: bool
    """A verdict counts only if problems reach every coverage goal, kill every option mutant, and
    would have detected an error of 1% in any output."""
    fits: Callable[[Case], bool] = lambda case: True
    """Whether a problem says anything about it."""
    remedy: str = ""
    """What to do if it fails; "" for nothing in particular."""
    remedies: Mapping[Manner, str] = field(default_factory=dict, hash=False)
    """What to do instead if it fails in some manner."""
    mended: Callable[[Candidate], Kernel] | None = None
    """Returns the kernel of a candidate, with the fault that breaks the property mended from
    outside, if that can be done. What this kernel keeps is broken for the same reason."""
    may_explain: tuple[str, ...] = ()
    """The properties that a kernel may break for the same reason, where that can't be tried."""
    shrinks: bool = True
    """Whether a smaller problem on which it fails says more."""
    relaxed_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """The conventions under which less is asked, or nothing: the choices of each, the strictest
    first."""
    of_ranks: bool = False
    """Whether it checks how ranks work together, so that more ranks say more."""
    mistakes: Callable[[Candidate], Sequence[OwnMistake]] = lambda candidate: ()
    """The mistakes that it is there to find. A verdict counts only if, for each mistake that
    matters, some problem would have shown it."""

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return find_property, (self.name,)


PROPERTIES: dict[str, Property] = {}
"""All registered properties, by name."""


def property(
    name: str,
    *,
    applies: Callable[[Candidate], bool] = lambda candidate: True,
    fits: Callable[[Case], bool] = lambda case: True,
    remedy: str = "",
    remedies: Mapping[Manner, str] | None = None,
    mended: Callable[[Candidate], Kernel] | None = None,
    may_explain: tuple[str, ...] = (),
    shrinks: bool = True,
    relaxed_by: Mapping[str, tuple[str, ...]] | None = None,
    of_ranks: bool = False,
    runs: int = 1,
    needs_adequacy: bool = False,
    mistakes: Callable[[Candidate], Sequence[OwnMistake]] = lambda candidate: (),
) -> Callable[[Check], Property]:
    """Registers the decorated check as a property.

    Args:
        name: its name in cells.
        applies: whether a candidate is held to it; by default every candidate is.
        fits: whether a problem says anything about it; by default every problem does. It should
            not run the candidate.
        remedy: what to do if it fails, for people.
        remedies: what to do instead, by the manner in which it fails.
        mended: returns the kernel with the fault that breaks the property mended from outside. What
            this kernel keeps is said to be broken for the same reason.
        may_explain: the properties that a kernel may break for the same reason, where that can't be
            tried.
        shrinks: whether a problem on which it fails is made smaller. Choose False for a check that
            makes a problem of its own.
        relaxed_by: the conventions under which less is asked, or nothing: the choices of each, the
            strictest first. The advice on a failure names the first under which the property holds.
        of_ranks: whether it checks how ranks work together. It is then checked on every layout,
            also with many ranks on an axis.
        runs: how often a check runs the candidate on every rank.
        needs_adequacy: whether a verdict counts only if the problems reach every coverage goal and
            kill every option mutant. That is for checks that compare outputs with the reference.
        mistakes: returns the mistakes that it is there to find in a candidate. Problems are chosen
            that would show them. If no problem would show one of them, the verdict is INCONCLUSIVE.

    Raises:
        UsageError: if the name is taken, or the check has no docstring.
    """

    def register(check: Check) -> Property:
        if name in PROPERTIES and _defined_at(PROPERTIES[name].check) != _defined_at(check):
            raise UsageError(f"property({name!r}): another property has this name; choose another name")
        summary = (check.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        if not summary:
            raise UsageError(f"property({name!r}): the check has no docstring; say in its first line what it asks")
        PROPERTIES[name] = Property(
            name=name,
            summary=summary,
            check=check,
            applies=applies,
            fits=fits,
            remedy=remedy,
            remedies=remedies or {},
            mended=mended,
            may_explain=may_explain,
            shrinks=shrinks,
            relaxed_by=relaxed_by or {},
            of_ranks=of_ranks,
            runs=runs,
            needs_adequacy=needs_adequacy,
            mistakes=mistakes,
        )
        return PROPERTIES[name]

    return register


def _defined_at(check: Check) -> tuple[str, str]:
    """Returns the file and the name of a check. A file that is imported twice defines it twice."""
    code = getattr(check, "__code__", None)
    return (code.co_filename, code.co_qualname) if code is not None else ("", repr(check))


def find_property(name: str) -> Property:
    """Returns the property of a name. If there is none, the ``UsageError`` suggests a spelling."""
    return look_up("property", name, PROPERTIES)
