# SPDX-License-Identifier: Apache-2.0
"""Checks of gradients, and of what a loss does with its values and fields."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.kinks import has_comparisons
from lossgate.problems.random_streams import RandomStreams
from lossgate.spec_check.subject import Finding, Subject, another, evaluate, evaluated, on, unlike, values_of
from lossgate.specs.token_values import TokenValues

_STEP = 2e-7
"""Of central differences, for each value. Tokens stay about 1e-6 clear of kinks."""

_TOLERANCE = 1e-4
"""Relative to the gradient. What is detached by mistake is off by far more."""


def gradient(subject: Subject) -> Iterator[Finding]:
    """Looks for gradients that differences of the loss do not give."""
    if subject.spec.stop_gradient:
        if subject.with_loss and next(_stopped(subject), None) is None:
            yield Finding(
                "stop_gradient=True, and yet every gradient is the derivative of the loss",
                "detach what the loss takes as a constant, such as a weight: w.detach(); or drop stop_gradient=True",
            )
        return
    yield from _stopped(subject)


def _stopped(subject: Subject) -> Iterator[Finding]:
    """Yields the first gradient that differences of the loss do not give."""
    for bound in subject.with_loss:
        if _at_a_tie(bound):
            continue
        values, own = values_of(bound), evaluated(bound)
        for name, value in values.differentiable.items():
            signs = RandomStreams(bound.problem.to_json()).normal(f"direction of {name}", *value.shape).sign()
            direction = torch.where(value.isfinite(), signs, 0.0)
            found = float((own.gradients[name] * direction).sum())
            expected, noise = _difference(bound, values, name, direction)
            size = float(own.gradients[name].abs().sum()) + abs(expected)
            if abs(expected - found) > _TOLERANCE * size + noise:
                ratio = f"{found / expected:.3g} times" if abs(expected) > 1e-3 * size else "not"
                yield Finding(
                    f"the gradient of values.{name} is {ratio} what differences of the loss give",
                    f"{_DETACH_NOTHING} {_AT_AN_EDGE if subject.spec.kinks else _SAY_KINKS}",
                    on(bound),
                )
                return


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
    chosen = {choice.name: choice.default for choice in bound.spec.scenarios} | dict(bound.problem.scenario)
    return any(chosen[name] == tie for name, tie in bound.spec.tie_scenarios.items())


def _difference(bound: BoundProblem, values: TokenValues, name: str, direction: Tensor) -> tuple[float, float]:
    """Returns the derivative along a direction, by differences, and how far rounding moves it.

    Two steps differ by no more than that, since the loss is smooth between them. They may agree by
    chance, or both be 0 where the loss hardly changes; so the last digits of the loss count, too.
    """

    def loss(step: float) -> float:
        moved = torch.where(direction != 0, values.given[name] + step * direction, values.given[name])
        return float(evaluate(bound.bound_spec, values.replace(**{name: moved}), bound.batch.known).loss)

    one, two = ((loss(step) - loss(-step)) / (2 * step) for step in (_STEP, 2 * _STEP))
    last_digits = 4 * torch.finfo(torch.float64).eps * abs(loss(0.0)) / _STEP
    return one, 10 * abs(one - two) + last_digits


def comparisons(subject: Subject) -> Iterator[Finding]:
    """Looks for clips and comparisons of a loss that declares none."""
    for bound in () if subject.spec.kinks else subject.with_loss:
        if has_comparisons(bound.batch, bound.problem, bound.bound_spec):
            yield Finding(
                "it clamps or compares what rounding moves",
                "say kinks=True: near the edge rounding decides which gradient, or metric, a right kernel finds, so "
                "problems must stay clear of it",
                on(bound),
            )
            return


def used(subject: Subject) -> Iterator[Finding]:
    """Looks for values and fields that change no result."""
    spec = subject.spec
    fields = {name for name, own in spec.added.items() if name != spec.gathered_ids and not own.unused}
    left = {*spec.uses, *fields} if subject.with_loss else set[str]()
    for bound in subject.with_loss:
        left = {name for name in left if not _matters(bound, name)}
        if not left:
            return
    for name in sorted(left):
        what, where = (f"values.{name}", "uses=") if name in spec.uses else (f"field {name!r}", "the batch class")
        counts = name in spec.added and spec.added[name].count is not None
        use = "divide by it, in place of a count of the tokens at hand," if counts else "use it,"
        yield Finding(f"{what} changes nothing", f"{use} or drop it from {where}: kernels need not get it")


def _matters(bound: BoundProblem, name: str) -> bool:
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
