# SPDX-License-Identifier: Apache-2.0
"""The options of a spec, from the dataclass that holds them: defaults and meanings are there, what problems may draw is added."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from lossgate.specs.spec import Option

TEMPERATURE = (0.3, 3.0)

Domain = tuple[Any, ...]
"""Choices; or ``Between(low, high)``."""


class Between(tuple[float, float]):
    """All numbers from the first to the second."""

    __slots__ = ()


def options_of(options_type: type, domains: Mapping[str, Domain]) -> tuple[Option, ...]:
    """One ``Option`` for each field of ``options_type``, in its order."""
    meanings, known = dict(field_meanings(options_type)), fields(options_type)
    assert {f.name for f in known} == set(domains), {f.name for f in known} ^ set(domains)
    found: list[Option] = []
    for f in known:
        domain = domains[f.name]
        spread: dict[str, Any] = {"interval": tuple(domain)} if isinstance(domain, Between) else {"choices": domain}
        found.append(Option(name=f.name, meaning=meanings[f.name], default=f.default, **spread))
    return tuple(found)


def field_meanings(holder: type) -> Iterator[tuple[str, str]]:
    """The docstring below each field, its white space in order; those of base classes too."""
    for base in reversed(holder.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for line, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                assert isinstance(after, ast.Expr), f"{base.__name__}.{line.target.id} says nothing of its meaning"
                assert isinstance(after.value, ast.Constant)
                yield line.target.id, " ".join(str(after.value.value).split())
