# SPDX-License-Identifier: Apache-2.0
"""Finds out which of a property's own mistakes the problems of a cell would have shown.

A property's own mistakes are the mistakes that it is there to find.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from lossgate.base.errors import UsageError
from lossgate.cases.case import Case
from lossgate.cases.option_strategies import ForcedOption
from lossgate.properties import Property
from lossgate.properties.registry import OwnMistake, Said

SaidByProblem = Mapping[str, Said]
"""Whether a problem would show each mistake of a property, by the sentences of the mistakes."""


def said_by(case: Case, held_to: Property, shown: Collection[str] = ()) -> SaidByProblem:
    """Returns whether a problem would show each mistake of a property. The candidate may run.

    Args:
        case: the problem.
        held_to: the property.
        shown: the sentences of mistakes to leave out, because other problems show them.

    Raises:
        RankFailure: if a rank failed.
        CandidateError: if the candidate broke its declared interface.
    """
    asked = [own for own in held_to.mistakes(case.candidate) if own.sentence not in shown]
    if not asked or not held_to.fits(case):
        return {}
    return {own.sentence: own.said_by(case) for own in asked}


def may_show(case: Case, held_to: Property, sentences: Collection[str]) -> bool:
    """Returns whether a problem may show any of these mistakes. The candidate does not run."""
    asked = [own for own in held_to.mistakes(case.candidate) if own.sentence in sentences]
    return held_to.fits(case) and any(own.matters(case) and own.can_show(case) for own in asked)


def choice_behind(own: OwnMistake, case: Case) -> ForcedOption | None:
    """Returns the choice of an option that a mistake needs in order to matter on a problem; None if
    it needs none.
    """
    for name, value in case.problem.options.items():
        others = {other: chosen for other, chosen in case.problem.options.items() if other != name}
        try:
            if not own.matters(Case(case.candidate, replace(case.problem, options=others), case.world)):
                return ForcedOption(name, (value,))
        except UsageError:  # the other options are not valid without this one, or not supported
            continue
    return None


def shown_by(problems: Iterable[SaidByProblem]) -> set[str]:
    """Returns the sentences of the mistakes that some problem shows."""
    return {sentence for problem in problems for sentence, said in problem.items() if said is Said.SHOWN}


def unseen(problems: Sequence[SaidByProblem]) -> list[str]:
    """Returns the sentences of the mistakes that matter on some problem but that none shows."""
    hidden = (sentence for problem in problems for sentence, said in problem.items() if said is Said.HIDDEN)
    shown = shown_by(problems)
    return [sentence for sentence in dict.fromkeys(hidden) if sentence not in shown]


def gaps_of(held_to: Property, problems: Sequence[SaidByProblem]) -> tuple[str, ...]:
    """Returns a reason against AGREE for each mistake that matters but that no problem shows."""
    return tuple(
        f"property {held_to.name}: no problem would have shown a kernel in which {sentence}; raise --examples, or "
        f"declare exempt={{{held_to.name!r}: 'why the kernel need not keep it'}}"
        for sentence in unseen(problems)
    )
