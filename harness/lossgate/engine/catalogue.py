# SPDX-License-Identifier: Apache-2.0
"""Checks the further properties of a cell, on a few of the problems that were tried.

All properties but agreement are further properties. They vary the call and not the problem: whether
a kernel handles a frozen weight or a second backward hardly depends on the numbers. So a few
problems are enough, and each cell takes other ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from zlib import crc32

from msgspec.structs import replace

from lossgate.adequacy.entry import Placed
from lossgate.base.errors import CandidateError
from lossgate.cases.case import Case
from lossgate.engine.advice import remedy_of
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import PropertyRecord
from lossgate.engine.explained import Broken, explained, in_order
from lossgate.engine.own_mistakes import SaidByProblem, choice_behind, gaps_of, may_show, said_by, shown_by, unseen
from lossgate.engine.recorded import share_of
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.engine.trials import Trials, not_again
from lossgate.properties import Property
from lossgate.properties.registry import Resources, Said
from lossgate.worlds.base import Hang, RankFailure, World, WorldLost

_FEW_TOKENS = 256
"""The most tokens of a problem. Properties call a kernel dozens of times, and longer problems would
take most of a cell's time.
"""


_OF_BRANCHES = 3
"""The most problems that are taken for their branches, unless the settings ask for more. They have
nearly all, and each costs all calls of a property."""


@dataclass(frozen=True)
class _Check:
    """The check of one property, which grows with each problem."""

    held_to: Property
    of_absent: frozenset[str]
    """The sentences of mistakes in metrics that the kernel does not return."""
    cases: list[CaseResult] = field(default_factory=list)
    """The results so far."""
    said: list[SaidByProblem] = field(default_factory=list)
    """Whether each problem so far would show the property's own mistakes."""


