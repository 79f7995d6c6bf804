# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of ``lossgate.candidate``, and whether they fit the spec.

They are checked where a candidate is declared, so that a slip is reported there and not after
minutes of work.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lossgate.base.argument import Argument, Arguments
from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES, Axis
from lossgate.base.names import DTYPES, named, nearest_dtype
from lossgate.base.spelling import shown
from lossgate.declaration.budgets import Budgets
from lossgate.declaration.contract import Contract
from lossgate.declaration.conventions import Conventions
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import supported_and_excluded
from lossgate.losses import check_own_name, find_spec
from lossgate.problems.whole_sequences import TOKENS
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import metric_output
from lossgate.specs.spec import Spec

REFUSED = ("labels", "shapes")
"""The kinds of bad input that a candidate may refuse."""
_TILED_DIMS = ("token", "vocab", "hidden")
_LONGEST_NAME = 100
_NOT_IN_NAMES = ":/\\[]*?\"'`$"
"""Characters that would do harm: names are parts of paths, ids of pytest, patterns of policies, and
command lines."""


def declared(given: Arguments) -> dict[str, Any]:
    """Returns the fields of a ``Candidate``, by name, without those of the kernel and the known
    failure.

    Raises:
        UsageError: if the declaration contradicts itself or the spec.
    """
    spec, dtypes = check_spec(given["spec"]), _dtypes(given["dtypes"])
    head: str = given["head"].one_of(spec.inputs, f"spec {spec.name!r} has no such head")
    supports, excludes = supported_and_excluded(spec, given["supports"])
    return {
        "spec": spec,
        "head": head,
        "tokens": given["tokens"].one_of(TOKENS),
        "axes": check_axes(given["axes"]),
        "dtypes": dtypes,
        "precision": MappingProxyType(_precision(spec, dtypes, given["precision"])),
        "contract": _contract(spec, head, given),
        "supports": MappingProxyType(supports),
        "excludes": MappingProxyType(excludes),
        "differentiable": _differentiable(spec, given["differentiable"]),
        "tiles": MappingProxyType(_tiles(given["tiles"])),
        "good_for": _good_for(given["good_for"]),
        "conventions": _conventions(spec, given),
        "exempt": MappingProxyType(_exempt(given["exempt"])),
        "refuses": _refuses(head, given["refuses"]),
        "budgets": _budgets(head, given["budgets"]),
        "name": _name(given["name"]),
    }


def check_spec(argument: Argument) -> Spec:
    """Returns the spec, which may be given by its name."""
    if isinstance(argument.value, Spec):
        check_own_name(argument.value)
        return argument.value
    return find_spec(argument.instance(str, "the name of a loss or a Spec; 'lossgate list' describes them"))


def check_axes(argument: Argument) -> tuple[Axis, ...]:
    return argument.names(AXES, "unknown mesh axis")


def _dtypes(argument: Argument) -> tuple[str, ...]:
    given = argument.value
    if not isinstance(given, str) and isinstance(named(given), str):  # a dtype of torch alone
        given = (given,)
    if isinstance(given, tuple | list):
        given = type(given)(map(named, given))
    return Argument(argument.call, argument.name, given).names(DTYPES, "unknown dtype", near=nearest_dtype, needed=True)


def _differentiable(spec: Spec, argument: Argument) -> tuple[str, ...]:
    """Returns the outputs that carry gradients; by default the output that the spec requires."""
    if argument.value is None:
        return spec.outputs[:1]
    names = argument.names(spec.outputs, "unknown output")
    if spec.outputs[0] not in names:
        raise argument.error(f"spec {spec.name!r} requires {spec.outputs[0]!r} among them")
    return names


def _good_for(argument: Argument) -> str:
    if not argument.instance(str, "a string").isprintable():
        raise argument.error("expected a single line, for the verdict table")
    return argument.value


def _conventions(spec: Spec, given: Arguments) -> Conventions:
    argument = given["conventions"]
    own: Conventions | None = argument.instance(Conventions | None, "lossgate.Conventions(...)")
    if own is None:
        return Conventions()
    others = [name for name in _differentiable(spec, given["differentiable"]) if name != "loss"]
    if own.counts == "own" and others:
        raise argument.error(
            f"counts='own' weighs the loss of each call, but {others[0]} has gradients, too, which no count divides; "
            "leave counts out, or declare two candidates"
        )
    return own


def _exempt(argument: Argument) -> dict[str, str]:
    """Returns the reasons for which the candidate is exempt from properties, by property.

    Whether a property exists is checked when a run is planned, because files of candidates may
    register properties.
    """
    example = "exempt={'strided-inputs': 'the trainer gives contiguous tensors'}"
    reasons = argument.mapping(example)
    for name, reason in argument.items():
        if name == "agreement":
            raise argument.error(
                "nothing is exempt from agreement; declare known_failure= for a disagreement that is known"
            )
        if not isinstance(name, str):
            raise reason.error(f"expected the name of a property, as in {example}")
        reason.line(f"the reason in one line, such as {example}")
    return reasons


def _refuses(head: str, argument: Argument) -> tuple[str, ...]:
    kinds = argument.names(REFUSED, "unknown kind of bad input")
    if kinds and not HEADS[head].has_logits:
        raise argument.error(
            f"a kernel that starts from {head} needs no labels or ids, so it has no bad ones to refuse; remove refuses="
        )
    return kinds


