# SPDX-License-Identifier: Apache-2.0
"""Which of its own mistakes a property would have shown on the problems that were tried."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from lossgate.base.errors import UsageError
from lossgate.cases.case import Case
from lossgate.cases.option_strategies import ForcedOption
from lossgate.properties import Property
from lossgate.properties.registry import OwnMistake, Said

SaidByProblem = Mapping[str, Said]
"""What a problem says of the mistakes of a property, by their sentences."""


def said_by(case: Case, held_to: Property, shown: Collection[str] = ()) -> SaidByProblem:
    """Returns what a problem says of the mistakes of a property. The candidate may have to run.

    Args:
        case: the problem.
        held_to: the property.
        shown: the sentences of mistakes that are not asked about, because others show them.

    Raises:
        RankFailure: if a rank failed.
        CandidateError: if the candidate broke its declared interface.
    """
    asked = [own for own in held_to.mistakes(case.candidate) if own.sentence not in shown]
    return {own.sentence: own.said_by(case) for own in asked} if asked and held_to.fits(case) else {}


def may_show(case: Case, held_to: Property, sentences: Collection[str]) -> bool:
    """Returns whether a problem may show one of some mistakes. The candidate does not run."""
    asked = [own for own in held_to.mistakes(case.candidate) if own.sentence in sentences]
    return held_to.fits(case) and any(own.matters(case) and own.can_show(case) for own in asked)


def choice_behind(own: OwnMistake, case: Case) -> ForcedOption | None:
    """Returns the choice of an option without which a mistake does not matter on a problem; None if
    there is none.
    """
    for name, value in case.problem.options.items():
        others = {other: chosen for other, chosen in case.problem.options.items() if other != name}
        try:
            if not own.matters(Case(case.candidate, replace(case.problem, options=others), case.world)):
                return ForcedOption(name, (value,))
        except UsageError:  # the others are not valid without it, or not supported
            continue
    return None


def shown_by(problems: Iterable[SaidByProblem]) -> set[str]:
    """Returns the sentences of the mistakes that some problem shows."""
    return {sentence for problem in problems for sentence, said in problem.items() if said is Said.SHOWN}


def unseen(problems: Sequence[SaidByProblem]) -> list[str]:
    """Returns the sentences of those that matter on some problem, and that none shows."""
    hidden = (sentence for problem in problems for sentence, said in problem.items() if said is Said.HIDDEN)
    shown = shown_by(problems)
    return [sentence for sentence in dict.fromkeys(hidden) if sentence not in shown]


def gaps_of(held_to: Property, problems: Sequence[SaidByProblem]) -> tuple[str, ...]:
    """Returns the same as reasons against AGREE, with the way out."""
    return tuple(
        f"property {held_to.name}: no problem would have shown a kernel in which {sentence}; raise --examples, or "
        f"declare exempt={{{held_to.name!r}: 'why it is not held to it'}}"
        for sentence in unseen(problems)
    )
