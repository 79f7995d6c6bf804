# SPDX-License-Identifier: Apache-2.0
"""Checks of what a reference returns."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.errors import UsageError
from lossgate.spec_check.evaluated import evaluated, unlike, values_of
from lossgate.spec_check.outcome import Finding, Subject, on

REMEDY = "mend it there; a reference must run on every batch, with an empty sequence or no trained token, too"


def runs(subject: Subject) -> Iterator[Finding]:
    """Looks for problems on which the reference raises, or gives what it must not."""
    for bound in subject.problems:
        try:
            bound.dense.outputs(bound.bound_spec)
            found = _under_vmap(bound) if bound in subject.with_loss else None
        except UsageError as error:
            found = str(error), REMEDY
        if found is not None:
            yield Finding(*found, on(bound))
            return


def _under_vmap(bound: BoundProblem) -> tuple[str, str] | None:
    values, alone = values_of(bound), evaluated(bound).loss

    def run(given: dict[str, Tensor]) -> Tensor:
        return bound.bound_spec.loss(values.replace(**given), bound.batch.known)[0]

    twice = {name: torch.stack([value, value]) for name, value in values.differentiable.items()}
    try:
        found = torch.vmap(run)(twice)
    except UsageError as error:
        return (
            f"under torch.vmap, {error}",
            "use torch.where in place of if, no .item(), .tolist() or float() of a tensor, nothing in place",
        )
    if not torch.allclose(found[0], alone, rtol=1e-9, atol=1e-12, equal_nan=True):
        return "under torch.vmap it gives another loss", "keep no state in the reference, and write nothing in place"
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
        if (name := unlike(first, second)) != "":
            yield Finding(f"two calls differ in {name}", "draw nothing at random, and keep no state", on(bound))
            return
