# SPDX-License-Identifier: Apache-2.0
"""Decks: the problems that are tried, drawn once for all layouts, and what each is good for.

The reference says what a problem is good for: which coverage goals it reaches, and how much each
option mutant changes it. Neither hangs on a layout or on a kernel's code. What the problem really
kills is known only when a candidate has run on it.

A deck is the same in every process, whatever was asked before.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from lossgate.adequacy import store
from lossgate.adequacy.entry import Entry, KeptEntries, Placed
from lossgate.adequacy.entry_drawer import EntryDrawer, by_target, target_for, target_of
from lossgate.adequacy.kills import UNCHANGED, changes, equivalent_mutants
from lossgate.adequacy.option_mutants import NEAREST, near_mutants, option_mutants
from lossgate.adequacy.set_cover import required_goals
from lossgate.base.layout import Layout
from lossgate.base.shape import Shape
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.large import is_large, large_shapes
from lossgate.cases.option_strategies import ForcedOption
from lossgate.cases.placement import Placement, placements
from lossgate.declaration.candidate import Candidate
from lossgate.losses import SPECS
from lossgate.problems.partition import VocabSplit
from lossgate.problems.problem import Problem
from lossgate.specs.coverage_goals import BIAS_GOALS
from lossgate.specs.option import EMPTY
from lossgate.specs.sharding_goals import SHARDING_GOALS, covered_sharding_goals, may_reach
from lossgate.specs.spec import Spec

SIZE = 48
"""Problems of a deck before any that are drawn on purpose."""

DRAWN, _BATCH = 80, 10
"""The most problems that are drawn on purpose for one choice, and twice as many for one mutant or
goal that a cell still misses; and how many at a time for the latter."""

KILLERS = 3
"""When so many problems of a deck are likely to kill a mutant, no more are asked about it, because
asking is slow."""

WANTED = 4
"""The most problems that a cell runs in each round for one mutant or goal."""


_OF_BRANCHES = frozenset((*BIAS_GOALS, "masked token", "padding between sequences"))
"""Situations in which kernels take other branches than in others."""

T = TypeVar("T")


class Deck:
    """The problems for all candidates that declare the same, in one dtype."""

    def __init__(self, candidate: Candidate, dtype: str, seed: int) -> None:
        self.mutants = option_mutants(candidate)
        """The option mutants that must be killed, by name."""
        self.near = near_mutants(candidate)
        """Those that need not be, because their choices are nearly the same number."""
        self._candidate, self._dtype = candidate, dtype
        self.key = f"{deck_key(candidate, dtype)} {seed}"
        """Names all that candidates declare about the problems they can be given, and the seed."""
        self.is_kept = SPECS.get(candidate.spec.name) is candidate.spec
        """Whether it hangs on no code of a user, so that it may be kept on disk."""
        self._drawer = EntryDrawer(candidate, dtype, self.key, self.mutants, self.near)
        self._empty = candidate.given(EMPTY.name)
        self._sought: dict[str, Sequence[Entry]] = {}
        self._drawn_for = Counter[str]()
        self._fitted: dict[str, Entry] = {}
        self._known = dict[str, Any]()
        self._acting: dict[int, tuple[Entry, frozenset[str]]] = {}

    def once(
        self,
        what: str,
        kind: type[T],
        make: Callable[[], T],
        *,
        of: str = "decks",
        fits: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Returns what was found out about the deck, or finds it out: once, and kept on disk.

        Args:
            what: names it, and all that it hangs on beside the deck's key.
            kind: a type that msgspec can write and read.
            make: finds it out.
            of: on what code it hangs; see ``store.WITHOUT``.
            fits: whether what is kept fits to the deck.
        """
        if what not in self._known:
            key = f"{self.key}\n{what}"
            self._known[what] = store.kept(key, kind, make, of=of, fits=fits) if self.is_kept else make()
        return self._known[what]

    @property
    def entries(self) -> Sequence[Entry]:
        """The problems that every cell may use."""
        return self._first[0]

    @property
    def equivalent(self) -> frozenset[str]:
        """The mutants that changed nothing on many problems; see ``equivalent_mutants``."""
        return frozenset(self._first[1])

    @property
    def alike(self) -> frozenset[str]:
        """Those of them that were compared: their two choices give the same."""
        return frozenset(name for name, compared in self._first[1].items() if compared)

    @cached_property
    def _first(self) -> tuple[list[Entry], Mapping[str, bool]]:
        kept = self.once("first", KeptEntries, self._draw_first)
        return kept.again(self._candidate, self._dtype), kept.equivalent

    def _draw_first(self) -> KeptEntries:
        targets = by_target(self.mutants)
        found: list[Entry] = []
        # Each problem is given a choice, so that none is rare.
        self._add(found, self._drawer.draws("rich", SIZE - SIZE // 3, *targets, rich=True))
        self._add(found, self._drawer.draws("any size", SIZE // 3))
        killed = {name for entry in found for name in entry.kills}
        alive = {name: mutant for name, mutant in self.mutants.items() if name not in killed}
        equivalent = equivalent_mutants(alive, self._candidate, self._many(found))
        for target, mutants in targets.items():
            self._add_killers(found, target, mutants.difference(equivalent, *(entry.kills for entry in found)))
        for goal in required_goals(self._candidate, Layout(), self._dtype):
            if goal not in SHARDING_GOALS and not any(goal in entry.bound.coverage for entry in found):
                found += self._reaching("first", goal, 1)
        return KeptEntries.of(found, equivalent=dict(equivalent))

    def _add(self, found: list[Entry], draws: Draws) -> None:
        """Adds problems."""
        for bound in self._drawer.problems(draws):
            found.append(self._drawer.entry(bound, draws, self._rare(found) | self.near.keys()))

    def _rare(self, entries: Sequence[Entry]) -> set[str]:
        """Returns the mutants that few problems kill. No others are asked about."""
        return self.mutants.keys() - self._common(entries)

    @staticmethod
    def _common(entries: Sequence[Entry]) -> set[str]:
        """Returns the mutants that enough problems kill: no more are asked about them."""
        killers = Counter(name for entry in entries for name in entry.kills)
        return {name for name, count in killers.items() if count >= KILLERS}

    def on(self, layout: Layout, splits: Sequence[VocabSplit], entries: Sequence[Entry]) -> list[Placed]:
        """Returns entries on a layout, each once for every split of the vocabulary; those that do
        not fit are left out.
        """
        found: list[Placed] = []
        for entry in entries:
            for placement in placements(entry.bound.problem, splits, layout, self._empty):
                fitted = self._fit(entry, placement)
                partition = placement.partition(fitted.bound.problem)
                goals = fitted.bound.coverage.union(covered_sharding_goals(partition, fitted.bound.trained))
                found.append(Placed(fitted, placement, goals))
        return found

    def _fit(self, entry: Entry, placement: Placement) -> Entry:
        """Returns the entry with a vocabulary that fits. Its kills are those that it had before.

        It is kept with the deck, for other cells, unless its tensors are large.
        """
        problem, vocab = entry.bound.problem, placement.vocab_of(entry.bound.problem)
        if vocab == problem.vocab:
            return entry
        fitting = replace(problem, vocab=vocab)
        if is_large(fitting):
            return replace(entry, bound=BoundProblem(self._candidate.spec, fitting))
        text = fitting.to_json()
        if text not in self._fitted:
            self._fitted[text] = replace(entry, bound=BoundProblem(self._candidate.spec, fitting))
        return self._fitted[text]

    @cached_property
    def large(self) -> Sequence[Entry]:
        """One problem of each large shape, for every cell. No mutant is asked about them."""
        return [entry for shape in large_shapes(self._candidate) for entry in self.of_shape(shape)]

    def of_shape(self, shape: Shape) -> list[Entry]:
        """Draws a problem of a shape, always the same. Its tensors are not kept with the deck."""
        draws = replace(self._drawer.draws(f"large {shape}", 1, rich=True), large=shape)
        return [self._drawer.entry(bound, draws, ()) for bound in self._drawer.problems(draws)]

    # Problems that are drawn on purpose

    def more(self, number: int) -> Sequence[Entry]:
        """Returns as many problems again, for a cell that has tried all; others for each number."""
        what, rare = f"more {number}", self._rare(self.entries)
        return self._drawn_once(what, what, lambda: KeptEntries.of(self._drawer.entries(what, SIZE, None, rare)))

    def killing(self, name: str, round_: int) -> Sequence[Entry]:
        """Draws problems that are likely to kill a mutant."""
        target, what = target_of(name, self.mutants), f"kill {name} {round_}"
        return self._seek(name, what, lambda entry: name in entry.kills, target, mutants=[name])

    def reaching(self, goal: str, round_: int) -> Sequence[Entry]:
        """Draws problems that reach a goal, whatever the layout."""
        return self._reaching(str(round_), goal, WANTED)

    def _reaching(self, when: str, goal: str, wanted: int) -> Sequence[Entry]:
        target, what = target_for(goal, self._candidate), f"reach {goal} {when}"
        return self._seek(goal, what, lambda entry: goal in entry.bound.coverage, target, wanted=wanted)

    def reaching_on(self, layout: Layout, splits: Sequence[VocabSplit], goal: str, round_: int) -> Sequence[Entry]:
        """Draws problems that reach a goal on a layout."""

        def reaches(entry: Entry) -> bool:
            problem = entry.bound.problem
            partitions = [one.partition(problem) for one in placements(problem, splits, layout, self._empty)]
            possible = any(may_reach(goal, partition) for partition in partitions)
            return possible and any(goal in placed.goals for placed in self.on(layout, splits, [entry]))

        return self._seek(f"{goal} {layout}", f"reach {goal} {layout} {splits} {round_}", reaches)

    def sought(
        self, what: str, declared: str, target: ForcedOption | None, good: Callable[[Entry], bool]
    ) -> Sequence[Entry]:
        """Draws problems until a few are good.

        Args:
            what: names what they are good for; another name draws others.
            declared: names what ``good`` hangs on beside the deck.
            target: a choice that they must have.
            good: whether a problem is.
        """
        return self._seek(what, what, good, target, declared=declared, of="all")

    def branches(self, placed: Placed) -> frozenset[str]:
        """Returns the choices of options that change something on a problem, and the situations in
        which kernels take other branches. There are none if nothing is trained.
        """
        entry = placed.entry
        if not entry.bound.trained.sequence.size:
            return frozenset()
        if id(entry) not in self._acting:
            changed = changes(self.mutants.values(), entry.bound)
            acting = frozenset(mutant.choice for mutant, change in changed.items() if change > NEAREST)
            self._acting[id(entry)] = entry, acting  # the entry is kept, so that no other gets its id
        return self._acting[id(entry)][1] | _OF_BRANCHES.intersection(placed.goals)

    def drawn_for(self, goal: str, layout: Layout) -> int:
        """Returns how many problems were drawn for a goal, on any layout or on this one."""
        return self._drawn_for[goal] + self._drawn_for[f"{goal} {layout}"]

    def _seek(
        self,
        aim: str,
        what: str,
        good: Callable[[Entry], bool],
        target: ForcedOption | None = None,
        *,
        mutants: Collection[str] = (),
        wanted: int = WANTED,
        declared: str = "",
        of: str = "decks",
    ) -> Sequence[Entry]:
        """Draws problems for an aim, rich ones and others in turn, until a few are good."""

        def draw() -> KeptEntries:
            found, number = list[Entry](), 0
            for batch in range(2 * DRAWN // _BATCH):
                if len(found) < wanted:
                    rich = batch % 2 == 0
                    drawn = self._drawer.entries(f"{what} {batch}", _BATCH, target, mutants, rich=rich)
                    number += len(drawn)
                    found += filter(good, drawn)
            asked = [self._drawer.entry(entry.bound, entry.draws, self.mutants) for entry in found[:wanted]]
            return KeptEntries.of(asked, drawn=number)

        return self._drawn_once(aim, f"{what} {declared}".rstrip(), draw, of)

    def _drawn_once(self, aim: str, what: str, draw: Callable[[], KeptEntries], of: str = "decks") -> Sequence[Entry]:
        if what not in self._sought:
            kept = self.once(what, KeptEntries, draw, of=of)
            self._sought[what] = kept.again(self._candidate, self._dtype)
            self._drawn_for[aim] += kept.drawn
        return self._sought[what]

    def _many(self, entries: Sequence[Entry]) -> Iterator[BoundProblem]:
        """Yields the problems of entries, then others."""
        yield from (entry.bound for entry in entries)
        for batch in range(2 * UNCHANGED // SIZE):  # some options may leave no choice to give
            yield from self._drawer.problems(self._drawer.draws(f"equivalent {batch}", SIZE, rich=True))

    def _add_killers(self, found: list[Entry], target: ForcedOption | None, mutants: set[str]) -> None:
        """Adds problems until each of some mutants has one that is likely to kill it.

        They are first asked as they are before tokens near a kink are masked, which is quicker.
        """
        draws, left, seen = self._drawer.draws(f"kill {target}", DRAWN, target, rich=True), set(mutants), set[str]()

        def add(problem: Problem) -> bool:
            if problem.to_json() in seen:
                return False
            seen.add(problem.to_json())
            bound = BoundProblem(self._candidate.spec, problem)
            if self._drawer.likely(bound, left, unmasked=True) and self._drawer.likely(bound, left):
                found.append(self._drawer.entry(bound, draws, self._rare(found) | self.near.keys()))
                left.difference_update(found[-1].kills)
            return not left

        if left:
            draws.until(add)


def deck_key(candidate: Candidate, dtype: str) -> str:
    """Names the deck that a candidate uses for inputs of a dtype.

    It tells apart all that candidates declare about the problems they can be given, but for the
    split of the vocabulary, which belongs to the layout.
    """
    supports = {name: values for name, values in sorted(candidate.supports.items()) if name != "vocab_split"}
    declared = f"{candidate.spec.name} {candidate.head} {supports} {dict(candidate.tiles)} {candidate.differentiable}"
    if candidate.excludes:
        declared += f" without {', '.join(candidate.exclusions)}"
    if candidate.conventions.ranks_have_tokens:
        declared += " without empty ranks"
    coarsest = candidate.coarsest(dtype)
    return f"{declared} {dtype}" + f", rounded to {coarsest}" * (coarsest != dtype)


_KEPT = 4
"""Decks that are kept: they hold tensors, and cells are verified deck by deck."""

_DECKS: OrderedDict[tuple[Spec, str], Deck] = OrderedDict()
"""By the spec itself, as two specs may have one name, and by all else that a deck depends on."""


def deck_of(candidate: Candidate, dtype: str, seed: int) -> Deck:
    """Returns the deck for a candidate. It is kept for a while, for others that declare the same.

    Args:
        candidate: whose declaration says which problems can be drawn.
        dtype: of its inputs.
        seed: another seed draws other problems.
    """
    key = candidate.spec, f"{deck_key(candidate, dtype)} {seed}"
    deck = _DECKS.pop(key, None) or Deck(candidate, dtype, seed)
    _DECKS[key] = deck
    while len(_DECKS) > _KEPT:
        _DECKS.popitem(last=False)
    return deck
