# SPDX-License-Identifier: Apache-2.0
"""The problems of a deck that show the known mistakes, chosen once for all cells of a candidate.

Which mistakes a problem shows hangs on what the candidate declares, on the problem and its layout,
and never on the kernel's code. The layout that splits every axis in two shows nearly all that any
layout shows. So the problems are asked there, before a kernel has run, and every cell runs those
that show something, over whichever axes its candidate can be split.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from random import Random

import msgspec

from lossgate.adequacy.deck import WANTED, Deck
from lossgate.adequacy.entry import Entry, Placed
from lossgate.adequacy.known_mistakes import KnownMistakes
from lossgate.adequacy.set_cover import choose, required_goals
from lossgate.base.layout import AXES, Layout
from lossgate.cases.large import is_large
from lossgate.cases.placement import PlacedProblem, splits_of
from lossgate.declaration.candidate import Candidate

_FIRST = 16
"""Problems that are asked before those that are known to be changed by a mistake that is left."""
_FEW = 8
"""If more mistakes survive, the precision hides them, and other problems would not help."""
_MORE = 4
"""The most times that as many problems again are drawn for mistakes that none shows."""


class Choice(msgspec.Struct, frozen=True):
    """The problems of a deck that show known mistakes, and which mistakes none of it shows."""

    problems: dict[str, list[str]]
    """By the problem as it was drawn, as JSON: the mistakes that it shows and none before it."""
    surviving: list[str]
    """See ``MistakesShown``."""
    too_small: list[str]
    more: int = 0
    """How many times further problems of the deck were drawn; see ``Deck.more``."""

    def entries(self, deck: Deck) -> dict[str, Entry]:
        """Returns the entries of the problems, by the problem as it was drawn, as JSON."""
        known = [*deck.entries, *(entry for number in range(self.more) for entry in deck.more(number))]
        return {text: entry for entry in known if (text := entry.drawn.to_json()) in self.problems}

    def is_of(self, deck: Deck) -> bool:
        """Returns whether the deck has all the problems. One that came along and one that was drawn
        on another machine may differ.
        """
        return self.entries(deck).keys() == self.problems.keys()

    @property
    def shown(self) -> list[str]:
        """The names of the mistakes that the problems show."""
        return [name for names in self.problems.values() for name in names]


def choice_of(candidate: Candidate, deck: Deck, dtype: str) -> Choice:
    """Returns which problems of a deck show the known mistakes, on the layout that splits every
    axis in two.

    Args:
        candidate: says what it declares. It is not called.
        deck: its problems in the dtype.
        dtype: of the inputs.
    """
    splits = {axis for axis in AXES if axis != "tp" or candidate.starts_at.has_logits}
    chosen = choice_on(candidate, deck, dtype, _split_in_two(splits))
    if chosen.surviving and not splits <= {*candidate.axes}:  # they may be mistakes of an axis that it has not
        return choice_on(candidate, deck, dtype, _split_in_two(candidate.axes))
    return chosen


def _split_in_two(axes: Collection[str]) -> Layout:
    return Layout(*(2 if axis in axes else 1 for axis in AXES))


def choice_on(
    candidate: Candidate, deck: Deck, dtype: str, layout: Layout, names: Collection[str] | None = None
) -> Choice:
    """Does what ``choice_of`` does on another layout, as for mistakes that are shown by problems
    which do not fit there.

    Args:
        candidate, deck, dtype: as for ``choice_of``.
        layout: on which the problems are asked.
        names: of the mistakes that are asked about; by default all.
    """
    what = f"known mistakes {declared(candidate, dtype)} {layout}" + (f" {sorted(names)}" if names is not None else "")
    make = partial(_choose, candidate, deck, dtype, layout, names)
    return deck.once(what, Choice, make, fits=lambda own: own.is_of(deck))


def declared(candidate: Candidate, dtype: str) -> str:
    """Returns, as text, what a choice depends on in a declaration and the deck does not."""
    given = candidate.precision[dtype], candidate.contract, candidate.tokens, splits_of(candidate)
    return " ".join(map(str, given))


def _choose(candidate: Candidate, deck: Deck, dtype: str, layout: Layout, names: Collection[str] | None) -> Choice:
    placed = [one for one in deck.on(layout, splits_of(candidate), deck.entries) if not is_large(one.problem)]
    mistakes, chosen, asked = KnownMistakes(candidate, names=names), dict[str, list[str]](), set[int]()

    def ask(one: Placed, problem: PlacedProblem) -> None:
        before = set(mistakes.seen)
        asked.add(id(one.entry.drawn))
        mistakes.ask(problem)
        if shown := [name for name in mistakes.seen if name not in before]:
            chosen[one.entry.drawn.to_json()] = shown

    for one in _first(candidate, deck, dtype, layout, placed):
        ask(one, PlacedProblem(one.entry.bound, one.problem))
    for one in placed:
        mistakes.find(PlacedProblem(one.entry.bound, one.problem))

    def look(placed: Sequence[Placed], wanted: Counter[str], *, always: bool = False) -> Counter[str]:
        """Asks problems which the wanted mistakes change, until each was asked often enough.

        Returns:
            The mistakes that were not, and how often more they should be.
        """
        for one in placed:
            if not wanted:
                break
            if id(one.entry.drawn) in asked:
                continue
            problem = PlacedProblem(one.entry.bound, one.problem)
            if changed := mistakes.changed(wanted, problem, always=always):
                ask(one, problem)
                wanted.subtract(changed)
                wanted = +Counter({name: count for name, count in wanted.items() if name in mistakes.left})
        return wanted

    look(placed, Counter(dict.fromkeys(mistakes.rarely_made(), WANTED)))
    # What survives may matter on few problems.
    rare = mistakes.survivors if len(mistakes.survivors) <= _FEW else []
    more, wanted = 0, look(placed, Counter(dict.fromkeys(rare, WANTED)), always=True)
    while wanted and more < _MORE:
        entries, more = deck.more(more), more + 1
        placed = [one for one in deck.on(layout, splits_of(candidate), entries) if not is_large(one.problem)]
        wanted = look(placed, wanted, always=True)
    found = mistakes.result
    return Choice(chosen, list(found.surviving), list(found.too_small), more)


def _first(candidate: Candidate, deck: Deck, dtype: str, layout: Layout, placed: Sequence[Placed]) -> Sequence[Placed]:
    """Returns the problems that reach goals and kill option mutants, and some others."""
    wanted = {*required_goals(candidate, layout, dtype), *deck.mutants}
    return choose(placed, wanted, _FIRST, Random(deck.key))
