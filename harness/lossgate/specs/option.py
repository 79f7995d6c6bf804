# SPDX-License-Identifier: Apache-2.0
"""The options of a spec, and the values that problems draw for them."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from math import isfinite
from typing import Any

import torch

from lossgate.errors import UsageError
from lossgate.specs.record import Between
from lossgate.spelling import nearest

TEMPERATURE = (0.3, 3.0)
SOFTCAPS = (None, 2.0, 30.0)
"""What problems draw: 30 is that of Gemma 2, and 2 bends logits that are as small as theirs."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a spec.

    A kernel may support numbers that ``choices`` does not list, if one of the choices is a float.
    """

    name: str
    meaning: str
    default: Any
    choices: tuple[Any, ...] = ()
    """The values that problems draw, if there is no interval."""
    interval: tuple[float, float] | None = None
    """Problems draw numbers between these two."""

    def allows(self, value: Any) -> bool:
        """Returns whether a candidate may support this value."""
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if self.interval:
            return number and self.interval[0] <= value <= self.interval[1]
        if number and any(isinstance(choice, float) for choice in self.choices):
            return True
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    @property
    def drawn(self) -> tuple[Any, ...]:
        """The values that problems draw.

        Of an interval these are the default and tenths that bfloat16 holds exactly, so that
        rounding the option itself is no error.
        """
        if self.interval is None:
            return self.choices
        low, high = self.interval
        tenths = range(round(10 * low), round(10 * high) + 1)
        exact = [float(torch.tensor(n / 10, dtype=torch.bfloat16)) for n in tenths]
        return tuple(sorted({self.default, *(min(max(x, low), high) for x in exact)}))

    @property
    def domain(self) -> str:
        """The allowed values, for people."""
        if self.interval:
            return f"{self.interval[0]:g} to {self.interval[1]:g}"
        return " | ".join(map(str, dict.fromkeys(self.choices)))


Domain = tuple[Any, ...]
"""Choices; or ``Between(low, high)``."""


def options_of(options_type: type, domains: Mapping[str, Domain]) -> tuple[Option, ...]:
    """Returns one ``Option`` for each field of ``options_type``, in its order.

    Args:
        options_type: the dataclass of the options. Each field's metadata holds its ``meaning``, and
            may hold its ``domain``.
        domains: what problems draw for each field, where the class does not say it or says
            otherwise.

    Raises:
        UsageError: if a field has no default, meaning or domain, or ``domains`` names another one.
    """
    known = {f.name: f for f in fields(options_type)}
    for name in domains:
        if name not in known:
            raise UsageError(
                f"choices={{{name!r}: ...}}: {options_type.__name__} has no option {name!r}; {nearest(name, known)}"
            )
    return tuple(_option(f, options_type, domains.get(name, f.metadata.get("domain"))) for name, f in known.items())


def _option(f: Field[Any], options_type: type, domain: Domain | None) -> Option:
    where = f"{options_type.__name__}.{f.name}"
    if f.default is MISSING:
        raise UsageError(f"{where} has no default; give it one: {f.name} = lossgate.option(default, meaning, ...)")
    if "meaning" not in f.metadata:
        raise UsageError(
            f"{where} does not say what it means; write {f.name} = lossgate.option({f.default!r}, meaning, ...)"
        )
    if not domain and isinstance(f.default, bool):
        domain = (f.default, not f.default)
    if not domain:
        raise UsageError(
            f"{where} does not say which values problems draw; "
            f"write lossgate.option({f.default!r}, ..., choices=(...)) or, for numbers, between=(low, high)"
        )
    drawn: dict[str, Any] = {"interval": tuple(domain)} if isinstance(domain, Between) else {"choices": tuple(domain)}
    return Option(name=f.name, meaning=f.metadata["meaning"], default=f.default, **drawn)
