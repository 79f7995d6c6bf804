# SPDX-License-Identifier: Apache-2.0
"""The options of a spec, and the values that problems draw for them."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

import torch

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


class Between(tuple[float, float]):
    """All numbers from the first to the second."""

    __slots__ = ()


Domain = tuple[Any, ...]
"""Choices; or ``Between(low, high)``."""


def options_of(options_type: type, domains: Mapping[str, Domain]) -> tuple[Option, ...]:
    """Returns one ``Option`` for each field of ``options_type``, in its order.

    Args:
        options_type: the dataclass of the options. Its defaults and the docstrings below its fields
            are used.
        domains: what problems draw for each field.
    """
    meanings, known = dict(field_meanings(options_type)), fields(options_type)
    assert {f.name for f in known} == set(domains), {f.name for f in known} ^ set(domains)
    found: list[Option] = []
    for f in known:
        domain = domains[f.name]
        drawn: dict[str, Any] = {"interval": tuple(domain)} if isinstance(domain, Between) else {"choices": domain}
        found.append(Option(name=f.name, meaning=meanings[f.name], default=f.default, **drawn))
    return tuple(found)


def field_meanings(holder: type) -> Iterator[tuple[str, str]]:
    """Yields each field of a dataclass and the docstring below it, those of base classes too."""
    for base in reversed(holder.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for line, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                assert isinstance(after, ast.Expr), f"{base.__name__}.{line.target.id} has no docstring"
                assert isinstance(after.value, ast.Constant)
                yield line.target.id, " ".join(str(after.value.value).split())
