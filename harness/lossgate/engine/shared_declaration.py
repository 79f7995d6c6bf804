# SPDX-License-Identifier: Apache-2.0
"""What two candidates both declare, so that the same problems suit both."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY, both


def able_alike(a: Any, b: Any) -> tuple[Candidate, Candidate]:
    """Returns the two candidates, declared for what both can do.

    Args:
        a, b: what ``compare`` was given as ``kernel_a`` and ``kernel_b``.

    Raises:
        UsageError: if no problem suits both.
    """
    for argument, given in (("kernel_a", a), ("kernel_b", b)):
        if not isinstance(given, Candidate):
            raise UsageError(
                f"compare({argument}={shown(given)}): expected a candidate; "
                "decorate the kernel with @lossgate.candidate(...)"
            )
    for what, way_out in (("spec", "compare kernels of one spec"), ("head", "let both start at the same head")):
        own, others = (c.spec.name if what == "spec" else c.head for c in (a, b))
        if own != others:
            raise UsageError(f"compare: {a.name!r} has {what} {own!r}, and {b.name!r} has {others!r}; {way_out}")
    if a.spec is not b.spec:  # as in a notebook, where one of two cells was run again
        raise UsageError(
            f"compare: {a.name!r} and {b.name!r} are of two specs that are both named {a.spec.name!r}; "
            "make both kernels after the spec, or give the two specs two names"
        )
    dtypes = tuple(dtype for dtype in a.dtypes if dtype in b.dtypes)
    if not dtypes:
        raise UsageError(
            f"compare: {a.name!r} takes {', '.join(a.dtypes)}, and {b.name!r} {', '.join(b.dtypes)}; "
            "declare a dtype that both take"
        )
    shared: dict[str, Any] = {
        "axes": tuple(axis for axis in a.axes if axis in b.axes),
        "dtypes": dtypes,
        "supports": MappingProxyType({name: _supported(name, a, b) for name in {**a.supports, **b.supports}}),
        "excludes": MappingProxyType(both(a.excludes, b.excludes)),
        "tiles": MappingProxyType(
            {dim: tuple(sorted({*a.tiles.get(dim, ()), *b.tiles.get(dim, ())})) for dim in {**a.tiles, **b.tiles}}
        ),
        "differentiable": tuple(name for name in a.differentiable if name in b.differentiable),
        "known_failure": None,
    }
    return replace(a, **shared, beside=b), replace(b, **shared, beside=a)


def _supported(option: str, a: Candidate, b: Candidate) -> Any:
    """Returns the values of an option that both candidates support."""
    own, others = a.supported(option), b.supported(option)
    if own is ANY or others is ANY:
        return others if own is ANY else own
    allowed = [(type(value), value) for value in others]
    if both := tuple(value for value in own if (type(value), value) in allowed):
        return both
    raise UsageError(
        f"compare: {a.name!r} supports {option}={own!r}, and {b.name!r} {others!r}; "
        "declare a value that both support, or no problem suits both"
    )
