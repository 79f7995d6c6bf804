# SPDX-License-Identifier: Apache-2.0
"""What a kernel is not given: problems that its caller never has, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.specs.option import Option
from lossgate.specs.spec import Spec

_EXAMPLE = "lossgate.Excluded('extreme', because='the trainer clamps log-ratios')"


@dataclass(frozen=True, init=False)
class Excluded:
    """In ``supports``: choices of a scenario that problems do not have, and why.

    For example::

        supports={"ratios": lossgate.Excluded("extreme", because="the trainer clamps log-ratios")}

    What is excluded is not verified: the verdict, evidence and the gate name it, with the reason.
    The scenarios of a spec are those that ``lossgate list SPEC`` shows. One more is the same for
    every spec: ``"empty"``, with the choices "sequence" and "rank".

    Args:
        choices: those that are left out.
        because: why the kernel is never given them, in one line.

    Raises:
        UsageError: if no choice is given, or no reason.
    """

    choices: tuple[str, ...]
    because: str

    def __init__(self, *choices: str, because: str) -> None:
        shown = f"Excluded({', '.join(map(repr, choices))}{', ' if choices else ''}because={because!r})"
        if not choices or not all(isinstance(choice, str) for choice in choices):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{shown}: expected the choices that are left out, such as {_EXAMPLE}")
        if not isinstance(because, str) or not because.strip() or "\n" in because:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{shown}: expected the reason in one line, such as {_EXAMPLE}")
        object.__setattr__(self, "choices", tuple(dict.fromkeys(choices)))
        object.__setattr__(self, "because", because)


def without_excluded(spec: Spec, supports: Any) -> tuple[Any, dict[str, Excluded]]:
    """Takes apart what ``supports`` says of options and of scenarios.

    Args:
        spec: of the candidate.
        supports: as it was given; anything but a mapping is left as it is.

    Raises:
        UsageError: if a scenario is given anything but ``Excluded``, or an option is; if a choice
            is unknown; or if no choice is left.
    """
    if not isinstance(supports, Mapping):
        return supports, {}
    excluded: dict[str, Excluded] = {}
    for name, given in supports.items():
        where, situation = f"candidate(supports={{{name!r}: {given!r}}})", spec.situations.get(name)
        if situation is not None:
            excluded[name] = _checked(situation, given, where)
        elif isinstance(given, Excluded):
            raise UsageError(
                f"{where}: {name!r} is no scenario of spec {spec.name!r}; {nearest(str(name), spec.situations)}. "
                "Of an option, name the values that are supported"
            )
    return {name: given for name, given in supports.items() if name not in excluded}, excluded


def _checked(situation: Option, given: Any, where: str) -> Excluded:
    known = tuple(dict.fromkeys((*situation.choices, *situation.on_request)))
    if not isinstance(given, Excluded):
        raise UsageError(
            f"{where}: {situation.name!r} is a scenario, of which choices are left out with a reason; write "
            f"lossgate.Excluded(..., because='...') with one of {', '.join(known)}"
        )
    for choice in given.choices:
        if choice not in known:
            raise UsageError(f"{where}: scenario {situation.name!r} has no choice {choice!r}; {nearest(choice, known)}")
    if situation.default in known and set(known) <= set(given.choices):
        raise UsageError(f"{where}: no choice of {situation.name!r} is left; leave one of {', '.join(known)} in")
    return given


def both(a: Mapping[str, Excluded], b: Mapping[str, Excluded]) -> dict[str, Excluded]:
    """Returns what one of two candidates is not given."""
    found = {**a, **b}
    for name in a.keys() & b.keys():
        reasons = dict.fromkeys((a[name].because, b[name].because))
        found[name] = Excluded(*a[name].choices, *b[name].choices, because="; ".join(reasons))
    return found
