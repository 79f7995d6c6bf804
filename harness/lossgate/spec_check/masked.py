# SPDX-License-Identifier: Apache-2.0
"""Checks that what is not trained takes no part."""

from collections.abc import Iterator, Mapping
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.properties.masked import replaced, untrained, without_trained
from lossgate.spec_check.evaluated import another, evaluate, evaluated, same, unlike, values_of
from lossgate.spec_check.outcome import Finding, Subject, on
from lossgate.spec_check.values import REMEDY
from lossgate.specs.heads import HEADS
from lossgate.specs.token_values import TokenValues


def masked(subject: Subject) -> Iterator[Finding]:
    """Looks for results that change where values or fields of what is not trained are NaN."""
    for bound in subject.with_loss:
        values, fields = values_of(bound), dict(bound.batch.known)
        away = untrained(subject.spec, fields)
        of_values = away[HEADS[bound.problem.head].gives]
        poisoned = {name: replaced(value, of_values) for name, value in values.differentiable.items()}
        if (what := _change(bound, values.replace(**poisoned), fields)) != "":
            yield Finding(
                f"NaN in values where nothing is trained changes {what}",
                "select first, then compute: logprobs = torch.where(batch.mask, values.logprobs, 0.0). A product with "
                "the mask keeps NaN, and so does the gradient of a torch.where that comes last",
                on(bound),
            )
            return
        for name, field in subject.spec.added.items():
            if field.dims[:1] != (subject.spec.trained_dim,) or field.dtype != "float32" or field.unshifted:
                continue
            poison = {name: replaced(fields[name], away[subject.spec.trained_dim])}
            if (what := _change(bound, values, {**fields, **poison})) != "":
                yield Finding(
                    f"NaN in field {name!r} where nothing is trained changes {what}",
                    f"select it first, too: torch.where(batch.mask, batch.{name}, 0.0)",
                    on(bound),
                )
                return


def untrained_sequences(subject: Subject) -> Iterator[Finding]:
    """Looks for losses that change with the fields of sequences without any trained token.

    Sequences that belong together count as one. Metrics may be of all sequences.
    """
    spec = subject.spec
    for bound in subject.with_loss:
        fields, own = dict(bound.batch.known), evaluated(bound)
        away = untrained(spec, fields)["sequence"].view(-1, spec.group_size).all(1).repeat_interleave(spec.group_size)
        for name, field in spec.added.items():
            if field.dims[:1] != ("sequence",) or field.dtype != "float32":
                continue
            changed = {**fields, name: replaced(fields[name], away, another(fields[name]))}
            found = evaluate(bound.bound_spec, values_of(bound), {**changed, **spec.counts(changed)})
            if not same(own.loss, found.loss):
                yield Finding(
                    f"field {name!r} of a sequence without a trained token changes the loss",
                    "leave such sequences out: count the trained tokens of each, as in "
                    "x.new_zeros(batch.sequences).index_add(0, batch.sequence, batch.mask.to(x)), and select those "
                    "with some by torch.where",
                    on(bound),
                )
                return


def _change(bound: BoundProblem, values: TokenValues, fields: Mapping[str, Any]) -> str:
    """Returns what differs with other inputs; empty if nothing does."""
    try:
        return unlike(evaluated(bound), evaluate(bound.bound_spec, values, fields))
    except UsageError as error:
        return f"whether it runs: {error}"


def nothing_trained(subject: Subject) -> Iterator[Finding]:
    """Looks for losses that are not finite, and gradients that are not 0, if nothing is trained."""
    for bound in subject.with_loss:
        fields = without_trained(subject.spec, bound.batch.known)
        if bool(subject.spec.trained_of(fields).any()):
            continue
        try:
            found = evaluate(bound.bound_spec, values_of(bound), {**fields, **subject.spec.counts(fields)})
        except UsageError as error:
            yield Finding(f"with nothing trained: {error}", REMEDY, on(bound))
            return
        if not bool(found.loss.isfinite()) or any(bool((g != 0).any()) for g in found.gradients.values()):
            yield Finding(
                "with nothing trained, the loss is not finite, or a gradient is not 0",
                "divide by batch.valid_tokens.clamp(min=1), and add up trained tokens alone",
                on(bound),
            )
            return