def _budgets(head: str, argument: Argument) -> Budgets | None:
    """Returns the budgets, and checks that their dims are those of the head."""
    budgets: Budgets | None = argument.instance(Budgets | None, "lossgate.Budgets(...)")
    if budgets is not None:
        of_head = {dim for dims in HEADS[head].leaves.values() for dim in dims}
        budgets.check_names(tuple(dim for dim in ("vocab", "hidden") if dim in of_head))
    return budgets


def _tiles(argument: Argument) -> dict[str, tuple[int, ...]]:
    """Returns the tile sizes by dim."""
    checked: dict[str, tuple[int, ...]] = {}
    argument.mapping("tiles={'vocab': 128}", _TILED_DIMS, "unknown dim")
    for dim, size in argument.items():
        sizes: tuple[Any, ...] = tuple(size.value) if isinstance(size.value, tuple | list) else (size.value,)
        if not sizes or not all(type(s) is int and s > 0 for s in sizes):
            raise size.error("expected a positive number of rows, or a tuple of them")
        checked[dim] = sizes
    return checked


# Precision and contract


def _precision(spec: Spec, dtypes: tuple[str, ...], argument: Argument) -> dict[str, Precision]:
    """Returns the precision for each dtype."""
    if isinstance(argument.value, Mapping):
        argument = Argument(argument.call, argument.name, {named(key): own for key, own in argument.value.items()})
        found = argument.mapping("", dtypes, f"dtypes={dtypes!r} has no")
        for _, one in argument.items():
            one.instance(Precision, "lossgate.Precision(...)")
        if missing := [dtype for dtype in dtypes if dtype not in found]:
            raise argument.error(
                f"no Precision for dtype {missing[0]!r}; give one for each of {', '.join(dtypes)}, or one for all"
            )
    else:
        expected = "lossgate.Precision(...), or a mapping with one for each dtype"
        found = dict.fromkeys(dtypes, argument.instance(Precision | None, expected) or Precision())
    for one in found.values():
        one.check_names((*spec.outputs, *spec.metrics))
    return found


def _contract(spec: Spec, head: str, given: Arguments) -> Contract:
    """Returns the contract, and checks it. Each metric and gradient that it names must exist, and a
    candidate that returns whole sequences must be given whole sequences.
    """
    own: Contract = given["contract"].instance(Contract | None, "lossgate.Contract(...)") or Contract()
    if own.whole_sequences and given["tokens"].value == "shard":
        raise given["contract"].error(
            "logprobs has cp='replicate', which is for whole sequences, but tokens='shard' gives a rank its own "
            "tokens; declare tokens='rows' or tokens='packed', or leave cp out"
        )
    metrics = Argument("Contract(", "metrics", own.metrics)
    grads = Argument("Contract(", "grads", own.grads)
    metrics.mapping("", spec.metrics, f"spec {spec.name!r} has no metric")
    grads.mapping("", HEADS[head].leaves, f"head {head!r} has no gradient of")
    for name, metric in metrics.items():
        _check_one_reduction(spec, name, own, metric)
    return own


def _check_one_reduction(spec: Spec, metric: str, contract: Contract, argument: Argument) -> None:
    """Checks that a metric whose minimum or maximum is taken over one axis has no other reduction
    over another axis.
    """
    placements = contract.placements(metric_output(metric), spec.metrics[metric].reduction)
    reductions = sorted({placement for placement in placements.values() if placement != "replicate"})
    if len(reductions) > 1 and {"min", "max"} & set(reductions):
        given = ", ".join(f"{axis}={placement!r}" for axis, placement in placements.items())
        raise argument.error(
            f"the metric has {given}, which mixes {' and '.join(reductions)}; name one of them for every axis that "
            "does not replicate"
        )


# Names


def name_of(kernel: Any, name: str | None) -> str:
    """Returns the candidate's name: the one that was given, or the kernel's own."""
    if not callable(kernel):
        raise UsageError(f"candidate(...) decorates {shown(kernel)}; expected a function of inputs, options and mesh")
    own = name if name is not None else getattr(kernel, "__name__", None)
    if own is None or own == "<lambda>":
        kind = type(kernel).__name__ if own is None else "lambda"
        raise UsageError(f"candidate(...) decorates a {kind}, which has no name; give it one: candidate(name=...)")
    _name(Argument("candidate(", "name", own))
    return own


def _name(argument: Argument) -> str | None:
    """Returns the name; None if the candidate takes that of its function."""
    name: str | None = argument.instance(str | None, "a string, such as name='my_kernel'")
    if name is not None and (problem := _problem_of_name(name)):
        raise argument.error(
            f"{problem}; expected up to {_LONGEST_NAME} characters that are none of {' '.join(_NOT_IN_NAMES)}; "
            f"write name={_mended(name)!r}"
        )
    return name


def _problem_of_name(name: str) -> str:
    """Describes what is wrong with a name; "" if nothing is."""
    if not name.strip():
        return "it names nothing"
    if len(name) > _LONGEST_NAME:
        return f"it has {len(name)} characters"
    if name != name.strip():
        return "it begins or ends with a blank"
    for letter in name:
        if letter in _NOT_IN_NAMES or not letter.isprintable():
            return f"it has {letter!r}"
    return ""


def _mended(name: str) -> str:
    """Returns the nearest name that is allowed."""
    letters = (letter if letter.isprintable() and letter not in _NOT_IN_NAMES else "_" for letter in name.strip())
    return "".join(letters)[:_LONGEST_NAME].strip() or "my_kernel"
