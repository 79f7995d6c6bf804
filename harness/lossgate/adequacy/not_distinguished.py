# SPDX-License-Identifier: Apache-2.0
"""Which choices of an option no problem distinguished."""

from collections.abc import Collection, Iterable, Sequence

from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.counted import in_a_row
from lossgate.declaration.candidate import Candidate


def not_distinguished(
    candidate: Candidate, mutants: Iterable[OptionMutant], unseen: Collection[str]
) -> tuple[str, ...]:
    """Returns the choices that no problem distinguished, such as "epsilon 0.0 and 1e-08".

    A kernel that takes one of them for the other would have passed. Options that the candidate does
    not name in ``supports`` are left out: it does not say that it computes them.

    Args:
        candidate: what was verified.
        mutants: those whose two choices were compared.
        unseen: the names of those that no problem showed and that need not be killed.
    """
    of_option: dict[str, dict[tuple[str, str], bool]] = {}
    for mutant in mutants:
        if mutant.option in candidate.supports:
            pairs = of_option.setdefault(mutant.option, {})
            one, other = str(mutant.values[0]), str(mutant.other)
            pair = (other, one) if (other, one) in pairs else (one, other)
            pairs[pair] = pairs.get(pair, True) and str(mutant) in unseen
    alike = {option: [pair for pair, same in pairs.items() if same] for option, pairs in of_option.items()}
    return tuple(f"{option} {in_a_row(group)}" for option, pairs in alike.items() for group in _groups(pairs))


def _groups(pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Returns groups of choices in which each two are a pair, so that each pair is in one."""
    groups: list[list[str]] = []
    for one, other in pairs:
        for group in groups:
            if one in group and all(other == x or (x, other) in pairs or (other, x) in pairs for x in group):
                group.extend(() if other in group else (other,))
                break
        else:
            groups.append([one, other])
    return groups
