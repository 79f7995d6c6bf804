# SPDX-License-Identifier: Apache-2.0
"""Checks that the results on parts of a batch add up to those on the whole batch."""

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.spec_check.subject import (
    Evaluated,
    Finding,
    evaluate,
    evaluated,
    halves,
    part_of,
    same,
    values_of,
)
from lossgate.specs.record import fields_of

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
    for name, gradient in whole.gradients.items():
        if not all(same(gradient[held], part.gradients[name]) for part, held in parts):
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
