# SPDX-License-Identifier: Apache-2.0
"""Looks for a problem on which a candidate disagrees.

It chooses problems from a deck, which all layouts share; ``trials`` runs them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import process_time

from hypothesis.errors import Unsatisfiable

from lossgate.adequacy.choice import choice_of, choice_on, declared
from lossgate.adequacy.deck import WANTED, deck_of
from lossgate.adequacy.entry import Entry, Placed
from lossgate.adequacy.known_mistakes import NOTHING_ASKED, MistakesShown
from lossgate.adequacy.option_mutants import OptionMutant, not_distinguished
from lossgate.adequacy.set_cover import choose
from lossgate.base.errors import UsageError
from lossgate.base.shape import Shape
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.large import is_large
from lossgate.cases.option_strategies import ForcedOption
from lossgate.declaration.supports import ANY
from lossgate.engine.survivors import Tried, tried_on
from lossgate.engine.trials import Trials
from lossgate.problems.problem import Problem
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS

_PADDED = 3
"""What the sequences of large problems are padded to a multiple of."""


@dataclass
class Search(Trials):
    """Chooses the problems of a cell, until one fails or they are enough."""

    equivalent: frozenset[str] = frozenset()
    """The option mutants that changed nothing on many problems."""
    untried: dict[str, str] = field(default_factory=dict)
    """The sizes that could not be tried, and why."""
    placed: list[Placed] = field(default_factory=list)
    """The problems of ordinary size that were tried, in order."""
    mistakes: MistakesShown = NOTHING_ASKED
    """Which known mistakes the problems of the first round show."""
    _used: dict[int, Problem] = field(default_factory=dict)
    """The problems that were run, as they were drawn, by identity: so none gets that of another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._deck = deck_of(self.cell.candidate, self.cell.dtype, self.settings.seed)
        if self.cell.property.needs_adequacy:
            self.surviving |= self._deck.mutants
            self.near |= self._deck.near

    @property
    def still_to_kill(self) -> dict[str, OptionMutant]:
        """The mutants that a problem must still kill."""
        return {name: mutant for name, mutant in self.surviving.items() if name not in self.equivalent}

    @property
    def not_distinguished(self) -> tuple[str, ...]:
        """The choices of options that no problem distinguished, and that none need to."""
        alike = self._deck.alike if self.equivalent else frozenset[str]()
        never_valid = self.equivalent - alike
        asked = (m for name, m in {**self._deck.mutants, **self._deck.near}.items() if name not in never_valid)
        compared = {name for name, mutant in self.near.items() if self._is_ever_valid(mutant)}
        unseen = {*compared, *alike.intersection(self.surviving)}
        return not_distinguished(self.cell.candidate, asked, unseen)

    def _is_ever_valid(self, mutant: OptionMutant) -> bool:
        """Returns whether a problem that was tried may be given either choice of a mutant."""
        for bound, _ in self._tried:
            own = mutant.put_choice(bound.bound_spec, self.cell.candidate, Random(bound.problem.seed))
            if own is not None and mutant.mutate(own) is not None:
                return True
        return False

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
        chance, large, drawn = *self._begin(round_), 0
        least -= len(large)
        if round_ == 0 and self.asks_mistakes:
            self._run_all(self._showing_mistakes(chance))
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

    @property
    def asks_mistakes(self) -> bool:
        """Whether problems must show the known mistakes."""
        return self.cell.property.needs_adequacy

    def _showing_mistakes(self, chance: Random) -> list[Placed]:
        """Returns the problems that show known mistakes, each in one split of the vocabulary."""
        start, candidate, dtype, layout = process_time(), self.cell.candidate, self.cell.dtype, self.cell.layout
        chosen = choice_of(candidate, self._deck, dtype)
        problems = chosen.entries(self._deck)
        placed = self._on_layout([problems[text] for text in chosen.problems])
        fitting = {one.entry.drawn.to_json() for one in placed}
        surviving, too_small, shown = chosen.surviving, chosen.too_small, chosen.shown
        if unfit := {name for text, names in chosen.problems.items() if text not in fitting for name in names}:
            others = choice_on(candidate, self._deck, dtype, layout, unfit)
            problems = others.entries(self._deck)
            placed += self._on_layout([problems[text] for text in others.problems if text not in fitting])
            surviving, too_small = [*surviving, *others.surviving], [*too_small, *others.too_small]
            shown = [*(name for name in shown if name not in unfit), *others.shown]
        self.mistakes = MistakesShown(len(shown), tuple(surviving), tuple(too_small), process_time() - start)
        return list({id(one.entry.drawn): one for one in chance.sample(placed, len(placed))}.values())

    def first_problems(self) -> list[Placed]:
        """Returns the problems of ordinary size that the first round tries if none fails."""
        entries = self._entries()
        chance, large = self._begin(0)
        first = self._showing_mistakes(chance) if self.asks_mistakes else []
        taken = {id(one.entry.drawn) for one in first}
        unused = [one for one in self._on_layout(entries) if id(one.entry.drawn) not in taken]
        wanted = {*self.still_to_kill, *self.missing_goals}
        least = self.settings.examples - len(large) - len(first)
        return [*first, *choose(unused, wanted, least, chance)]

    def _begin(self, round_: int) -> tuple[Random, list[Placed]]:
        """Returns what chooses the problems of a round, and its large problems."""
        if self.cell.property.needs_adequacy:
            self.equivalent = self._deck.equivalent
        chance = Random(f"{round_} {self._deck.key} {self.cell.layout}")
        asks_for_large = round_ == 0 and self.cell.property.needs_adequacy
        return chance, self._large(self._deck.large, chance) if asks_for_large else []

    def _run_sizes(self, chance: Random) -> None:
        """Runs a problem of each size that the settings name, until one fails. Its tensors are let
        go at once.
        """
        for size in self.settings.sizes:
            if self.failure is not None:
                return
            found = self._large(self._deck.of_shape(Shape.of_size(size)), chance)
            if why := _why_untried(found[0].entry.bound if found else None):
                self.untried[size] = why
            else:
                self._run_all(found)

    def _large(self, entries: Sequence[Entry], chance: Random) -> list[Placed]:
        """Returns large problems, each with one split of the vocabulary.

        They are padded: on many ranks few others have padding between sequences.
        """
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

    def not_run(self) -> Iterator[Placed]:
        """Yields the problems of the deck that were not run, without large ones."""
        for placed in self._on_layout(self._unused(self._entries())):
            if not is_large(placed.problem) and id(placed.entry.drawn) not in self._used:  # in another split
                yield placed

    def drawn_for(self, what: str, target: ForcedOption | None, good: Callable[[Placed], bool]) -> Iterator[Placed]:
        """Yields problems that are drawn until a few are good on the cell's layout.

        Args:
            what: names what they are good for.
            target: a choice that they must have.
            good: whether a problem is.
        """
        entries = self._deck.sought(
            f"{what} {self.cell.layout}",
            declared(self.cell.candidate, self.cell.dtype),
            target,
            lambda entry: any(map(good, self._on_layout([entry]))),
        )
        yield from filter(good, self._on_layout(entries))

    def run_also(self, placed: Placed) -> bool:
        """Runs one more problem; returns whether the candidate agrees on it."""
        self._run_all([placed])
        return self.failure is None

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
            self._used[id(one.entry.drawn)] = one.entry.drawn
            if not is_large(one.problem):
                self.placed.append(one)
            self.try_problem(one)

    def _no_valid_options(self) -> UsageError:
        candidate = self.cell.candidate
        given = ((option.name, candidate.supported(option.name)) for option in candidate.spec.options)
        first = {name: values[0] for name, values in given if values is not ANY}
        return UsageError(
            f"candidate {candidate.name!r}: supports={dict(candidate.supports)!r} leaves no valid combination of "
            f"options: {candidate.spec.conflict(first)}. Change supports so that one combination is valid"
        )


def _why_untried(bound: BoundProblem | None) -> str:
    """Returns why the problem of a size says nothing, and the way out; "" if it may say something.

    Args:
        bound: None if no problem of the size fits on the layout.
    """
    if bound is None:
        return "it does not fit on the layout; give more tokens, or a larger vocabulary"
    if is_large(bound.problem) and "logits" in bound.spec.uses:
        return (
            "its loss uses the logits themselves, so that all of them are held at once; "
            "leave it out for this candidate, or give a smaller one"
        )
    if not len(bound.trained.sequence):
        return "none of its tokens is trained; give more tokens"
    return ""
