# SPDX-License-Identifier: Apache-2.0
"""All checks of a spec, in order."""

from collections.abc import Iterator

import hypothesis.errors

from lossgate.base.errors import UsageError
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
from lossgate.spec_check.subject import Check, Finding, Outcome, Subject, ordinary_problems
from lossgate.spec_check.sums import counts_add_up, parts_add_up
from lossgate.specs.spec import Spec

CHECKS = (
    Check("runs", "it runs on every problem, and under torch.vmap", runs, needed=True),
    Check("unchanged", "it gives the same each time, and overwrites nothing", unchanged, needed=True),
    Check("metrics", "it returns every metric that it declares", metrics),
    Check("nothing trained", "if nothing is trained, the loss is finite and gradients are 0", nothing_trained),
    Check("finite", "loss, metrics and gradients are finite", finite),
    Check("also written", "other ways to write it give the same", also_written),
    Check("masked", "NaN in what is not trained changes nothing", masked),
    Check("untrained", "sequences without a trained token change nothing", untrained_sequences),
    Check("gradient", "the gradient is the derivative of the loss", gradient),
    Check("comparisons", "clips and comparisons are declared by kinks=True", comparisons),
    Check("used", "every value and field changes a result", used),
    Check("counts", "the counts of two halves of a batch add up", counts_add_up),
    Check("parts", "loss, gradients and metrics of two halves of a batch add up", parts_add_up),
    Check("judged", "problems show every option and goal, and the reference in float32 agrees", judged),
    Check("ranks", "it agrees on ranks that split the batch and the vocabulary", on_ranks),
)
"""In the order in which they are done: the causes before what follows from them."""

_DRAWS = Check("draws", "problems can be drawn, with counts, clips and options", lambda _: iter(()), needed=True)

_AS_TOLD = "mend what the message names"

_RAISED = (
    "mend it there. A batch may have any number of sequences, and of tokens in each, even none; if "
    "sequences belong together, such as the two of a pair, say group_size=2"
)

_PROBLEMS = 40
"""For each head."""


def check_spec(spec: Spec) -> Iterator[Outcome]:
    """Checks a spec: is its reference fit to judge kernels by?

    The checks of a dense kernel, which take longest, are left out if another one has failed.

    Args:
        spec: what ``lossgate.spec`` returned.

    Yields:
        What came of each check, as soon as it is done.
    """
    try:
        subject = Subject(spec, tuple(ordinary_problems(spec, _PROBLEMS)))
        _ = [bound.batch for bound in subject.problems]
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
    """Returns what to do. Batches of odd sizes make operations fail, and no names."""
    of_sizes = isinstance(error.__cause__, IndexError | RuntimeError | ValueError | ZeroDivisionError)
    return _RAISED if of_sizes and "references run" not in str(error) else _AS_TOLD


def _found(check: Check, subject: Subject) -> tuple[Finding, ...]:
    try:
        return tuple(check.find(subject))
    except UsageError as error:
        return (Finding(str(error), _AS_TOLD),)