class Catalogue:
    """The further properties of one cell."""

    def __init__(self, cell: Cell, world: World, settings: Settings, search: Search) -> None:
        """Prepares to check the properties in ``cell.also``, on problems of the search."""
        self._cell, self._world, self._settings, self._search = cell, world, settings, search
        tried = [one for one in search.placed if one.problem.tokens <= _FEW_TOKENS] or search.placed
        self._tried = _starting_at(str(cell), tried)
        self._cases: dict[Placed, Case] = {}
        self._broken: list[Broken] = []
        self.failure: CaseResult | None = None
        """The smallest case found that breaks the broken property that is told first."""
        self.shrink_calls = 0
        self.resources: Resources = {}
        """The memory and traffic of a call on the failing problem, or else on the last problem.
        Empty if no property measured them."""

    def run(self) -> tuple[PropertyRecord, ...]:
        """Checks every property. Those that fail come first, in the order in which they are told.

        If a property fails and a later one loses the ranks, only the records before that are
        returned.

        Raises:
            WorldLost: if the ranks are lost before a property failed.
        """
        found, lost = list[PropertyRecord](), False
        for held_to in self._cell.also:
            try:
                record = self._check(held_to)
            except WorldLost:
                if not self._broken:
                    raise
                lost = True
                break
            if self._search.failure is not None:  # agreement failed on a problem that was run for the property
                break
            found.append(record)
        return tuple(self._told(found, lost=lost))

    def _told(self, records: Sequence[PropertyRecord], *, lost: bool) -> Iterator[PropertyRecord]:
        """Yields the records in the order in which they are told, with what explains each.

        The first failure is shrunk, unless the ranks are lost.
        """
        broken = in_order(self._broken)
        by_name = {record.name: record for record in records}
        by_others = {} if lost else explained(broken, self._cell, self._world)
        for number, one in enumerate(broken):
            record = by_name.pop(one.held_to.name)
            case = one.case
            if number == 0:
                case = self.failure = case if lost else self._shrunk(one)
            remedy = remedy_of(self._cell.held_to(record.name), case, self._world)
            yield replace(
                record,
                findings=case.findings,
                on=case.problem.describe(),
                remedy=remedy,
                explained=by_others.get(record.name),
            )
        yield from by_name.values()

    def _check(self, held_to: Property) -> PropertyRecord:
        if reason := self._cell.candidate.exempt.get(held_to.name):
            return PropertyRecord(name=held_to.name, exempt=reason)
        start, check = perf_counter(), _Check(held_to, self._of_absent_metrics(held_to))
        cases = check.cases
        for placed in self._chosen(check):
            case = run_case(self._case(placed), held_to)
            if case.fits:
                cases.append(case)
            if not case.agrees:
                self._broken.append(Broken(held_to, placed, case))
                break
        margin = max((c.margin for case in cases for c in case.comparisons), default=0.0)
        if cases and not self.resources:
            self.resources = cases[-1].resources
        return PropertyRecord(
            name=held_to.name,
            problems=len(cases),
            comparisons=sum(len(case.comparisons) for case in cases),
            margin=share_of(margin),
            seconds=round(perf_counter() - start, 4),
            gaps=gaps_of(held_to, check.said),
        )

    def _of_absent_metrics(self, held_to: Property) -> frozenset[str]:
        returned = {comparison.output for case in self._search.cases for comparison in case.comparisons}
        mistakes = held_to.mistakes(self._cell.candidate)
        return frozenset(one.sentence for one in mistakes if one.metric and one.metric not in returned)

    def _chosen(self, check: _Check) -> Iterator[Placed]:
        """Yields the problems on which a property is checked. The caller adds to ``check.cases``.

        First come a few problems in which every option takes each of its choices, because a kernel
        may break the property in one branch alone. Then come problems that would show one of the
        property's own mistakes that no problem before would show. Problems that were tried come
        before new ones, which are tried for agreement now. If these are too few, others follow;
        those that may show a mistake come before the rest.
        """
        others = list(self._tried)
        for placed in self._of_all_branches(others, check.held_to):
            self._shows_more(placed, check)
            yield placed
        for placed in list(others):
            if self._shows_more(placed, check):
                others.remove(placed)
                yield placed
        for placed in self._not_run(check):
            if not self._search.run_also(placed):
                return
            if self._shows_more(placed, check):
                yield placed
        if shown := shown_by(check.said):
            others.sort(key=lambda one: not may_show(self._case(one), check.held_to, shown))
        for placed in others:
            if len(check.cases) >= self._settings.property_problems:
                return
            yield placed

    def _of_all_branches(self, left: list[Placed], held_to: Property) -> Iterator[Placed]:
        """Yields a few problems that together have the most branches of all: a greedy set cover. It
        removes them from the list, and those that say nothing about the property.
        """
        if held_to.of_ranks and self._cell.layout.ranks > 1:  # it is checked on every layout, and on one rank by branch
            return
        missing, number = set[str]().union(*map(self._search.branches, left)), 0
        while missing and left and number < max(_OF_BRANCHES, self._settings.property_problems):
            most = max(left, key=lambda one: len(missing & self._search.branches(one)))
            left.remove(most)
            if not missing & self._search.branches(most):
                return
            if held_to.fits(self._case(most)):
                missing -= self._search.branches(most)
                number += 1
                yield most

    def _not_run(self, check: _Check) -> Iterator[Placed]:
        """Yields problems that were not run and may show a mistake that no problem shows so far.

        They come from the deck. If these are not enough, they are drawn on purpose.
        """
        if unseen(check.said):
            for placed in list(self._search.not_run()):
                if may_show(self._case(placed), check.held_to, unseen(check.said)):
                    yield placed
        for mistake in check.held_to.mistakes(self._cell.candidate):
            sentence = mistake.sentence
            if sentence not in unseen(check.said):
                continue
            example = next(case for case in self._cases.values() if mistake.matters(case))
            good = partial(self._may_show, check.held_to, sentence)
            for placed in self._search.drawn_for(f"show {sentence}", choice_behind(mistake, example), good):
                if sentence in unseen(check.said):
                    yield placed

    def _may_show(self, held_to: Property, sentence: str, placed: Placed) -> bool:
        return may_show(self._new_case(placed), held_to, [sentence])

    def _shows_more(self, placed: Placed, check: _Check) -> bool:
        """Finds out which of the property's own mistakes a problem would show. Returns whether it
        would show one that no problem before would show.
        """
        try:
            check.said.append(said_by(self._case(placed), check.held_to, shown_by(check.said) | check.of_absent))
        except (RankFailure, CandidateError):  # the kernel agreed before: the check tells what is wrong now
            return True
        return Said.SHOWN in check.said[-1].values()

    def _case(self, placed: Placed) -> Case:
        """Returns the case of a problem. It is made once, because it keeps its plain call."""
        if placed not in self._cases:
            self._cases[placed] = self._new_case(placed)
        return self._cases[placed]

    def _new_case(self, placed: Placed) -> Case:
        return Case(self._cell.candidate, placed.problem, self._world, placed.entry.bound)

    def _shrunk(self, broken: Broken) -> CaseResult:
        """Returns the failure of a property on the smallest problem on which it fails."""
        held_to, case = broken.held_to, broken.case
        if not held_to.shrinks or case.failure == Hang.__name__:  # a try may cost a time-out, and the ranks
            return case
        trials = Trials(self._cell.held_to(held_to.name), self._world, self._settings)
        trials.try_problem(broken.placed)
        self.shrink_calls = trials.shrink_calls
        return trials.failure or not_again(case)


def _starting_at(name: str, placed: Sequence[Placed]) -> list[Placed]:
    """Rotates a list of problems by a number that depends on a name, so that cells take different
    problems.
    """
    start = crc32(name.encode()) % len(placed) if placed else 0
    return [*placed[start:], *placed[:start]]
