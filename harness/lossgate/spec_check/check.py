# SPDX-License-Identifier: Apache-2.0
"""Runs all checks of a spec, in their order."""

from collections.abc import Callable, Iterable, Iterator

import hypothesis.errors
import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.spec_check.gradients import comparisons, gradient, used
from lossgate.spec_check.reference_values import (
    also_written,
    finite,
    masked,
    metrics,
    nothing_trained,
    runs,
    unchanged,
    untrained_sequences,
)
from lossgate.spec_check.subject import (
    Check,
    Evaluated,
    Finding,
    Outcome,
    Subject,
    evaluate,
    evaluated,
    first_finding,
    halves,
    ordinary_problems,
    part_of,
    same,
    values_of,
)
from lossgate.spec_check.trial_run import judged, on_ranks
from lossgate.specs.record import fields_of
from lossgate.specs.spec import Spec

_DIVIDE = (
    "divide by a count of the whole batch, which is batch.valid_tokens or a field with count=; never divide by a count "
    "of the tokens at hand, such as batch.mask.sum()"
)


def parts_add_up(bound: BoundProblem) -> Finding | None:
    """Looks for a loss, gradient or metric of two halves that does not add up to the batch's."""
    if not (cut := halves(bound)):
        return None
    values, whole = values_of(bound), evaluated(bound)
    parts: list[tuple[Evaluated, Tensor]] = []
    for own in cut:
        taken, fields, held = part_of(bound, values, own)
        try:
            parts.append((evaluate(bound.bound_spec, taken, fields), held))
        except UsageError as error:
            return Finding(
                f"on a part of the batch: {error}",
                "make it run on any number of tokens, even on none, because a rank may have none; a field with an "
                "entry for each token must have 'token' in its dims",
            )
    if name := _not_the_sum(bound, whole, parts):
        return Finding(f"two halves of a batch do not add up to the whole: {name}", _DIVIDE)
    return None


def _not_the_sum(bound: BoundProblem, whole: Evaluated, parts: list[tuple[Evaluated, Tensor]]) -> str:
    """Returns the name of a result to which its parts do not add up; empty if there is none.

    Args:
        bound: the problem.
        whole: the results on the whole batch.
        parts: the results on each half, and the indices of its values in the whole batch.
    """
    one, other = (part for part, _ in parts)
    if not same(whole.loss, one.loss + other.loss):
        return "the loss"
    for name, metric in bound.spec.metrics.items():
        if name in whole.metrics:
            both = torch.stack([one.metrics[name], other.metrics[name]])
            if not same(whole.metrics[name], _REDUCE[metric.reduction](both)):
                return f"metric {name!r}, which is a {metric.reduction}"
    for name, of_whole in whole.gradients.items():
        if not all(same(of_whole[held], part.gradients[name]) for part, held in parts):
            return f"the gradient of values.{name}"
    return ""


_REDUCE = {"sum": lambda x: x.sum(0), "min": lambda x: x.amin(0), "max": lambda x: x.amax(0)}


def counts_add_up(bound: BoundProblem) -> Finding | None:
    """Looks for a field with ``count=`` whose values of two halves do not add up to the batch's."""
    spec = bound.spec
    counting = [name for name, field in fields_of(spec.batch_type).items() if field.count is not None]
    if not counting or not (cut := halves(bound)):
        return None
    whole, values = spec.counts(bound.batch.known), values_of(bound)
    one, other = (spec.counts(part_of(bound, values, own)[1]) for own in cut)
    for name in counting:
        if not same(whole[name], one[name] + other[name]):
            return Finding(
                f"field {name!r}: the counts of two halves do not add up to that of the batch",
                "count= must be a sum over tokens or sequences; a mean, a maximum or a number of ranks is none",
            )
    return None


def _on_all(find: Callable[[BoundProblem], Finding | None]) -> Callable[[Subject], Iterator[Finding]]:
    """Makes a check of all problems from a function that checks a problem."""
    return lambda subject: first_finding(subject.problems, find)


def _with_loss(find: Callable[[BoundProblem], Finding | None]) -> Callable[[Subject], Iterator[Finding]]:
    """Makes the same check, but only of specs that have a loss."""
    return lambda subject: first_finding(subject.with_loss, find)


