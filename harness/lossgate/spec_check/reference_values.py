# SPDX-License-Identifier: Apache-2.0
"""Checks the results of a reference, and that untrained tokens and sequences do not change them."""

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
    part_of,
    same,
    unlike,
    values_of,
)
from lossgate.specs.heads import HEADS
from lossgate.specs.token_values import TokenValues

_REMEDY = "mend it there; a reference must run on every batch, even with an empty sequence or without a trained token"


def runs(bound: BoundProblem) -> Finding | None:
    """Runs the reference in every way: as it is, under torch.vmap, and without sequences."""
    try:
        bound.dense.outputs(bound.bound_spec)
        if bound.spec.reference is None:
            return None
        return _under_vmap(bound) or _without_sequences(bound)
    except UsageError as error:
        return Finding(str(error), _REMEDY)


def _under_vmap(bound: BoundProblem) -> Finding | None:
    """Runs the reference under torch.vmap, as the ensemble does, with two members."""
    values, known, alone = values_of(bound), bound.batch.known, evaluated(bound).loss

    def run(given: dict[str, Tensor], fields: dict[str, Tensor]) -> Tensor:
        return bound.bound_spec.loss(values.replace(**given), {**known, **fields})[0]

    def twice(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.stack([tensor, tensor]) for name, tensor in tensors.items()}

    try:
        found = torch.vmap(run)(twice(values.differentiable), twice(bound.batch.numbers))
    except UsageError as error:
        return Finding(
            f"under torch.vmap, {error}",
            "use torch.where in place of if, and no .item(), .tolist() or float() of a tensor; write nothing in place",
        )
    if not torch.allclose(found[0], alone, rtol=1e-9, atol=1e-12, equal_nan=True):
        return Finding(
            "under torch.vmap it gives another loss", "keep no state in the reference, and write nothing in place"
        )
    return None


def _without_sequences(bound: BoundProblem) -> Finding | None:
    """Runs the reference without any sequence, because a rank may have none."""
    values, fields, _ = part_of(bound, values_of(bound), range(0))
    try:
        evaluate(bound.bound_spec, values, fields)
    except UsageError as error:
        remedy = (
            "make it run without sequences and tokens: torch.stack and amax need an entry, index_add and sum do not. "
            "A field with an entry for each token has 'token' in its dims"
        )
        return Finding(f"without any sequence, as on a rank that has none: {error}", remedy)
    return None


def metrics(subject: Subject) -> Iterator[Finding]:
    """Looks for declared metrics that are never returned."""
    if not subject.with_loss:
        return
    returned = set[str]().union(*(evaluated(bound).metrics for bound in subject.with_loss))
    for name in subject.spec.metrics:
        if name not in returned:
            yield Finding(f"metric {name!r} is declared, but never returned", "return it, or drop it from metrics=")


def finite(bound: BoundProblem) -> Finding | None:
    """Looks for a result that is not finite on an ordinary problem."""
    trained = bool(bound.spec.trained_of(bound.batch.known).any())
    for name, tensor in evaluated(bound).named.items():
        if name.startswith("metric"):  # a minimum over no trained token is inf
            wrong = bool(tensor.isnan().any()) and trained
        else:
            wrong = not bool(tensor.isfinite().all())
        if wrong:
            return Finding(
                f"{name} is not finite, with options {bound.bound_spec.options}",
                "clamp divisors, replace masked entries by torch.where before anything is computed from them, and see "
                "to powers, logarithms and roots at 0; or drop the choice of an option that makes it infinite",
            )
    return None


def also_written(bound: BoundProblem) -> Finding | None:
    """Looks for another way to write the loss that gives another result."""
    own, values = evaluated(bound), values_of(bound)
    for way, who in enumerate(bound.bound_spec.ways[1:], 1):
        other = evaluate(bound.bound_spec, values, bound.batch.known, way)
        if name := unlike(own, other) or unlike(other, own):
            return Finding(
                f"{who} differs from the reference in {name}, with options {bound.bound_spec.options}",
                "compute the same loss, metrics and gradients in it, for every choice of the options; or drop it",
            )
    return None


