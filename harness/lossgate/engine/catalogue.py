# SPDX-License-Identifier: Apache-2.0
"""Holds a candidate to the properties beside agreement, on a few of the problems that were tried.

A property varies the call, not the problem: whether a frozen weight or a second backward is handled
hangs little on the numbers. So a few problems are enough, and each cell takes others.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from zlib import crc32

from lossgate.adequacy.entry import Placed
from lossgate.base.errors import CandidateError
from lossgate.cases.case import Case
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import PropertyRecord
from lossgate.engine.own_mistakes import SaidByProblem, choice_behind, gaps_of, may_show, said_by, shown_by, unseen
from lossgate.engine.precision_advice import remedy_of
from lossgate.engine.recorded import share_of
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.engine.trials import Trials, not_again
from lossgate.properties import Property
from lossgate.properties.registry import Resources, Said
from lossgate.worlds.base import Hang, RankFailure, World, WorldLost

_FEW_TOKENS = 256
"""Longer problems are for agreement: dozens of calls of each would take most of a cell's time."""
_PROBES = 4
"""Problems that properties share, so that each is run plainly once."""


class Catalogue:
    """The properties beside agreement of one cell."""

    def __init__(self, cell: Cell, world: World, settings: Settings, search: Search) -> None:
        """Prepares to hold a candidate to the properties.

        Args:
            cell: whose ``also`` names them.
            world: where the ranks run.
            settings: say on how many problems each is checked.
            search: has the problems on which the candidate agrees, and others of the same deck.
        """
        self._cell, self._world, self._settings, self._search = cell, world, settings, search
        tried = [one for one in search.placed if one.problem.tokens <= _FEW_TOKENS] or search.placed
        start = crc32(str(cell).encode()) % len(tried) if tried else 0
        self._tried = [*tried[start:], *tried[:start]]
        self._cases: dict[int, Case] = {}
        self.failure: CaseResult | None = None
        """The smallest problem found on which the first property that fails does so."""
        self.shrink_calls = 0
        self.resources: Resources = {}
        """What a call used, if a property measured that: on the problem of its findings, or on the
        last."""

    def run(self) -> tuple[PropertyRecord, ...]:
        """Checks every property; those before the one that lost the ranks, if one did.

        Raises:
            WorldLost: if the ranks are lost, and no property failed before that.
        """
        found: list[PropertyRecord] = []
        for held_to in self._cell.also:
            try:
                own = self._check(held_to)
            except WorldLost:
                if self.failure is None:
                    raise
                break
            if self._search.failure is not None:  # it disagrees on a problem that was run for the property
                break
            found.append(own)
        return tuple(found)

    def _check(self, held_to: Property) -> PropertyRecord:
        if reason := self._cell.candidate.exempt.get(held_to.name):
            return PropertyRecord(name=held_to.name, exempt=reason)
        start, cases, said = perf_counter(), list[CaseResult](), list[SaidByProblem]()
        for placed in self._chosen(held_to, cases, said):
            case = run_case(self._case(placed), held_to)
            if case.fits:
                cases.append(case)
            if not case.agrees:
                self._shrink(placed, held_to, case)
                break
        failing = next((case for case in cases if not case.agrees), None)
        margin = max((c.margin for case in cases for c in case.comparisons), default=0.0)
        own = self.failure if failing is not None and self.failure and self.failure.held_to == held_to.name else failing
        if cases and not self.resources:
            self.resources = (own or cases[-1]).resources
        return PropertyRecord(
            name=held_to.name,
            problems=len(cases),
            comparisons=sum(len(case.comparisons) for case in cases),
            margin=share_of(margin),
            seconds=round(perf_counter() - start, 4),
            findings=own.findings if own is not None else (),
            on=own.problem.describe() if own is not None else "",
            remedy="" if own is None else remedy_of(self._cell.held_to(held_to.name), own, self._world),
            gaps=gaps_of(held_to, said),
        )

    def _chosen(self, held_to: Property, cases: Sequence[CaseResult], said: list[SaidByProblem]) -> Iterator[Placed]:
        """Yields the problems on which a property is checked.

        First come those that would show a mistake of its own which none before would: of those that
        were tried, and then of others, which are tried now. If they are too few, further ones
        follow, if possible such as may show a mistake.

        Args:
            held_to: the property.
            cases: what came of those that were yielded before.
            said: is given what each problem says of the property's own mistakes.
        """
        others = list[Placed]()
        for placed in self._in_turn(held_to):
            if self._shows_more(placed, held_to, said):
                yield placed
            else:
                others.append(placed)
        for placed in self._further(held_to, said):
            if not self._search.run_also(placed):
                return
            if self._shows_more(placed, held_to, said):
                yield placed
        if shown := shown_by(said):
            others.sort(key=lambda one: not may_show(self._case(one), held_to, shown))
        for placed in others:
            if len(cases) >= self._settings.property_problems:
                return
            yield placed

    def _further(self, held_to: Property, said: Sequence[SaidByProblem]) -> Iterator[Placed]:
        """Yields problems that were not run and may show a mistake that none shows so far: those of
        the deck, and then such as are drawn on purpose.
        """
        for placed in list(self._search.not_run()) if unseen(said) else ():
            if may_show(self._case(placed), held_to, unseen(said)):
                yield placed
        for own in held_to.mistakes(self._cell.candidate):
            if own.sentence not in unseen(said):
                continue
            matters = next(case for case in self._cases.values() if own.matters(case))
            good = partial(self._may_show, held_to, own.sentence)
            for placed in self._search.drawn_for(f"show {own.sentence}", choice_behind(own, matters), good):
                if own.sentence in unseen(said):
                    yield placed

    def _may_show(self, held_to: Property, sentence: str, placed: Placed) -> bool:
        return may_show(self._new_case(placed), held_to, [sentence])

    def _shows_more(self, placed: Placed, held_to: Property, said: list[SaidByProblem]) -> bool:
        """Returns whether a problem would show a mistake that none before would, and notes it."""
        try:
            said.append(said_by(self._case(placed), held_to, shown_by(said)))
        except (RankFailure, CandidateError):  # it agreed before: the check tells what is wrong now
            return True
        return Said.SHOWN in said[-1].values()

    def _in_turn(self, held_to: Property) -> Iterator[Placed]:
        """Yields the problems to try: the shared ones, starting at another for each property, and
        then the others.
        """
        shared = min(_PROBES, len(self._tried))
        start = crc32(held_to.name.encode()) % shared if shared else 0
        yield from (*self._tried[start:shared], *self._tried[:start], *self._tried[shared:])

    def _case(self, placed: Placed) -> Case:
        """Returns the case of a problem, which keeps what a plain call gave."""
        if id(placed) not in self._cases:
            self._cases[id(placed)] = self._new_case(placed)
        return self._cases[id(placed)]

    def _new_case(self, placed: Placed) -> Case:
        return Case(self._cell.candidate, placed.problem, self._world, placed.entry.bound)

    def _shrink(self, placed: Placed, held_to: Property, case: CaseResult) -> None:
        """Makes the problem on which a property fails smaller, if it is the first that fails."""
        if self.failure is not None:
            return
        self.failure = case
        if not held_to.shrinks or case.failure == Hang.__name__:  # a try may cost a time-out, and the ranks
            return
        trials = Trials(self._cell.held_to(held_to.name), self._world, self._settings)
        trials.try_problem(placed)
        self.failure, self.shrink_calls = trials.failure or not_again(case), trials.shrink_calls
