# SPDX-License-Identifier: Apache-2.0
"""Checks a declaration against its spec.

This is done where the declaration is made, so that a slip is reported there, not after minutes
of work.
"""

from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest, shown
from lossgate.declaration.any_value import ANY
from lossgate.declaration.arguments import check_mapping, check_name, check_names, check_type
from lossgate.declaration.budgets import Budgets
from lossgate.declaration.contract import Contract
from lossgate.losses import check_own_name, find_spec
from lossgate.problems.whole_sequences import Tokens
from lossgate.specs.heads import HEADS
from lossgate.specs.option import Option
from lossgate.specs.outputs import metric_output
from lossgate.specs.spec import Spec


def check_spec(spec: Any) -> Spec:
    if isinstance(spec, Spec):
        check_own_name(spec)
        return spec
    return find_spec(check_type("spec", spec, str, "the name of a loss or a Spec; 'lossgate list' describes them"))


def check_head(spec: Spec, head: Any) -> str:
    if not isinstance(head, str) or head not in spec.inputs:
        raise UsageError(
            f"candidate(head={shown(head)}): spec {spec.name!r} has no such head; {nearest(head, spec.inputs)}"
        )
    return head


def check_budgets(head: str, budgets: Any) -> Budgets | None:
    """Returns the budgets, which name dims of the head."""
    if budgets is None:
        return None
    if not isinstance(budgets, Budgets):
        raise UsageError(f"candidate(budgets={shown(budgets)}): expected lossgate.Budgets(...)")
    leaves = HEADS[head].leaves.values()
    budgets.check_names(tuple(dim for dim in ("vocab", "hidden") if any(dim in dims for dims in leaves)))
    return budgets


def check_kernel(kernel: Any, name: str | None) -> str:
    """Returns the candidate's name: the one that was given, or the kernel's own."""
    if not callable(kernel):
        raise UsageError(f"candidate(...) decorates {shown(kernel)}; expected a function of inputs, options and mesh")
    own_name = name if name is not None else getattr(kernel, "__name__", None)
    if own_name in (None, "<lambda>"):
        what = "lambda" if own_name else type(kernel).__name__
        raise UsageError(f"candidate(...) decorates a {what}, which has no name; give it one: candidate(name=...)")
    check_name(own_name)
    return own_name


def check_supports(spec: Spec, supports: Any) -> dict[str, Any]:
    """Returns the supported values by option."""
    by_option = dict(check_mapping("supports", supports, "supports={'temperature': lossgate.ANY}"))
    for name, given in by_option.items():
        where = f"candidate(supports={{{name!r}: {shown(given)}}})"
        if name not in spec.supported_options:
            raise UsageError(
                f"{where}: spec {spec.name!r} has no option {name!r}; {nearest(name, spec.supported_options)}"
            )
        values = tuple(given) if isinstance(given, list) else given
        _check_values(spec, name, values, where)
        by_option[name] = _as_floats(spec.supported_options[name], values)
    return by_option


def _as_floats(option: Option, values: Any) -> Any:
    """Returns the values of an option that takes floats, with 2 as 2.0: they draw the same."""
    if isinstance(values, tuple):
        return tuple(_as_floats(option, value) for value in values)
    floats = option.interval is not None or any(isinstance(choice, float) for choice in option.choices)
    return float(values) if floats and isinstance(values, int) and not isinstance(values, bool) else values


def _check_values(spec: Spec, name: str, values: Any, where: str) -> None:
    option = spec.supported_options[name]
    if isinstance(values, tuple) and not values:
        raise UsageError(f"{where}: it supports no value; expected ANY, a value or a tuple of values: {option.domain}")
    if isinstance(values, set | frozenset):
        ordered = tuple(sorted(values, key=repr))
        raise UsageError(f"{where}: a set has no order; write supports={{{name!r}: {shown(ordered)}}}")
    own = name in {o.name for o in spec.options}
    for value in () if values is ANY else values if isinstance(values, tuple) else (values,):
        if not option.allows(value):
            expected = f"expected {option.domain}, or lossgate.ANY for all of them"
            raise UsageError(f"{where}: spec {spec.name!r} does not allow {shown(value)}; {expected}")
        if own and spec.with_choice({}, name, value) is None:
            raise UsageError(f"{where}: {value!r} is not valid with any other options: {spec.conflict({name: value})}")


def check_differentiable(spec: Spec, differentiable: Any) -> tuple[str, ...]:
    """Returns the outputs that carry gradients; by default the one that the spec requires."""
    if differentiable is None:
        return spec.outputs[:1]
    names = check_names("differentiable", differentiable, spec.outputs, "output")
    if spec.outputs[0] not in names:
        raise UsageError(
            f"candidate(differentiable={shown(differentiable)}): "
            f"spec {spec.name!r} requires {spec.outputs[0]!r} among them"
        )
    return names


def check_contract(spec: Spec, head: str, tokens: Tokens, contract: Any) -> Contract:
    """Returns the contract, if every metric and gradient that it names exists, and whole sequences
    are returned only by a candidate that is given them.
    """
    own: Contract = check_type(
        "contract", Contract() if contract is None else contract, Contract, "lossgate.Contract(...)"
    )
    if own.whole_sequences and tokens == "shard":
        raise UsageError(
            "candidate(contract=...): logprobs has cp='replicate', which is for whole sequences, and tokens='shard' "
            "gives a rank its own tokens; declare tokens='rows' or tokens='packed', or leave cp out"
        )
    for metric in own.metrics:
        if metric not in spec.metrics:
            raise UsageError(
                f"candidate(contract=...): spec {spec.name!r} has no metric {metric!r}; {nearest(metric, spec.metrics)}"
            )
        _check_one_reduction(spec, metric, own)
    leaves = HEADS[head].leaves
    for leaf in own.grads:
        if leaf not in leaves:
            raise UsageError(
                f"candidate(contract=...): head {head!r} has no gradient of {leaf!r}; {nearest(leaf, leaves)}"
            )
    return own


def _check_one_reduction(spec: Spec, metric: str, contract: Contract) -> None:
    """Checks that a metric's parts are not added over one axis and compared over another."""
    placements = contract.placements(metric_output(metric), spec.metrics[metric].reduction)
    reductions = sorted({placement for placement in placements.values() if placement != "replicate"})
    if len(reductions) > 1 and {"min", "max"} & set(reductions):
        given = ", ".join(f"{axis}={placement!r}" for axis, placement in placements.items())
        raise UsageError(
            f"candidate(contract=...): metric {metric!r} has {given}, which mixes {' and '.join(reductions)}; "
            "name one of them for every axis that does not replicate"
        )
