# SPDX-License-Identifier: Apache-2.0
"""Whether a problem suits a spec, a candidate and a world: what drawing guarantees, and a file may
not keep.
"""

from collections.abc import Collection, Iterator

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
    """Refuses a problem from which the inputs of a spec can't be made. Options are checked where
    the spec is bound to them.

    Raises:
        UsageError: with what does not suit it, and what was expected.
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
        raise UsageError(f"{who} has sequences in groups of {spec.group_size}; the problem has {problem.group_size}")
    if problem.cotangent not in ("both", *spec.outputs):
        raise UsageError(f"{who} has no output {problem.cotangent!r}; expected cotangent of {', '.join(spec.outputs)}")
    known = {scenario.name: scenario for scenario in spec.scenarios}
    for name, value in problem.scenario.items():
        if name not in known:
            raise UsageError(f"{who} has no scenario {shown(name)}; {nearest(name, known)}")
        if value not in (choices := tuple(dict.fromkeys((*known[name].choices, *known[name].on_request)))):
            raise UsageError(f"problem: scenario {name} is {shown(value)}; expected one of {', '.join(choices)}")


def check_fits(candidate: Candidate, problem: Problem, world: World, axes: Collection[Axis]) -> None:
    """Refuses a problem that a candidate was not declared for, or a world of other ranks.

    Raises:
        UsageError: with what does not suit it, and the way out.
    """
    who = f"candidate {candidate.name!r}"
    for what, own, needed in (("spec", candidate.spec.name, problem.spec), ("head", candidate.head, problem.head)):
        if own != needed:
            raise UsageError(
                f"{who} has {what} {own!r}, and the problem has {shown(needed)}; choose a candidate of {what} "
                f"{shown(needed)}"
            )
    if problem.dtype not in candidate.precision:
        raise UsageError(
            f"{who} takes {', '.join(candidate.dtypes)}, and the problem is in {problem.dtype}; "
            f"choose a candidate that takes {problem.dtype}"
        )
    if extra := [axis for axis in problem.layout.axes if axis not in axes]:
        raise UsageError(
            f"{who} is not sharded over {', '.join(extra)}, and the problem's layout is {problem.layout}; "
            f"declare axes={(*candidate.axes, *extra)!r} or choose another candidate"
        )
    _check_supported(candidate, problem, who)
    _check_excluded(candidate, problem, who)
    _check_cotangent(candidate, problem, who)
    _check_rounding(candidate, problem, who)
    if world.layout != problem.layout:
        raise UsageError(f"the world has layout {world.layout}, and the problem {problem.layout}; make a world of it")


def _check_supported(candidate: Candidate, problem: Problem, who: str) -> None:
    given = {option.name: problem.options.get(option.name, option.default) for option in candidate.spec.options}
    given |= {"bias": problem.bias} | ({"vocab_split": problem.vocab_split} if problem.layout.tp > 1 else {})
    for option, value in given.items():
        supported = candidate.supported(option)
        if supported is not ANY and value not in supported:
            raise UsageError(
                f"{who} does not support {option}={shown(value)}, and the problem has it; declare it in supports, or "
                "choose another problem"
            )


def _check_excluded(candidate: Candidate, problem: Problem, who: str) -> None:
    """Refuses a situation that the candidate is never given."""
    situations = {one.name: [problem.scenario.get(one.name, one.default)] for one in candidate.spec.scenarios}
    for name, chosen in {**situations, EMPTY.name: [*_empty(problem)]}.items():
        excluded = candidate.excludes[name].choices if name in candidate.excludes else ()
        for choice in chosen:
            if choice in excluded:
                raise UsageError(
                    f"{who} is not given {name} {choice!r}, as it declares, and the problem has it; leave that out of "
                    "supports, or choose another problem"
                )


def _empty(problem: Problem) -> Iterator[str]:
    """Yields what has no token: a sequence, or all of a dp rank."""
    if 0 in problem.lengths:
        yield "sequence"
    partition = problem.partition
    if not all(any(problem.lengths[s] for s in partition.sequences(dp)) for dp in range(problem.layout.dp)):
        yield "rank"


def _check_cotangent(candidate: Candidate, problem: Problem, who: str) -> None:
    """Refuses upstream gradients of outputs that carry none: the kernel could not be called."""
    own = candidate.differentiable
    if problem.cotangent not in (*own, *(["both"] if len(own) > 1 else [])):
        raise UsageError(
            f"{who} has gradients of {', '.join(own)}, and the problem has cotangent={problem.cotangent!r}; change "
            "differentiable, or choose another problem"
        )


def _check_rounding(candidate: Candidate, problem: Problem, who: str) -> None:
    """Refuses a problem whose tokens may lie too near to a kink for what the candidate rounds."""
    spec, coarsest = candidate.spec, candidate.coarsest(problem.dtype)
    near = spec.kinks or issubclass(spec.options_type, FilterOptions)
    if near and ROUNDED_TO[coarsest].unit > problem.coarsest.unit:
        raise UsageError(
            f"{who} rounds to {coarsest} what the loss is computed from, and the problem's tokens keep clear of kinks "
            f"by rounded_to={problem.rounded_to!r}; run verify for a problem of this candidate"
        )
