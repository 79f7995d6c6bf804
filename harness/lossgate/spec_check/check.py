# SPDX-License-Identifier: Apache-2.0
"""Runs all checks of a spec, in their order."""

from collections.abc import Callable, Iterator

import hypothesis.errors

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.spec_check.gradients import comparisons, gradient, used
from lossgate.spec_check.judged import judged, on_ranks
from lossgate.spec_check.results import (
    also_written,
    finite,
    masked,
    metrics,
    nothing_trained,
    runs,
    unchanged,
    untrained_sequences,
)
from lossgate.spec_check.subject import Check, Finding, Outcome, Subject, first_finding, ordinary_problems
from lossgate.spec_check.sums import counts_add_up, parts_add_up
from lossgate.specs.spec import Spec


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


def check_spec(spec: Spec) -> Iterator[Outcome]:
    """Checks a spec: is its reference fit to judge kernels by?

    The checks that run a dense kernel take longest. They are left out if an earlier check failed.

    Args:
        spec: what ``lossgate.spec`` returned.

    Yields:
        The outcome of each check, as soon as it is known.
    """
    try:
        subject = Subject(spec, tuple(ordinary_problems(spec, _PROBLEMS)))
        _ = [bound.batch for bound in subject.problems]  # draws the fields, which may raise
    except UsageError as error:
        yield Outcome(_DRAWS, (Finding(str(error), _remedy(error)),))
        return
    except hypothesis.errors.Unsatisfiable:
        yield Outcome(_DRAWS, (Finding("no options are valid together", "see __post_init__ and option_groups="),))
        return
    failed = False
    for check in CHECKS:
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
