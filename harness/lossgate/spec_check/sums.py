# SPDX-License-Identifier: Apache-2.0
"""Checks that the parts of ranks make the whole."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.spec_check.subject import (
    Evaluated,
    Finding,
    Subject,
    evaluate,
    evaluated,
    halves,
    on,
    part_of,
    same,
    values_of,
)
from lossgate.specs.record import fields_of

_DIVIDE = (
    "divide by what counts the whole batch, batch.valid_tokens or a field with count=, never by a count of the "
    "tokens at hand, such as batch.mask.sum()"
)


def parts_add_up(subject: Subject) -> Iterator[Finding]:
    """Looks for losses, gradients and metrics of two halves that do not add up to the batch's."""
    for bound in subject.with_loss:
        if not (cut := halves(bound)):
            continue
        values, whole = values_of(bound), evaluated(bound)
        parts: list[tuple[Evaluated, Tensor]] = []
        for own in cut:
            taken, fields, held = part_of(bound, values, own)
            try:
                parts.append((evaluate(bound.bound_spec, taken, fields), held))
            except UsageError as error:
                yield Finding(
                    f"on a part of the batch: {error}",
                    "make it run on any number of tokens, even none, as a rank may have it; and give a field with an "
                    "entry for each token 'token' in its dims",
                    on(bound),
                )
                return
        if (name := _not_the_sum(bound, whole, parts)) != "":
            yield Finding(f"two halves of a batch do not add up to the whole: {name}", _DIVIDE, on(bound))
            return


def _not_the_sum(bound: BoundProblem, whole: Evaluated, parts: list[tuple[Evaluated, Tensor]]) -> str:
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


def counts_add_up(subject: Subject) -> Iterator[Finding]:
    """Looks for fields with ``count=`` whose values of two halves do not add up to the batch's."""
    spec = subject.spec
    counting = [name for name, field in fields_of(spec.batch_type).items() if field.count is not None]
    for bound in subject.problems if counting else ():
        if not (cut := halves(bound)):
            continue
        whole, values = spec.counts(bound.batch.known), values_of(bound)
        parts = [spec.counts(part_of(bound, values, own)[1]) for own in cut]
        for name in counting:
            if not same(whole[name], sum((part[name] for part in parts), start=torch.zeros_like(whole[name]))):
                yield Finding(
                    f"field {name!r}: the counts of two halves do not add up to that of the batch",
                    "count= must be a sum over tokens or sequences; a mean, a maximum or a number of ranks is none",
                    on(bound),
                )
                return
