# SPDX-License-Identifier: Apache-2.0
"""Checks that a problem suits a spec, a candidate and a world.

Drawn problems always do, but an edited file may not.
"""

from collections.abc import Collection

from lossgate.base.errors import UsageError
from lossgate.base.layout import Axis
from lossgate.base.spelling import nearest, shown
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY
from lossgate.numerics.float_formats import ROUNDED_TO
from lossgate.problems.problem import Problem
from lossgate.specs.heads import HEADS
from lossgate.specs.logit_filter import FilterOptions
from lossgate.specs.option import EMPTY
from lossgate.specs.spec import Spec
from lossgate.worlds.base import World


def check_fits_spec(spec: Spec, problem: Problem) -> None:
    """Refuses a problem from which the inputs of a spec can't be made. Options are checked when the
    spec is bound to them.

    Raises:
        UsageError: if the problem does not suit the spec. The message says what was expected.
    """
    who = f"problem: spec {spec.name!r}"
    if problem.head not in spec.inputs:
        raise UsageError(f"{who} has no head {shown(problem.head)}; {nearest(problem.head, spec.inputs)}")
    head = HEADS[problem.head]
    if problem.bias and "bias" not in head.leaves:
        raise UsageError(f"problem: head {problem.head!r} has no bias; expected bias=False")
    if problem.outliers and not head.has_logits:
        raise UsageError(f"problem: head {problem.head!r} has no logits, so no outliers; expected outliers=()")
    if problem.group_size != spec.group_size:
        raise UsageError(
            f"{who} has sequences in groups of {spec.group_size}, but the problem has group_size={problem.group_size}"
        )
    if problem.cotangent not in ("both", *spec.outputs):
        raise UsageError(
            f"{who} has no output {problem.cotangent!r}; expected a cotangent of {' or '.join(spec.outputs)}"
        )
    known = {scenario.name: scenario for scenario in spec.scenarios}
    for name, value in problem.scenario.items():
        if name not in known:
            raise UsageError(f"{who} has no scenario {shown(name)}; {nearest(name, known)}")
        choices = tuple(dict.fromkeys((*known[name].choices, *known[name].on_request)))
        if value not in choices:
            raise UsageError(f"problem: scenario {name} is {shown(value)}; expected one of {', '.join(choices)}")


def check_fits(candidate: Candidate, problem: Problem, world: World, axes: Collection[Axis]) -> None:
    """Refuses a problem that a candidate does not declare to support, or a world of another layout.

    Args:
        candidate: the candidate.
        problem: the problem with its layout.
        world: the world in which the ranks run.
        axes: the axes that the layout may split.

    Raises:
        UsageError: if the problem does not suit. The message says what to do.
    """
    who = f"candidate {candidate.name!r}"
    for what, own, needed in (("spec", candidate.spec.name, problem.spec), ("head", candidate.head, problem.head)):
        if own != needed:
            raise UsageError(
                f"{who} has {what} {own!r}, but the problem has {shown(needed)}; choose a candidate of {what} "
                f"{shown(needed)}"
            )
    if problem.dtype not in candidate.precision:
        raise UsageError(
            f"{who} takes {', '.join(candidate.dtypes)}, but the problem is in {problem.dtype}; "
            f"choose a candidate that takes {problem.dtype}"
        )
    if extra := [axis for axis in problem.layout.axes if axis not in axes]:
        raise UsageError(
            f"{who} is not sharded over {', '.join(extra)}, but the problem's layout is {problem.layout}; "
            f"declare axes={(*candidate.axes, *extra)!r} or choose another candidate"
        )
    _check_supported(candidate, problem, who)
    _check_excluded(candidate, problem, who)
    _check_cotangent(candidate, problem, who)
    _check_rounding(candidate, problem, who)
    if world.layout != problem.layout:
        raise UsageError(
            f"the world has layout {world.layout}, but the problem has {problem.layout}; make a world of that layout"
        )


def _check_supported(candidate: Candidate, problem: Problem, who: str) -> None:
    """Refuses a problem with an option that the candidate does not support."""
    given = {option.name: problem.options.get(option.name, option.default) for option in candidate.spec.options}
    given["bias"] = problem.bias
    if problem.layout.tp > 1:
        given["vocab_split"] = problem.vocab_split
    for option, value in given.items():
        supported = candidate.supported(option)
        if supported is not ANY and value not in supported:
            raise UsageError(
                f"{who} does not support {option}={shown(value)}, but the problem has it; declare it in supports, or "
                "choose another problem"
            )


def _check_excluded(candidate: Candidate, problem: Problem, who: str) -> None:
    """Refuses a problem with a choice that the candidate excludes."""
    chosen = {one.name: [problem.scenario.get(one.name, one.default)] for one in candidate.spec.scenarios}
    chosen[EMPTY.name] = [*problem.partition.empty]
    for name, choices in chosen.items():
        excluded = candidate.excludes[name].choices if name in candidate.excludes else ()
        for choice in choices:
            if choice in excluded:
                raise UsageError(
                    f"{who} declares that it is never given {name} {choice!r}, but the problem has it; remove the "
                    "exclusion from supports, or choose another problem"
                )


def _check_cotangent(candidate: Candidate, problem: Problem, who: str) -> None:
    """Refuses a problem with upstream gradients of outputs that are not differentiable, because
    backward could not be called.
    """
    own = candidate.differentiable
    allowed = (*own, "both") if len(own) > 1 else own
    if problem.cotangent not in allowed:
        raise UsageError(
            f"{who} has gradients of {', '.join(own)}, but the problem has cotangent={problem.cotangent!r}; change "
            "differentiable= of the candidate, or choose another problem"
        )


def _check_rounding(candidate: Candidate, problem: Problem, who: str) -> None:
    """Refuses a problem whose tokens may lie too near to a kink for the candidate's rounding."""
    spec, coarsest = candidate.spec, candidate.coarsest(problem.dtype)
    has_kinks = spec.kinks or issubclass(spec.options_type, FilterOptions)
    if has_kinks and ROUNDED_TO[coarsest].unit > problem.coarsest.unit:
        raise UsageError(
            f"{who} rounds inputs of the loss to {coarsest}. The problem was made for finer rounding "
            f"(rounded_to={problem.rounded_to!r}), so its tokens may lie too near to a kink of the loss; run verify to "
            "get a problem for this candidate"
        )
