# SPDX-License-Identifier: Apache-2.0
"""Looks for a problem on which a candidate disagrees, and makes it small.

Problems come from a deck, which all layouts share; Hypothesis draws and shrinks them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import monotonic

import hypothesis
from hypothesis.errors import Flaky, Unsatisfiable

from lossgate.adequacy.deck import WANTED, Entry, Placed, deck_of
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.adequacy.selection import choose
from lossgate.adequacy.told_apart import not_told_apart
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.placement import splits_of
from lossgate.cases.size import is_large, reason_against
from lossgate.declaration.any_value import ANY
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.settings import Settings
from lossgate.engine.survivors import Tried, tried_on
from lossgate.errors import LossgateError, UsageError
from lossgate.problems.problem import Problem
from lossgate.shape import Shape
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS
from lossgate.worlds.base import Hang, World, WorldLost

_PADDED = 3
"""What the sequences of large problems are padded to a multiple of."""


class _DisagreementError(Exception):
    """Tells Hypothesis that a problem fails.

    It has one type and one line, so that Hypothesis sees a single failure.
    """


class _StopSearch(BaseException):
    """Ends the search at once. It is not an Exception, so that Hypothesis lets it through."""


@dataclass
class Search:
    """What a search found so far."""

    cell: Cell
    world: World
    settings: Settings
    cases: list[CaseResult] = field(default_factory=list)
    """The cases that count, in order."""
    failure: CaseResult | None = None
    """What came of the smallest case that disagrees."""
    failing_case: Case | None = None
    """That case itself, with what each rank returned, for a second look."""
    calls_after_failure: int = 0
    """Problems that were tried to make it smaller."""
    surviving: dict[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem has killed."""
    equivalent: frozenset[str] = frozenset()
    """Those of them that changed nothing on many problems."""
    untried: dict[str, str] = field(default_factory=dict)
    """The sizes that could not be tried, and why."""
    near: dict[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem has killed, and none need kill: their choices are near."""
    _tried: list[tuple[BoundProblem, CaseResult]] = field(default_factory=list)
    """The problem of each case, and what came of it. Large ones are let go, for their tensors."""
    _used: set[int] = field(default_factory=set)
    """The problems of the deck that were run, by the identity of what was drawn."""
    _error: LossgateError | None = None
    _failed_at: float = 0.0

    def __post_init__(self) -> None:
        self._deck = deck_of(self.cell.candidate, self.cell.dtype, self.settings.seed)
        self._splits = splits_of(self.cell.candidate)
        if self.cell.property.needs_adequacy:
            self.surviving |= self._deck.mutants
            self.near |= self._deck.near

    @property
    def still_to_kill(self) -> dict[str, OptionMutant]:
        """The mutants that a problem must still kill."""
        return {name: mutant for name, mutant in self.surviving.items() if name not in self.equivalent}

    @property
    def not_told_apart(self) -> tuple[str, ...]:
        """The choices of options that no problem told apart, and that none need tell apart."""
        alike = self._deck.alike if self.equivalent else frozenset[str]()
        never_valid = self.equivalent - alike
        asked = (m for name, m in {**self._deck.mutants, **self._deck.near}.items() if name not in never_valid)
        unseen = {*self.near, *alike.intersection(self.surviving)}
        return not_told_apart(self.cell.candidate, asked, unseen)

    @property
    def drawn_for_goals(self) -> dict[str, int]:
        """How many problems were drawn for each goal that is missing."""
        return {goal: self._deck.drawn_for(goal, self.cell.layout) for goal in self.missing_goals}

    def tried_on_survivors(self) -> dict[OptionMutant, Tried]:
        """Returns what the problems say of the mutants that survive. It takes a while."""
        return tried_on(self.still_to_kill.values(), self._tried)

    @property
    def missing_goals(self) -> set[str]:
        """The coverage goals that a problem must still reach."""
        return set(self.cell.required_goals).difference(*(case.covered for case in self.cases))

    def run(self, round_: int = 0) -> None:
        """Runs problems until one fails, then shrinks it. Another round runs other problems.

        Raises:
            UsageError: if no valid options are left for the candidate.
        """
        entries, least = self._entries(), len(self.cases) + self.settings.examples
        if self.cell.property.needs_adequacy:
            self.equivalent = self._deck.equivalent
        chance, drawn = Random(f"{self.settings.seed} {round_} {self.cell}"), 0
        large = self._large(self._deck.large, chance) if round_ == 0 else []
        least -= len(large)
        while True:
            placed = self._on_layout(entries)
            unused = [one for one in placed if id(one.entry.drawn) not in self._used]
            wanted = {*self.still_to_kill, *self.missing_goals}
            self._run_all(choose(unused, wanted, least - len(self.cases), chance))
            self._run_all(large)  # after the others: what they show is easier to make small
            least, large = least + len(large), []
            nothing_fits = not placed and drawn > 0
            if self.failure is not None or len(self.cases) >= least or nothing_fits:
                break
            entries, drawn = self._deck.more(drawn), drawn + 1
        if round_ == 0:
            self._run_sizes(chance)

    def _run_sizes(self, chance: Random) -> None:
        """Runs a problem of each size that the settings name. Its tensors are let go at once."""
        for size in self.settings.sizes:
            found = self._large(self._deck.of_shape(Shape.of_size(size)), chance)
            why = (
                "it does not fit on the layout"
                if not found
                else reason_against(found[0].problem, self.cell.candidate.spec)
            )
            if why:
                self.untried[size] = why
            else:
                self._run_all(found)

    def _large(self, entries: Sequence[Entry], chance: Random) -> list[Placed]:
        """Returns large problems, each with one split of the vocabulary.

        They are padded: on many ranks few others have padding between sequences.
        """
        if not self.cell.property.needs_adequacy:
            return []
        placed = self._on_layout(entries)
        by_entry = {id(one.entry.drawn): one for one in chance.sample(placed, len(placed))}
        return [replace(one, placement=replace(one.placement, pad_to_multiple=_PADDED)) for one in by_entry.values()]

    def fill_gaps(self, round_: int) -> None:
        """Runs problems that are likely to kill survivors or reach missing goals, until one
        fails.
        """
        for name in sorted(self.still_to_kill):
            if name in self.surviving and self.failure is None:
                self._kill(name, round_)
        for goal in sorted(self.missing_goals):
            if self.failure is None:
                self._reach(goal, round_)

    def _kill(self, name: str, round_: int) -> None:
        known = self._on_layout([entry for entry in self._unused(self._entries()) if name in entry.kills])
        known.sort(key=lambda placed: -placed.entry.kills[name])
        for placed in (known or self._on_layout(self._unused(self._deck.killing(name, round_))))[:WANTED]:
            if name in self.surviving and id(placed.entry.drawn) not in self._used:
                self._run_all([placed])

    def _reach(self, goal: str, round_: int) -> None:
        known = [placed for placed in self._on_layout(self._unused(self._entries())) if goal in placed.goals]
        if not known:
            drawn = self._unused(self._draw_reaching(goal, round_))
            known = [placed for placed in self._on_layout(drawn) if goal in placed.goals]
        for placed in known[:WANTED]:
            if goal in self.missing_goals:
                self._run_all([placed])

    def _draw_reaching(self, goal: str, round_: int) -> Sequence[Entry]:
        if goal in SHARDING_GOALS or goal in IDS_GOALS:
            return self._deck.reaching_on(self.cell.layout, self._splits, goal, round_)
        return self._deck.reaching(goal, round_)

    def _entries(self) -> Sequence[Entry]:
        try:
            return self._deck.entries
        except Unsatisfiable:
            raise self._no_valid_options() from None

    def _unused(self, entries: Iterable[Entry]) -> list[Entry]:
        return [entry for entry in entries if id(entry.drawn) not in self._used]

    def _on_layout(self, entries: Sequence[Entry]) -> list[Placed]:
        return self._deck.on(self.cell.layout, self._splits, entries)

    def _run_all(self, placed: Iterable[Placed]) -> None:
        for one in placed:
            if self.failure is not None:
                return
            self._used.add(id(one.entry.drawn))
            self._try(one)

    def _try(self, placed: Placed) -> None:
        """Runs one problem. If the candidate fails on it, makes the problem smaller."""
        try:
            self._check(placed.problem, placed.entry)
        except _StopSearch:
            pass
        except _DisagreementError:
            self._shrink(placed)
        if self._error is not None:
            raise self._error

    def _shrink(self, placed: Placed) -> None:
        """Has Hypothesis draw the problem again, and make it smaller on its own layout."""
        placement, simplest, reached = placed.placement, True, False
        plainest = placement.plainest(self._splits)
        try:
            if plainest.fits(placed.entry.bound.problem):
                self._check(plainest.put(placed.entry.bound.problem))
        except _DisagreementError:
            placement = plainest
        except _StopSearch:
            return

        def check(problem: Problem) -> None:
            nonlocal simplest, reached
            first, simplest = simplest, False  # if it passes now, Hypothesis does not try it again
            if first or reached or problem == placed.entry.drawn:
                hypothesis.assume(placement.vocab_split == "even" or placement.fits(problem))
                reached = True
                self._check(placement.put(problem))
                reached = not first

        try:
            placed.entry.draws.each(check, shrink=True)
        except (_DisagreementError, _StopSearch):
            return
        except Flaky:
            pass
        self._add_flaky()  # what failed once did not fail again

    def _no_valid_options(self) -> UsageError:
        candidate = self.cell.candidate
        given = ((option.name, candidate.supported(option.name)) for option in candidate.spec.options)
        first = {name: values[0] for name, values in given if values is not ANY}
        return UsageError(
            f"candidate {candidate.name!r}: supports={dict(candidate.supports)!r} leaves no valid combination of "
            f"options: {candidate.spec.conflict(first)}. Change supports so that one combination is valid"
        )

    def _check(self, problem: Problem, entry: Entry | None = None) -> None:
        """Runs a problem; raises if the candidate disagrees, or if nothing more is to be tried."""
        if self.failure is not None:
            self.calls_after_failure += 1
            too_late = monotonic() - self._failed_at > self.settings.timeout
            if too_late or self.calls_after_failure > self.settings.shrink_calls:
                raise _StopSearch
        try:
            result = self._run(problem, entry)
        except LossgateError as error:
            if isinstance(error, WorldLost) and self.failure is not None:
                raise _StopSearch from None  # that failure is why it is lost
            self._error = error
            raise _StopSearch from None
        if result.agrees:
            return
        if result.failure == Hang.__name__:  # each further try would cost a time-out
            raise _StopSearch
        raise _DisagreementError

    def _run(self, problem: Problem, entry: Entry | None) -> CaseResult:
        """Runs a problem and records what came of it.

        Of all cases only the smallest one that fails is kept, because a case holds tensors.
        """
        bound = entry.bound if entry is not None else BoundProblem(self.cell.candidate.spec, problem)
        case = Case(self.cell.candidate, problem, self.world, bound)
        unkilled = {**self.surviving, **self.near}
        likely = [unkilled[name] for name in entry.kills if name in unkilled] if entry is not None else ()
        result = run_case(case, self.cell.property, likely if self.failure is None else ())
        if self.failure is None:
            self.cases.append(result)
            if not is_large(problem):
                self._tried.append((bound, result))
            for name in result.killed:
                (self.near if name in self.near else self.surviving).pop(name)
        if not result.agrees and self.failure is None:
            self._failed_at = monotonic()
        if not result.agrees and (self.failure is None or _size(problem) <= _size(self.failure.problem)):
            self.failure, self.failing_case = result, case
        return result

    def _add_flaky(self) -> None:
        assert self.failure is not None
        finding = "the candidate is not deterministic: the same problem, run again, gave another result"
        self.failure = replace(self.failure, findings=(*self.failure.findings, finding), failure=None, unstable=True)


def _size(problem: Problem) -> tuple[int, int, int, int]:
    return problem.tokens, problem.vocab, problem.hidden, len(problem.to_json())