CHECKS = (
    Check("runs", "it runs on every problem, and under torch.vmap", _on_all(runs), needed=True),
    Check("unchanged", "it gives the same each time, and overwrites nothing", _with_loss(unchanged), needed=True),
    Check("metrics", "it returns every metric that it declares", metrics),
    Check(
        "nothing trained", "if nothing is trained, the loss is finite and gradients are 0", _with_loss(nothing_trained)
    ),
    Check("finite", "loss, metrics and gradients are finite", _with_loss(finite)),
    Check("also written", "other ways to write it give the same", _with_loss(also_written)),
    Check("masked", "NaN in what is not trained changes nothing", _with_loss(masked)),
    Check("untrained", "sequences without a trained token change nothing", _with_loss(untrained_sequences)),
    Check("gradient", "the gradient is the derivative of the loss", gradient),
    Check("comparisons", "clips and comparisons are declared by kinks=True", _with_loss(comparisons)),
    Check("used", "every value and field changes a result", used),
    Check("counts", "the counts of two halves of a batch add up", _on_all(counts_add_up)),
    Check("parts", "loss, gradients and metrics of two halves of a batch add up", _with_loss(parts_add_up)),
    Check("judged", "problems show every option and goal, and the reference in float32 agrees", judged),
    Check("ranks", "it agrees on ranks that split the batch and the vocabulary", on_ranks),
)
"""All checks in their order: a cause comes before its consequences."""

_DRAWS = Check("draws", "problems can be drawn, with counts, clips and options", lambda _: iter(()), needed=True)

_AS_TOLD = "mend what the message names"

_RAISED = (
    "mend it there. A batch may have any number of sequences, and of tokens in each, even none; if "
    "sequences belong together, such as the two of a pair, say group_size=2"
)

_PROBLEMS = 40
"""How many problems are drawn for each head."""


_FEW = 10
"""How many problems are drawn for each head to see quickly whether a spec is fit."""


def first_failure(spec: Spec) -> Outcome | None:
    """Returns the first check that fails, among those that run no kernel, on a few problems."""
    return next((outcome for outcome in check_spec(spec, CHECKS[:-2], _FEW) if not outcome.passed), None)


def check_spec(spec: Spec, checks: Iterable[Check] = CHECKS, problems: int = _PROBLEMS) -> Iterator[Outcome]:
    """Checks a spec: is its reference fit to judge kernels by?

    The checks that run a dense kernel take longest. They are left out if an earlier check failed.

    Args:
        spec: what ``lossgate.spec`` returned.
        checks: those to make, in their order.
        problems: how many problems are drawn for each head.

    Yields:
        The outcome of each check, as soon as it is known.
    """
    try:
        subject = Subject(spec, tuple(ordinary_problems(spec, problems)))
        _ = [bound.batch for bound in subject.problems]  # draws the fields, which may raise
    except UsageError as error:
        yield Outcome(_DRAWS, (Finding(str(error), _remedy(error)),))
        return
    except hypothesis.errors.Unsatisfiable:
        yield Outcome(_DRAWS, (Finding("no options are valid together", "see __post_init__ and option_groups="),))
        return
    failed = False
    for check in checks:
        if failed and check.find in (judged, on_ranks):
            return
        outcome = Outcome(check, _found(check, subject))
        yield outcome
        failed = failed or not outcome.passed
        if check.needed and not outcome.passed:
            return


def _remedy(error: UsageError) -> str:
    """Returns what to do about an error.

    Batches of unusual sizes are a likely reason for some kinds of errors, unless the message gives
    another reason.
    """
    may_be_sizes = isinstance(error.__cause__, IndexError | RuntimeError | ValueError | ZeroDivisionError)
    gives_reason = "references run" in str(error)
    return _RAISED if may_be_sizes and not gives_reason else _AS_TOLD


def _found(check: Check, subject: Subject) -> tuple[Finding, ...]:
    try:
        return tuple(check.find(subject))
    except UsageError as error:
        return (Finding(str(error), _AS_TOLD),)
