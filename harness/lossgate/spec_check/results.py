# SPDX-License-Identifier: Apache-2.0
"""Checks of what a reference returns, and that what is not trained takes no part in it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.untrained import replaced, untrained, without_trained
from lossgate.spec_check.subject import (
    Finding,
    Subject,
    another,
    evaluate,
    evaluated,
    on,
    part_of,
    same,
    unlike,
    values_of,
)
from lossgate.specs.heads import HEADS
from lossgate.specs.token_values import TokenValues

REMEDY = "mend it there; a reference must run on every batch, with an empty sequence or no trained token, too"


def runs(subject: Subject) -> Iterator[Finding]:
    """Looks for problems on which the reference raises, or gives what it must not."""
    for bound in subject.problems:
        try:
            bound.dense.outputs(bound.bound_spec)
            found = _under_vmap(bound) or _without_sequences(bound) if bound in subject.with_loss else None
        except UsageError as error:
            found = str(error), REMEDY
        if found is not None:
            yield Finding(*found, on(bound))
            return


def _under_vmap(bound: BoundProblem) -> tuple[str, str] | None:
    """Runs the reference as the ensemble does: every number that rounds is one of each member."""
    values, known, alone = values_of(bound), bound.batch.known, evaluated(bound).loss

    def run(given: dict[str, Tensor], fields: dict[str, Tensor]) -> Tensor:
        return bound.bound_spec.loss(values.replace(**given), {**known, **fields})[0]

    def twice(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.stack([tensor, tensor]) for name, tensor in tensors.items()}

    try:
        found = torch.vmap(run)(
            twice(values.differentiable),
            twice(bound.batch.numbers),
        )
    except UsageError as error:
        return (
            f"under torch.vmap, {error}",
            "use torch.where in place of if, no .item(), .tolist() or float() of a tensor, nothing in place",
        )
    if not torch.allclose(found[0], alone, rtol=1e-9, atol=1e-12, equal_nan=True):
        return "under torch.vmap it gives another loss", "keep no state in the reference, and write nothing in place"
    return None


def _without_sequences(bound: BoundProblem) -> tuple[str, str] | None:
    """Runs the reference on what a rank may hold: no sequence at all."""
    values, fields, _ = part_of(bound, values_of(bound), range(0))
    try:
        evaluate(bound.bound_spec, values, fields)
    except UsageError as error:
        remedy = (
            "make it run on no sequence and no token: torch.stack and amax need an entry, index_add and sum do not. "
            "A field with an entry for each token has 'token' in its dims"
        )
        return f"without any sequence, as a rank may be: {error}", remedy
    return None


def metrics(subject: Subject) -> Iterator[Finding]:
    """Looks for declared metrics that are never returned."""
    returned = set[str]().union(*(evaluated(bound).metrics for bound in subject.with_loss))
    for name in subject.spec.metrics.keys() - returned if subject.with_loss else ():
        yield Finding(f"metric {name!r} is declared, and never returned", "return it, or drop it from metrics=")


def finite(subject: Subject) -> Iterator[Finding]:
    """Looks for results that are not finite on ordinary problems."""
    for bound in subject.with_loss:
        trained = bool(subject.spec.trained_of(bound.batch.known).any())
        for name, tensor in evaluated(bound).named.items():
            if name.startswith("metric"):  # the smallest of nothing is inf
                wrong = bool(tensor.isnan().any()) and trained
            else:
                wrong = not bool(tensor.isfinite().all())
            if wrong:
                yield Finding(
                    f"{name} is not finite, with options {bound.bound_spec.options}",
                    "clamp what divides, select away with torch.where what is masked before it is computed, and see "
                    "to powers, logarithms and roots at 0; or drop the choice of an option that makes it infinite",
                    on(bound),
                )
                return


def also_written(subject: Subject) -> Iterator[Finding]:
    """Looks for another way to write the loss that gives another result."""
    for bound in subject.with_loss:
        own, values = evaluated(bound), values_of(bound)
        for way, who in enumerate(bound.bound_spec.ways[1:], 1):
            other = evaluate(bound.bound_spec, values, bound.batch.known, way)
            name = unlike(own, other) or unlike(other, own)
            if name != "":
                yield Finding(
                    f"{who} differs from it in {name}, with options {bound.bound_spec.options}",
                    "compute the same loss, metrics and gradients in it, for every choice of the options; or drop it",
                    on(bound),
                )
                return


def unchanged(subject: Subject) -> Iterator[Finding]:
    """Looks for results that differ from call to call, and for inputs that are overwritten."""
    for bound in subject.with_loss:
        inputs = {name: value for name, value in bound.batch.known.items() if isinstance(value, Tensor)}
        before = {name: tensor._version for name, tensor in inputs.items()}  # counts writes in place
        first, second = evaluated(bound), evaluated(bound)
        for name, version in before.items():
            if inputs[name]._version != version:
                yield Finding(f"it overwrites {name!r}", "write nothing in place: x * y in place of x *= y", on(bound))
                return
        again = BoundProblem(subject.spec, bound.problem).batch.known
        for name, own in subject.spec.added.items():
            if own.count is None and not same(bound.batch.known[name], again[name]):
                yield Finding(
                    f"drawn twice, the same problem has another field {name!r}",
                    "draw numbers from the context: c.normal(), c.uniform(), c.coin(), c.integers() or c.streams, "
                    "and never from torch.rand or random",
                    on(bound),
                )
                return
        if (name := unlike(first, second)) != "":
            yield Finding(f"two calls differ in {name}", "draw nothing at random, and keep no state", on(bound))
            return


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
