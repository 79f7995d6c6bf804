# SPDX-License-Identifier: Apache-2.0
"""Asks whether a kernel rounds more than it declares: would it agree, if it declared that?"""

from collections.abc import Iterable, Sequence
from statistics import median

import torch
from torch import Tensor

from lossgate.base.spelling import counted
from lossgate.cases.oracle import Oracle
from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.coarser_precision import Coarser, in_one_stage, in_several_stages
from lossgate.diagnosis.matches import scope_of
from lossgate.diagnosis.observed import Observed
from lossgate.numerics.float_formats import FLOAT_FORMATS, float_format_of
from lossgate.specs.outputs import Output

_UNITS = 8.0
"""So many units of roundoff is the most that an output may be off as a whole, relative to its
size."""
_ALIGNED = 0.5
"""The largest mean sign of errors of rounding, relative to the reference. A factor has 1."""
_STAGES_NAMED = 3
"""The most stages that are named: those that make a kernel the least noisy."""
_ENTRIES = 16
"""The fewest entries of an output of which this is asked."""
_WOULD_SHOW = 10.0
"""A stage that makes an output so many times as noisy would show in it, on most problems."""


def coarser(failing: Sequence[Observed]) -> Cause | None:
    """Returns a cause that names the stages of which one, if coarser, explains what a kernel
    returned: the numbers do not tell which it is. If no single stage does, it names the fewest that
    kernels round together and that do. None if there are none.

    A single stage may be all that these problems show of several, so that the advice has both.

    Args:
        failing: what the kernel returned on problems where it is wrong.
    """
    candidate, dtype = failing[0].case.candidate, failing[0].case.problem.dtype
    of_each = {output: [one for one in failing if output in one.wrong] for output in scope_of(failing)}
    if not all(_may_be_rounding(own, output) for output, own in of_each.items()):
        return None
    found = _explaining(failing, in_one_stage(candidate, dtype))
    likely = not found or any(one.is_of_logits for _, one in found)
    several = in_several_stages(candidate, dtype) if likely else ()
    together = [one for _, one in _explaining(failing, several, first=True)]
    if not found:
        return _cause(failing[0], together) if together else None
    to = min(found, key=lambda one: one[0])[1].to
    stages = [one for _, one in sorted(found, key=lambda one: one[0]) if one.to == to]
    return _cause(failing[0], stages, together)


def _explaining(
    failing: Sequence[Observed], changes: Iterable[Coarser], *, first: bool = False
) -> list[tuple[float, Coarser]]:
    """Returns the changes that explain all, with how noisy they make a kernel: of those that round
    the same, and differ in the step of a sum, the first.
    """
    found: dict[str, tuple[float, Coarser]] = {}
    for change in changes:
        if change.rounds not in found and (noise := _noise_if_it_agrees(failing, change)) is not None:
            found[change.rounds] = noise, change
            if first:
                break
    return list(found.values())


def _cause(observed: Observed, stages: Sequence[Coarser], together: Sequence[Coarser] = ()) -> Cause:
    """Returns the cause that a kernel rounds one of some stages, or several at once.

    Args:
        observed: any of what the kernel returned.
        stages: those that may be rounded, each alone.
        together: the stages that may be rounded at once; at most one such change.
    """
    candidate, dtype = observed.case.candidate, observed.case.problem.dtype
    several = ": the numbers do not tell which, or whether it is several" if len(stages) > 1 else ""
    named, left = stages[:_STAGES_NAMED], counted(len(stages) - _STAGES_NAMED, "other stage")
    what = [one.rounds for one in named] + [left] * (len(stages) > _STAGES_NAMED)
    declared = "; or ".join(one.declared(candidate, dtype) for one in named)
    more = (f"; or, if it rounds {one.rounds}, as autograd does: {one.declared(candidate, dtype)}" for one in together)
    return Cause(
        name=" or ".join(map(str, named)),
        words=f"the kernel rounds {', or '.join(what)} to {stages[0].to}, "
        f"which its declared precision does not say{several}",
        todo=f"compute it in float32. Or, if it is meant, declare for {dtype} {declared}{''.join(more)}",
    )


def _noise_if_it_agrees(failing: Sequence[Observed], change: Coarser) -> float | None:
    """Returns how noisy kernels with a coarser precision are in what is wrong, relative to those
    that are declared; None if the kernel does not agree with them, or they would be wrong in what
    is right, too.
    """
    noise, right = 1.0, failing[0].got.keys() - scope_of(failing)
    ratios: dict[Output, list[float]] = {output: [] for output in right}
    for observed in failing:
        case = observed.case
        oracle = Oracle(change.of(case.candidate, case.problem.dtype), case.placed, case.result.outputs)
        if not all(one.agrees for one in case.compare(case.result, oracle.gradients, oracle)):
            return None
        noise = max(noise, *(_noise(oracle, o) / max(_noise(case.oracle, o), 1e-300) for o in observed.wrong))
        for output in right.intersection(case.result.outputs):
            ratios[output].append(_size(observed, oracle, output) / _size(observed, case.oracle, output))
    return None if any(median(of_output) > _WOULD_SHOW for of_output in ratios.values() if of_output) else noise


def _noise(oracle: Oracle, output: Output) -> float:
    return float(oracle.deviations[output].nan_to_num(0.0, 0.0, 0.0).abs().max())


def _size(observed: Observed, oracle: Oracle, output: Output) -> float:
    """Returns how far right kernels may be off, with the rounding of what they return."""
    largest = float(oracle.reference[output].nan_to_num(0.0, 0.0, 0.0).abs().max())
    dtype = observed.case.result.dtypes[output]
    return max(_noise(oracle, output) + float_format_of(dtype).unit * largest, 1e-300)


def _may_be_rounding(failing: Sequence[Observed], output: Output) -> bool:
    """Returns whether the errors of an output are as small as those of rounding, and point
    anywhere.
    """
    signs: list[Tensor] = []
    for observed in failing:
        if output not in observed.case.result.outputs:
            return False
        got, reference = observed.got[output], observed.case.oracle.reference[output]
        finite = got.isfinite() & reference.isfinite()
        off, right = torch.where(finite, got - reference, 0.0).flatten(), torch.where(finite, reference, 0.0).flatten()
        if float(off.norm()) > _UNITS * FLOAT_FORMATS["bfloat16"].unit * float(right.norm()):
            return False
        signs.append((off * right).sign())
    of_all = torch.cat(signs)
    of_all = of_all[of_all != 0]
    return len(of_all) < _ENTRIES or abs(float(of_all.mean())) <= _ALIGNED
