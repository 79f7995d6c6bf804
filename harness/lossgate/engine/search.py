# SPDX-License-Identifier: Apache-2.0
"""Looks for a problem on which a candidate disagrees.

The search chooses problems from a deck, which all layouts share. ``trials`` runs them.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from lossgate.cases.placement import is_given
from lossgate.declaration.supports import ANY
from lossgate.engine.cell import Tried, tried_on
from lossgate.engine.trials import Trials
from lossgate.problems.problem import Problem
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS

_PADDED = 3
"""The sequences of large problems are padded to a multiple of this."""


@dataclass
class Search(Trials):
    """Chooses the problems of a cell until one fails or there are enough."""

    equivalent: frozenset[str] = frozenset()
    """The option mutants that changed nothing on many problems."""
    untried: dict[str, str] = field(default_factory=dict)
    """The sizes that could not be tried, and why."""
    placed: list[Placed] = field(default_factory=list)
    """The problems of ordinary size that were tried, in order."""
    mistakes: MistakesShown = NOTHING_ASKED
    """Which known mistakes the problems of the first round show."""
    _used: dict[int, Problem] = field(default_factory=dict)
    """The drawn problems that were run, by ``id``. They are kept so that no ``id`` is reused."""

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
        """Choices of options that no problem distinguished, and that need not be, in words."""
        alike = self._deck.alike if self.equivalent else frozenset[str]()
        never_valid = self.equivalent - alike  # the other choice is never valid, so these were never compared
        mutants = {**self._deck.mutants, **self._deck.near}
        compared = [mutant for name, mutant in mutants.items() if name not in never_valid]
        unseen_near = {name for name, mutant in self.near.items() if self._is_ever_valid(mutant)}
        unseen = unseen_near | alike.intersection(self.surviving)
        return not_distinguished(self.cell.candidate, compared, unseen)

    def _is_ever_valid(self, mutant: OptionMutant) -> bool:
        """Returns whether both choices of a mutant are valid for some problem that was tried."""
        for bound, _ in self._tried:
            with_choice = mutant.put_choice(bound.bound_spec, self.cell.candidate, Random(bound.problem.seed))
            if with_choice is not None and mutant.mutate(with_choice) is not None:
                return True
        return False

    @cached_property
    def hidden_by_exclusions(self) -> frozenset[str]:
        """The mutants that change something only on problems that the candidate excludes."""
        candidate, equivalent = self.cell.candidate, self._deck.equivalent
        if not candidate.excludes or not equivalent:
            return frozenset()
        everything = deck_of(replace(candidate, excludes={}), self.cell.dtype, self.settings.seed)
        return equivalent - everything.equivalent

    @property
    def drawn_for_goals(self) -> dict[str, int]:
        """The number of problems that were drawn for each missing goal."""
        return {goal: self._deck.drawn_for(goal, self.cell.layout) for goal in self.missing_goals}

    def tried_on_survivors(self) -> dict[OptionMutant, Tried]:
        """Returns how close the problems came to killing each surviving mutant. This takes long."""
        return tried_on(self.still_to_kill.values(), self._tried)

    @property
    def missing_goals(self) -> set[str]:
        """The coverage goals that a problem must still reach."""
        return set(self.cell.required_goals).difference(*(case.covered for case in self.cases))

    def run(self, round_: int = 0) -> None:
        """Runs problems until there are enough, or until one fails and is shrunk.

        Each round runs other problems.

        Raises:
            UsageError: if no valid options are left for the candidate.
        """
        entries, times_drawn = self._entries(), 0
        enough = len(self.cases) + self.settings.examples
        chance, large = self._begin(round_)
        if round_ == 0 and self.asks_mistakes:
            self._run_all(self._showing_mistakes(chance))
        while True:
            placed = self._on_layout(entries)
            self._run_all(self._choose(placed, self._used, enough - len(large) - len(self.cases), chance))
            self._run_all(large)  # last, because a failure on a small problem is easier to shrink
            large = []
            nothing_fits = not placed and times_drawn > 0
            if self.failure is not None or len(self.cases) >= enough or nothing_fits:
                break
            entries = self._deck.more(times_drawn)
            times_drawn += 1
        if round_ == 0:
            self._run_sizes(chance)

    @property
    def asks_mistakes(self) -> bool:
        """Whether problems must show the known mistakes."""
        return self.cell.property.needs_adequacy

    def _showing_mistakes(self, chance: Random) -> list[Placed]:
        """Returns the problems that show known mistakes, each with one split of the vocabulary.

        If the problem for a mistake does not fit on the layout, another problem takes its place.
        """
        start = process_time()
        candidate, dtype = self.cell.candidate, self.cell.dtype
        chosen = choice_of(candidate, self._deck, dtype)
        entries = chosen.entries(self._deck)
        placed = self._on_layout([entries[text] for text in chosen.problems])
        fitting = {one.entry.drawn.to_json() for one in placed}
        surviving, too_small, shown = chosen.surviving, chosen.too_small, chosen.shown
        not_fitting = [names for text, names in chosen.problems.items() if text not in fitting]
        if left := set[str]().union(*not_fitting):
            others = choice_on(candidate, self._deck, dtype, self.cell.layout, left)
            entries = others.entries(self._deck)
            placed += self._on_layout([entries[text] for text in others.problems if text not in fitting])
            surviving, too_small = [*surviving, *others.surviving], [*too_small, *others.too_small]
            shown = [*(name for name in shown if name not in left), *others.shown]
        self.mistakes = MistakesShown(len(shown), tuple(surviving), tuple(too_small), process_time() - start)
        return _in_one_split(placed, chance)

    def first_problems(self) -> list[Placed]:
        """Returns the problems of ordinary size that the first round tries if none fails."""
        entries = self._entries()
        chance, large = self._begin(0)
        first = self._showing_mistakes(chance) if self.asks_mistakes else []
        used = {id(one.entry.drawn) for one in first}
        least = self.settings.examples - len(large) - len(first)
        return [*first, *self._choose(self._on_layout(entries), used, least, chance)]

    def _choose(self, placed: Sequence[Placed], used: Container[int], least: int, chance: Random) -> list[Placed]:
        """Chooses unused problems that may kill surviving mutants or reach missing goals. Others
        follow until there are enough.
        """
        unused = [one for one in placed if id(one.entry.drawn) not in used]
        return choose(unused, {*self.still_to_kill, *self.missing_goals}, least, chance)

    def _begin(self, round_: int) -> tuple[Random, list[Placed]]:
        """Returns the random generator for the choices of a round, and its large problems."""
        chance = Random(f"{round_} {self._deck.key} {self.cell.layout}")
        if not self.cell.property.needs_adequacy:
            return chance, []
        self.equivalent = self._deck.equivalent - self.hidden_by_exclusions
        large = self._large(self._deck.large, chance) if round_ == 0 else []
        return chance, large

    def _run_sizes(self, chance: Random) -> None:
        """Runs a problem of each size that the settings name, until one fails."""
        for size in self.settings.sizes:
            if self.failure is not None:
                return
            found = self._large(self._deck.of_shape(Shape.of_size(size)), chance)
            if why := _why_untried(found[0].entry.bound if found else None):
                self.untried[size] = why
            else:
                self._run_all(found)

    def _large(self, entries: Sequence[Entry], chance: Random) -> list[Placed]:
        """Returns large problems, each with one split of the vocabulary and with padding.

        They are padded because, on many ranks, few other problems have padding between sequences.
        """
        return [
            replace(one, placement=replace(one.placement, pad_to_multiple=_PADDED))
            for one in _in_one_split(self._on_layout(entries), chance)
        ]

    def fill_gaps(self, round_: int) -> None:
        """Runs problems that may kill survivors or reach missing goals, until one fails."""
        for name in sorted(self.still_to_kill.keys() - self.hidden_by_exclusions):
            if name in self.surviving and self.failure is None:
                self._kill(name, round_)
        for goal in sorted(self.missing_goals):
            if self.failure is None:
                self._reach(goal, round_)

    def _kill(self, name: str, round_: int) -> None:
        """Runs problems that are likely to kill a mutant. They are drawn if the deck has none."""
        likely = self._on_layout([entry for entry in self._unused(self._entries()) if name in entry.kills])
        likely.sort(key=lambda placed: -placed.entry.kills[name])
        if not likely:
            likely = self._on_layout(self._unused(self._deck.killing(name, round_)))
        for placed in likely[:WANTED]:
            if name in self.surviving and id(placed.entry.drawn) not in self._used:
                self._run_all([placed])

    def not_run(self) -> Iterator[Placed]:
        """Yields the problems of the deck that were not run, without large ones."""
        for placed in self._on_layout(self._unused(self._entries())):
            # Meanwhile, the caller may have run the problem in another split of the vocabulary.
            if not is_large(placed.problem) and id(placed.entry.drawn) not in self._used:
                yield placed

    def drawn_for(self, what: str, target: ForcedOption | None, good: Callable[[Placed], bool]) -> Iterator[Placed]:
        """Draws problems until a few are good on the cell's layout, and yields the good ones.

        Args:
            what: a name for the purpose. Another name draws other problems.
            target: a choice of an option that the problems must have.
            good: whether a problem is good.
        """

        def is_good_anywhere(entry: Entry) -> bool:
            return any(good(placed) for placed in self._on_layout([entry]))

        purpose, declaration = f"{what} {self.cell.layout}", declared(self.cell.candidate, self.cell.dtype)
        entries = self._deck.sought(purpose, declaration, target, is_good_anywhere)
        yield from filter(good, self._on_layout(entries))

    def branches(self, placed: Placed) -> frozenset[str]:
        """See ``Deck.branches``."""
        return self._deck.branches(placed)

    def run_also(self, placed: Placed) -> bool:
        """Runs one more problem, and returns whether the candidate agrees on it."""
        self._run_all([placed])
        return self.failure is None

    def _reach(self, goal: str, round_: int) -> None:
        """Runs problems that reach a goal. They are drawn if the deck has none."""
        reaching = [placed for placed in self._on_layout(self._unused(self._entries())) if goal in placed.goals]
        if not reaching:
            drawn = self._unused(self._draw_reaching(goal, round_))
            reaching = [placed for placed in self._on_layout(drawn) if goal in placed.goals]
        for placed in reaching[:WANTED]:
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
        placed, candidate = self._deck.on(self.cell.layout, self._splits, entries), self.cell.candidate
        return [one for one in placed if is_given(candidate, one.entry.bound, one.problem.partition)]

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


def _in_one_split(placed: Sequence[Placed], chance: Random) -> list[Placed]:
    """Returns each problem once, in a split of the vocabulary that chance chooses."""
    shuffled = chance.sample(placed, len(placed))
    return list({id(one.entry.drawn): one for one in shuffled}.values())


def _why_untried(bound: BoundProblem | None) -> str:
    """Returns why the problem of a size would show nothing, and the way out; "" if it may show
    something.

    Args:
        bound: None if no problem of the size fits on the layout.
    """
    if bound is None:
        return "it does not fit on the layout; give more tokens, or a larger vocabulary"
    if is_large(bound.problem) and "logits" in bound.spec.uses:
        return (
            "the loss uses the logits themselves, so all of them are held at once; leave this size out for the "
            "candidate, or give a smaller one"
        )
    if not len(bound.trained.sequence):
        return "none of its tokens is trained; give more tokens"
    return ""
