# SPDX-License-Identifier: Apache-2.0
"""The values that ``supports`` may have: those of options, and the excluded choices of
scenarios."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lossgate.base.argument import Argument, is_line
from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest, shown
from lossgate.specs.option import Option
from lossgate.specs.spec import Spec


class AnyValue:
    """The type of ``ANY``, which stands in ``supports`` for every value that the spec allows."""

    def __repr__(self) -> str:
        return "lossgate.ANY"

    def __reduce__(self) -> str:
        return "ANY"  # it stays the same object in another process


ANY: Final = AnyValue()
"""In ``supports``: every value that the spec allows."""


_EXAMPLE = "lossgate.Excluded('extreme', because='the trainer clamps log-ratios')"


@dataclass(frozen=True, init=False)
class Excluded:
    """In ``supports``: choices of a scenario that are left out, and why.

    For example::

        supports={"ratios": lossgate.Excluded("extreme", because="the trainer clamps log-ratios")}

    Excluded choices are not verified. The verdict, evidence and the gate name them, with the
    reason. ``lossgate list SPEC`` shows the scenarios of a spec. Every spec also has the scenario
    ``"empty"``, with the choices "sequence" and "rank".

    Args:
        choices: the choices that are left out.
        because: why, such as that the kernel is never given them, in one line.

    Raises:
        UsageError: if no choice is given, or no reason.
    """

    choices: tuple[str, ...]
    because: str

    def __init__(self, *choices: str, because: str) -> None:
        call = f"Excluded({', '.join([*map(repr, choices), f'because={because!r}'])})"
        if not choices or not all(isinstance(choice, str) for choice in choices):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{call}: expected the choices that are left out, such as {_EXAMPLE}")
        if not is_line(because):
            raise UsageError(f"{call}: expected the reason in one line, such as {_EXAMPLE}")
        object.__setattr__(self, "choices", tuple(dict.fromkeys(choices)))
        object.__setattr__(self, "because", because)


def supported_and_excluded(spec: Spec, supports: Argument) -> tuple[dict[str, Any], dict[str, Excluded]]:
    """Returns the supported values of options, and the excluded choices of scenarios, by name.

    Args:
        spec: of the candidate.
        supports: the argument.

    Raises:
        UsageError: if an option, its value, a scenario or its choice is unknown; if an option is
            given ``Excluded`` or a scenario anything else; or if no choice of a scenario is left.
    """
    supports.mapping("supports={'temperature': lossgate.ANY}")
    options, excluded = dict[str, Any](), dict[str, Excluded]()
    for name, given in supports.items():
        if name in spec.situations:
            excluded[name] = _excluded(spec.situations[name], given)
        elif isinstance(given.value, Excluded):
            raise given.error(
                f"{name!r} is no scenario of spec {spec.name!r}; {nearest(name, spec.situations)}. "
                "For an option, name the supported values"
            )
        else:
            given.known(name, spec.supported_options, f"spec {spec.name!r} has no option")
            options[name] = _supported(spec, name, given)
    return options, excluded


def _excluded(situation: Option, given: Argument) -> Excluded:
    known = tuple(dict.fromkeys((*situation.choices, *situation.on_request)))
    excluded: Excluded = given.instance(
        Excluded,
        f"lossgate.Excluded(..., because='...') with one of {', '.join(known)}, because it is a scenario",
    )
    for choice in excluded.choices:
        given.known(choice, known, "the scenario has no choice")
        left = [one for one in dict.fromkeys(situation.choices) if one not in excluded.choices]
        if choice in situation.on_request and left:
            raise given.error(
                f"it leaves out nothing: problems have {choice!r} only if {', '.join(left)} is left out; name that, too"
            )
    # The default of scenario "empty" is none of its choices, and is left if all of these are
    # excluded.
    if situation.default in known and set(known) <= set(excluded.choices):
        raise given.error(f"no choice is left; keep one of {', '.join(known)}")
    return excluded


def _supported(spec: Spec, name: str, given: Argument) -> Any:
    """Returns the values of an option: ``ANY``, one, or a tuple of them."""
    option, values = spec.supported_options[name], given.value
    if isinstance(values, set | frozenset) and values:
        ordered = tuple(sorted(values, key=repr))
        raise given.error(f"a set has no order; write supports={{{name!r}: {shown(ordered)}}}")
    values = tuple(values) if isinstance(values, list) else values
    if values is ANY:
        return ANY
    if values == ():
        raise given.error(f"it supports no value; expected ANY, a value or a tuple of values: {option.domain}")
    own = name in {o.name for o in spec.options}
    several = values if isinstance(values, tuple) else (values,)
    for value in several:
        if not option.allows(value):
            expected = f"expected {option.domain}, or lossgate.ANY for all of them"
            raise given.error(f"spec {spec.name!r} does not allow {shown(value)}; {expected}")
        if own and spec.with_choice({}, name, value) is None:
            raise given.error(f"{value!r} is not valid with any other options: {spec.conflict({name: value})}")
    return _as_floats(option, values)


def _as_floats(option: Option, values: Any) -> Any:
    """Returns the values of an option. If the option takes floats, 2 becomes 2.0, so that both draw
    the same problems.
    """
    if isinstance(values, tuple):
        return tuple(_as_floats(option, value) for value in values)
    takes_floats = option.interval is not None or any(isinstance(choice, float) for choice in option.choices)
    is_whole = isinstance(values, int) and not isinstance(values, bool)
    return float(values) if takes_floats and is_whole else values


def both(a: Mapping[str, Excluded], b: Mapping[str, Excluded]) -> dict[str, Excluded]:
    """Returns the choices that either of two candidates excludes, by scenario, with all reasons."""
    found = {**a, **b}
    for name in a.keys() & b.keys():
        reasons = dict.fromkeys((a[name].because, b[name].because))
        found[name] = Excluded(*a[name].choices, *b[name].choices, because="; ".join(reasons))
    return found
