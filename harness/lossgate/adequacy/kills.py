# SPDX-License-Identifier: Apache-2.0
"""Which option mutants a problem kills: would the judge reject what the mutant gives on it?"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lossgate.adequacy.option_mutants import SIDES, OptionMutant, Side
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec


def killed_mutants(mutants: Iterable[OptionMutant], case: Case) -> Iterator[OptionMutant]:
    """Yields the mutants that a case kills. The candidate must have run on it."""
    bound = case.bound
    mutated: dict[tuple[str, str], Mapping[Output, Tensor]] = {}
    for mutant in mutants:
        options = mutant.mutate(bound.bound_spec)
        if options is None:
            continue
        choice = mutant.option, repr(mutant.other)
        if choice not in mutated:
            mutated[choice] = bound.reference_with(options, bound.batch)
        dtypes = case.result.dtypes
        given = ((o, mutated[choice][o]) for o in _shown_in(mutant.side, bound.batch, bound) if o in dtypes)
        changed = ((o, tensor) for o, tensor in given if not torch.equal(tensor, case.oracle.reference[o]))
        if not all(case.oracle.compare(o, tensor, dtypes[o]).agrees for o, tensor in changed):
            yield mutant


def score(mutant: OptionMutant, problem: Problem, spec: Spec) -> float:
    """Returns how much a mutant changes the values or gradients of a problem.

    This is the largest change in any output, relative to the output's largest entry. It is 0 if
    the problem has another choice of the option than the one that the mutant mistakes. It needs
    neither a candidate nor noise, and so is quick.
    """
    both = _scores(replace(mutant, side="value"), problem.to_json(), spec)
    return both[mutant.side]


@lru_cache(maxsize=4096)
def _scores(mutant: OptionMutant, problem_json: str, spec: Spec) -> Mapping[Side, float]:
    """Compares values and gradients together, because callers ask for one right after the other."""
    bound = _bound_problem(problem_json, spec)
    options = mutant.mutate(bound.bound_spec)
    if options is None:
        return dict.fromkeys(SIDES, 0.0)
    own, mutated = bound.unmasked_reference, bound.reference_with(options, bound.unmasked)
    return {
        side: max((_relative(own[o], mutated[o]) for o in _shown_in(side, bound.unmasked, bound)), default=0.0)
        for side in SIDES
    }


@lru_cache(maxsize=512)
def _bound_problem(problem_json: str, spec: Spec) -> BoundProblem:
    """Keeps problems and their references, because many mutants are tried on the same problems."""
    return BoundProblem(spec, Problem.from_json(problem_json))


def _relative(own: Tensor, other: Tensor) -> float:
    if torch.equal(own, other):
        return 0.0
    finite = own.isfinite() & other.isfinite()
    if not bool((own[~finite] == other[~finite]).all()):
        return float("inf")
    own, other = own[finite], other[finite]
    return float((own - other).abs().max() / torch.maximum(own.abs().max(), other.abs().max()))


def _shown_in(side: Side, batch: GlobalBatch, bound: BoundProblem) -> list[Output]:
    """Returns the outputs that can reveal a mutant: differentiated values, or gradients."""
    if side == "value":
        return [bound.spec.output(name) for name in batch.cotangents]
    return list(HEADS[bound.problem.head].gradients(batch.leaves).values())
