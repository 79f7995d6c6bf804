# SPDX-License-Identifier: Apache-2.0
"""Checks the gradients of a loss, its kinks, and whether it uses its values and fields."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.kinks import has_comparisons
from lossgate.problems.random_streams import RandomStreams
from lossgate.spec_check.subject import (
    Finding,
    Subject,
    another,
    evaluate,
    evaluated,
    first_finding,
    unlike,
    values_of,
)
from lossgate.specs.token_values import TokenValues

_STEP = 2e-7
"""Step of central differences in each value. Tokens are about 1e-6 away from kinks."""

_TOLERANCE = 1e-4
"""Tolerance relative to the gradient. It is off by far more if something is wrongly detached."""


def gradient(subject: Subject) -> Iterator[Finding]:
    """Looks for gradients that are not what differences of the loss give."""
    found = first_finding(subject.with_loss, _wrong_gradient)
    if subject.spec.stop_gradient:
        if subject.with_loss and next(found, None) is None:
            yield Finding(
                "stop_gradient=True, but every gradient is the derivative of the loss",
                "detach what the loss treats as a constant, such as a weight: w.detach(); or drop stop_gradient=True",
            )
        return
    yield from found


def _wrong_gradient(bound: BoundProblem) -> Finding | None:
    """Looks for a gradient that is not what differences of the loss give."""
    if _at_a_tie(bound):
        return None
    values, own = values_of(bound), evaluated(bound)
    for name, value in values.differentiable.items():
        signs = RandomStreams(bound.problem.to_json()).normal(f"direction of {name}", *value.shape).sign()
        direction = torch.where(value.isfinite(), signs, 0.0)
        found = float((own.gradients[name] * direction).sum())
        expected, noise = _difference(bound, values, name, direction)
        size = float(own.gradients[name].abs().sum()) + abs(expected)
        if abs(expected - found) > _TOLERANCE * size + noise:
            ratio = f"{found / expected:.3g} times" if abs(expected) > 1e-3 * size else "not"
            about_kinks = _AT_AN_EDGE if bound.spec.kinks else _SAY_KINKS
            return Finding(
                f"the gradient of values.{name} is {ratio} what differences of the loss give",
                f"{_DETACH_NOTHING} {about_kinks}",
            )
    return None


_DETACH_NOTHING = (
    "detach nothing, and use no torch.no_grad(). If the loss stops gradients on purpose, as CISPO and REINFORCE do, "
    "say so with stop_gradient=True."
)
_SAY_KINKS = "If it has a clip or another comparison, say kinks=True"
_AT_AN_EDGE = (
    "If the options of the problem put an exact tie on the edge of a clip or comparison, as a clip at a ratio of 1 "
    "does on-policy, drop that choice, draw the field off the edge, or name the scenario in tie_scenarios="
)


def _at_a_tie(bound: BoundProblem) -> bool:
    """Returns whether a scenario of the problem puts tokens exactly on a kink."""
    chosen = {choice.name: choice.default for choice in bound.spec.scenarios} | dict(bound.problem.scenario)
    return any(chosen[name] == tie for name, tie in bound.spec.tie_scenarios.items())


def _difference(bound: BoundProblem, values: TokenValues, name: str, direction: Tensor) -> tuple[float, float]:
    """Returns the derivative along a direction by differences, and a bound of its rounding error.

    The loss is smooth here, so the derivatives with two steps differ only by rounding. They may
    agree by chance, or both be 0 where the loss hardly changes. So the error of the last digits of
    the loss is added.
    """

    def loss(step: float) -> float:
        moved = torch.where(direction != 0, values.given[name] + step * direction, values.given[name])
        return float(evaluate(bound.bound_spec, values.replace(**{name: moved}), bound.batch.known).loss)

    one, other = ((loss(step) - loss(-step)) / (2 * step) for step in (_STEP, 2 * _STEP))
    last_digits = 4 * torch.finfo(torch.float64).eps * abs(loss(0.0)) / _STEP
    return one, 10 * abs(one - other) + last_digits


def comparisons(bound: BoundProblem) -> Finding | None:
    """Looks for a clip or comparison in a loss that declares none."""
    if bound.spec.kinks or not has_comparisons(bound.batch, bound.problem, bound.bound_spec):
        return None
    return Finding(
        "it clamps or compares values that rounding changes",
        "say kinks=True: near the edge, rounding decides which gradient or metric a right kernel computes, so problems "
        "must keep away from it",
    )


def used(subject: Subject) -> Iterator[Finding]:
    """Looks for values and fields that change no result."""
    spec = subject.spec
    fields = {name for name, own in spec.added.items() if name != spec.gathered_ids and not own.unused}
    unused = {*spec.uses, *fields} if subject.with_loss else set[str]()
    for bound in subject.with_loss:
        unused = {name for name in unused if not _matters(bound, name)}
        if not unused:
            return
    for name in sorted(unused):
        is_value = name in spec.uses
        what, where = (f"values.{name}", "uses=") if is_value else (f"field {name!r}", "the batch class")
        is_count = name in spec.added and spec.added[name].count is not None
        use = "divide by it, in place of a count of the tokens at hand," if is_count else "use it,"
        yield Finding(f"{what} changes nothing", f"{use} or drop it from {where}: kernels need not get it")


def _matters(bound: BoundProblem, name: str) -> bool:
    """Returns whether other entries of a value or field change a result on a problem."""
    own, values, fields = evaluated(bound), values_of(bound), bound.batch.known
    tensor = values.given.get(name, fields.get(name))
    if tensor is None:
        return False
    other = another(tensor)
    if name in values.given:
        return unlike(own, evaluate(bound.bound_spec, values.replace(**{name: other}), fields)) != ""
    changed = {**fields, name: other}
    if bound.spec.added[name].count is None:
        changed |= bound.spec.counts(changed)
    return unlike(own, evaluate(bound.bound_spec, values, changed)) != ""
