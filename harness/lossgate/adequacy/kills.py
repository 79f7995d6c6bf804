# SPDX-License-Identifier: Apache-2.0
"""Which option mutants a problem kills, and which are equivalent, so that no problem can.

A mutant is killed if the judge would reject what it gives on the problem.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random

import torch
from torch import Tensor

from lossgate.adequacy.option_mutants import SIDES, OptionMutant, Side
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.reference import DenseRun, LossStage
from lossgate.declaration.candidate import Candidate
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import Output


def killed_mutants(mutants: Iterable[OptionMutant], case: Case) -> Iterator[OptionMutant]:
    """Yields the mutants that a case kills. The candidate must have run on it."""
    mutated: dict[OptionMutant, Mapping[Output, Tensor]] = {}
    for mutant in mutants:
        options = mutant.mutate(case.bound.bound_spec)
        if options is not None:
            mutated[mutant] = case.bound.mutated(options)
    for side in SIDES:
        left = [mutant for mutant in mutated if mutant.side == side]
        for output in shown_in(side, case.bound):
            if output in case.result.dtypes and left:
                rejected = _rejected([mutated[mutant][output] for mutant in left], output, case)
                yield from (mutant for mutant, killed in zip(left, rejected, strict=True) if killed)
                left = [mutant for mutant, killed in zip(left, rejected, strict=True) if not killed]


def _rejected(results: Sequence[Tensor], output: Output, case: Case) -> list[bool]:
    """Returns which results the judge rejects. Those that are the reference's own are not asked."""
    own = case.oracle.reference[output]
    changed = [not torch.equal(result, own) for result in results]
    if not any(changed):
        return changed
    rejected = case.oracle.rejects(output, torch.stack(list(results)), case.result.dtypes[output])
    return [a and b for a, b in zip(changed, rejected.tolist(), strict=True)]


def changes(
    mutants: Iterable[OptionMutant], bound: BoundProblem, *, unmasked: bool = False
) -> dict[OptionMutant, float]:
    """Returns how much each mutant changes the values or the gradients of a problem.

    This is the largest change in any output, relative to the output's largest entry. Mutants of
    another choice than the problem has are left out, and those whose other choice is not valid
    here. It needs neither a candidate nor noise, and so is quick.

    Args:
        mutants: the mutants.
        bound: the problem.
        unmasked: ask the problem as it is before tokens near a kink are masked, which is quicker.
    """
    options = {mutant: bound.bound_spec for mutant in mutants if mutant.mistakes(bound.bound_spec)}
    return changes_with(options, bound, unmasked=unmasked)


def changes_with(
    options: Mapping[OptionMutant, BoundSpec], bound: BoundProblem, *, unmasked: bool = False
) -> dict[OptionMutant, float]:
    """Does what ``changes`` does, with options that the caller gives for each mutant.

    Args:
        options: those for each mutant. They have the choice that it mistakes.
        bound: the problem.
        unmasked: ask the problem as it is before tokens near a kink are masked, which is quicker.
    """
    dense = bound.unmasked_dense if unmasked else bound.dense
    found: dict[OptionMutant, float] = {}
    known: dict[frozenset[str], Mapping[Side, float]] = {}  # either may be taken for the other
    for mutant, own in options.items():
        mutated = mutant.mutate(own)
        if mutated is None:
            continue
        other = bound.spec.bind(mutated)
        both = frozenset((repr(own.options), repr(other.options)))
        if both not in known:
            known[both] = _changes(own.returning(()), other.returning(()), bound, dense)
        found[mutant] = known[both][mutant.side]
    return found


def _changes(own: BoundSpec, other: BoundSpec, bound: BoundProblem, dense: DenseRun) -> Mapping[Side, float]:
    if dense.token_stage(own) != dense.token_stage(other):
        outputs = dense.outputs(own), dense.outputs(other)
        return {side: _largest(*([o[name] for name in shown_in(side, bound)] for o in outputs)) for side in SIDES}
    stages = dense.loss_stage(own), dense.loss_stage(other)
    reach = _reach(stages[0], bound)
    weights = {name: _weight(tensor, reach, name) for stage in stages for name, tensor in stage.upstream.items()}
    zero = torch.zeros((), dtype=torch.float64)
    return {
        "value": _largest(*([stage.outputs[output] for output in shown_in("value", bound)] for stage in stages)),
        "gradient": _largest(*([stage.upstream.get(n, zero) * w for n, w in weights.items()] for stage in stages)),
    }


def _reach(stage: LossStage, bound: BoundProblem) -> Tensor | None:
    """Returns how far the gradient of each log-probability reaches, 0 to 1; None if all the way.

    That of a label whose probability is nearly 1 hardly reaches its logits.
    """
    if stage.logprobs is None or not HEADS[bound.problem.head].has_logits:
        return None
    return 1 - stage.logprobs.exp()


def _weight(tensor: Tensor, reach: Tensor | None, name: str) -> Tensor | float:
    if reach is None or name not in ("logprobs", "unfiltered", "entropy") or reach.shape != tensor.shape:
        return 1.0
    return reach


def _largest(own: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max((_relative(a, b) for a, b in zip(own, other, strict=True)), default=0.0)


def _relative(own: Tensor, other: Tensor) -> float:
    own, other = torch.broadcast_tensors(own, other)
    if torch.equal(own, other):
        return 0.0
    finite = own.isfinite() & other.isfinite()
    if not bool((own[~finite] == other[~finite]).all()):
        return float("inf")
    own, other = own[finite], other[finite]
    return float((own - other).abs().max() / torch.maximum(own.abs().max(), other.abs().max()))


def shown_in(side: Side, bound: BoundProblem) -> list[Output]:
    """Returns the outputs that can reveal a mutant: differentiated values, or gradients."""
    batch = bound.unmasked
    if side == "value":
        return [bound.spec.output(name) for name in batch.cotangents]
    return list(HEADS[bound.problem.head].gradients(batch.leaves).values())


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
