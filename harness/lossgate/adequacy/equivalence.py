# SPDX-License-Identifier: Apache-2.0
"""Which option mutants are equivalent to the kernel: no problem can kill them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random

from lossgate.adequacy.kills import changes_with
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.cases.bound_problem import BoundProblem
from lossgate.declaration.candidate import Candidate

UNCHANGED = 160
"""A mutant is equivalent if it changes nothing on so many problems."""


def equivalent_mutants(
    mutants: Mapping[str, OptionMutant], candidate: Candidate, problems: Iterable[BoundProblem]
) -> Mapping[str, bool]:
    """Returns the names of the mutants that change nothing on many problems, and whether each was
    compared with the kernel.

    Any problem tells of any mutant, since it is given the choice that the mutant mistakes. A mutant
    whose other choice is never valid is equivalent too, and is never compared: no kernel can
    compute with it.

    Args:
        mutants: the mutants that may be equivalent, by name.
        candidate: says which choices it supports.
        problems: as many are taken as are needed.
    """
    left, equivalent = set(mutants), set[str]()
    asked, unchanged = Counter[str](), Counter[str]()
    for bound in problems if left else ():
        chance = Random(bound.problem.seed)
        given = {mutants[name]: mutants[name].put_choice(bound.bound_spec, candidate, chance) for name in sorted(left)}
        options = {mutant: chosen for mutant, chosen in given.items() if chosen is not None}
        changed = changes_with(options, bound, unmasked=True)
        asked.update(map(str, options))
        unchanged.update(str(mutant) for mutant, change in changed.items() if change == 0)
        left -= {str(mutant) for mutant, change in changed.items() if change > 0}
        equivalent |= {name for name in left if (unchanged[name] or asked[name]) >= UNCHANGED}
        left -= equivalent
        if not left:
            break
    return {name: unchanged[name] > 0 for name in equivalent}
