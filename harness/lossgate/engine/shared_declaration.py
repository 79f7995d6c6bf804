# SPDX-License-Identifier: Apache-2.0
"""Reduces the declarations of two candidates to what both declare, so that the same problems suit
both.
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY, both


def able_alike(a: Any, b: Any) -> tuple[Candidate, Candidate]:
    """Returns the two candidates with declarations that are reduced to what both declare.

    Args:
        a, b: the arguments ``kernel_a`` and ``kernel_b`` of ``compare``.

    Raises:
        UsageError: if no problem suits both.
    """
    for argument, given in (("kernel_a", a), ("kernel_b", b)):
        if not isinstance(given, Candidate):
            raise UsageError(
                f"compare({argument}={shown(given)}): expected a candidate; "
                "decorate the kernel with @lossgate.candidate(...)"
            )
    _check_same_task(a, b)
    dtypes = tuple(dtype for dtype in a.dtypes if dtype in b.dtypes)
    if not dtypes:
        raise UsageError(
            f"compare: {a.name!r} takes {', '.join(a.dtypes)}, but {b.name!r} takes {', '.join(b.dtypes)}; "
            "declare a dtype that both take"
        )
    supports = {name: _supported(name, a, b) for name in {**a.supports, **b.supports}}
    tiles = {dim: tuple(sorted({*a.tiles.get(dim, ()), *b.tiles.get(dim, ())})) for dim in {**a.tiles, **b.tiles}}
    shared: dict[str, Any] = {
        "axes": tuple(axis for axis in a.axes if axis in b.axes),
        "dtypes": dtypes,
        "supports": MappingProxyType(supports),
        "excludes": MappingProxyType(both(a.excludes, b.excludes)),
        "tiles": MappingProxyType(tiles),
        "differentiable": tuple(name for name in a.differentiable if name in b.differentiable),
        "known_failure": None,
    }
    return replace(a, **shared, beside=b), replace(b, **shared, beside=a)


def _check_same_task(a: Candidate, b: Candidate) -> None:
    """Refuses candidates of different specs or heads."""
    if a.spec.name != b.spec.name:
        raise UsageError(
            f"compare: {a.name!r} has spec {a.spec.name!r}, and {b.name!r} has {b.spec.name!r}; "
            "compare kernels of one spec"
        )
    if a.head != b.head:
        raise UsageError(
            f"compare: {a.name!r} has head {a.head!r}, and {b.name!r} has {b.head!r}; let both start at the same head"
        )
    if a.spec is not b.spec:  # in a notebook, one of two cells may have been run again
        raise UsageError(
            f"compare: {a.name!r} and {b.name!r} have two different specs, both named {a.spec.name!r}; make the spec "
            "once and declare both kernels with it, or rename one of the specs"
        )


def _supported(option: str, a: Candidate, b: Candidate) -> Any:
    """Returns the values of an option that both candidates support."""
    own, others = a.supported(option), b.supported(option)
    if own is ANY:
        return others
    if others is ANY:
        return own
    allowed = [(type(value), value) for value in others]
    if both := tuple(value for value in own if (type(value), value) in allowed):
        return both
    raise UsageError(
        f"compare: {a.name!r} supports {option}={own!r}, but {b.name!r} supports {others!r}; "
        "declare a value that both support, so that a problem suits both"
    )