def unchanged(bound: BoundProblem) -> Finding | None:
    """Looks for an input that is overwritten, and a field or result that changes by itself."""
    inputs = {name: value for name, value in bound.batch.known.items() if isinstance(value, Tensor)}
    before = {name: tensor._version for name, tensor in inputs.items()}  # counts writes in place
    first, second = evaluated(bound), evaluated(bound)
    for name, version in before.items():
        if inputs[name]._version != version:
            return Finding(f"it overwrites {name!r}", "write nothing in place: x * y in place of x *= y")
    again = BoundProblem(bound.spec, bound.problem).batch.known
    for name, own in bound.spec.added.items():
        if own.count is None and not same(bound.batch.known[name], again[name]):
            return Finding(
                f"drawn twice, the same problem has another field {name!r}",
                "draw numbers from the context: c.normal(), c.uniform(), c.coin(), c.integers() or c.streams; never "
                "draw them from torch.rand or random",
            )
    if name := unlike(first, second):
        return Finding(f"two calls differ in {name}", "draw nothing at random, and keep no state")
    return None


def masked(bound: BoundProblem) -> Finding | None:
    """Looks for results that change if values or fields of what is not trained are NaN."""
    return _masked_values(bound) or _masked_fields(bound)


def _masked_values(bound: BoundProblem) -> Finding | None:
    values, fields = values_of(bound), bound.batch.known
    away = untrained(bound.spec, fields)[HEADS[bound.problem.head].gives]
    poisoned = {name: replaced(value, away) for name, value in values.differentiable.items()}
    if what := _change(bound, values.replace(**poisoned), fields):
        return Finding(
            f"NaN in values where nothing is trained changes {what}",
            "select first, then compute: logprobs = torch.where(batch.mask, values.logprobs, 0.0). A product with the "
            "mask keeps NaN, and so does the gradient of a torch.where that comes last",
        )
    return None


def _masked_fields(bound: BoundProblem) -> Finding | None:
    spec, values, fields = bound.spec, values_of(bound), bound.batch.known
    away = untrained(spec, fields)[spec.trained_dim]
    for name, field in spec.added.items():
        if field.dims[:1] != (spec.trained_dim,) or field.dtype != "float32" or field.unshifted:
            continue
        if what := _change(bound, values, {**fields, name: replaced(fields[name], away)}):
            is_trained = "batch.mask" if spec.trained_dim == "token" else "has_trained_token"  # [sequences]
            return Finding(
                f"NaN in field {name!r} where nothing is trained changes {what}",
                f"replace it before you compute with it: torch.where({is_trained}, batch.{name}, 0.0)",
            )
    return None


def untrained_sequences(bound: BoundProblem) -> Finding | None:
    """Looks for losses that change with the fields of sequences without any trained token.

    The sequences of a group count as one. Metrics may depend on all sequences.
    """
    spec, fields, own = bound.spec, bound.batch.known, evaluated(bound)
    groups = untrained(spec, fields)["sequence"].view(-1, spec.group_size).all(1)
    away = groups.repeat_interleave(spec.group_size)
    for name, field in spec.added.items():
        if field.dims[:1] != ("sequence",) or field.dtype != "float32":
            continue
        changed = {**fields, name: replaced(fields[name], away, another(fields[name]))}
        found = evaluate(bound.bound_spec, values_of(bound), {**changed, **spec.counts(changed)})
        if not same(own.loss, found.loss):
            return Finding(
                f"field {name!r} of a sequence without a trained token changes the loss",
                "leave such sequences out: count the trained tokens of each, as in x.new_zeros(batch.sequences)."
                "index_add(0, batch.sequence, batch.mask.to(x)), and select the others by torch.where",
            )
    return None


def _change(bound: BoundProblem, values: TokenValues, fields: Mapping[str, Any]) -> str:
    """Returns the name of a result that other inputs change; empty if they change none."""
    try:
        return unlike(evaluated(bound), evaluate(bound.bound_spec, values, fields))
    except UsageError as error:
        return f"whether it runs: {error}"


def nothing_trained(bound: BoundProblem) -> Finding | None:
    """Looks for a loss that is not finite, and a gradient that is not 0, if nothing is trained."""
    fields = without_trained(bound.spec, bound.batch.known)
    if bool(bound.spec.trained_of(fields).any()):
        return None
    try:
        found = evaluate(bound.bound_spec, values_of(bound), {**fields, **bound.spec.counts(fields)})
    except UsageError as error:
        return Finding(f"with nothing trained: {error}", _REMEDY)
    has_gradient = any(bool((gradient != 0).any()) for gradient in found.gradients.values())
    if bool(found.loss.isfinite()) and not has_gradient:
        return None
    return Finding(
        "with nothing trained, the loss is not finite, or a gradient is not 0",
        "divide by batch.valid_tokens.clamp(min=1), and add up only trained tokens",
    )
