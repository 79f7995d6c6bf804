# SPDX-License-Identifier: Apache-2.0
"""The most memory, and the most traffic between ranks, that a kernel may use."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from types import MappingProxyType
from typing import Any

from lossgate.base.argument import arguments
from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES
from lossgate.base.spelling import nearest
from lossgate.declaration.size_expression import FUNCTIONS, SizeExpression

_ALWAYS = ("tokens", "sequences", "dp", "cp", "tp", "itemsize")


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The most that each rank may use in a call, forward and backward.

    Each budget is an expression of named dims, such as ``"chunk*vocab/tp"``. The dims are
    ``tokens`` and ``sequences`` (of the rank, padding included), ``vocab`` (all of it, at heads
    with logits), ``hidden`` (at head "hidden"), ``dp``, ``cp``, ``tp``, ``itemsize`` (bytes of an
    element of the inputs), and what ``where`` names. An expression may have numbers, ``+ - * / //
    %``, comparisons (1 or 0), ``ceil``, ``floor``, ``max`` and ``min``.

    Raises:
        UsageError: if an expression can't be read, or ``where`` is no mapping of sizes.
    """

    largest_tensor: str = ""
    """Elements of the largest tensor that the call makes. A tensor that is no larger than the
    rank's largest input is always allowed, because gradients are as large."""
    peak: str = ""
    """Bytes of all tensors that the call has made and that are alive at the same time. Gradients
    count, but inputs do not."""
    saved: str = ""
    """Bytes that autograd keeps from forward to backward, without inputs and outputs."""
    collectives: str = ""
    """The number of collectives and sends, over groups of more than one rank."""
    bytes: str = ""
    """Bytes that a rank puts into collectives and sends."""
    host_waits: str = ""
    """The number of operations for which the host would wait if their tensors were on a device:
    ``.item()``, ``bool(tensor)``, a boolean index. With "0", property "device" looks for them,
    too."""
    where: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The kernel's own sizes, such as ``{"chunk": 1024}``."""

    def __post_init__(self) -> None:
        given = arguments("Budgets(", vars(self))
        where: Any = self.where
        if not isinstance(where, Mapping) or not all(map(_is_size, where.items())):
            raise given["where"].error("expected positive sizes by name, such as {'chunk': 1024}")
        if taken := [name for name in where if name in (*_ALWAYS, "vocab", "hidden", *FUNCTIONS)]:
            raise given["where"].error(f"{taken[0]!r} has a meaning already; use another name")
        object.__setattr__(self, "where", MappingProxyType(dict(where)))
        for name in BUDGETS:
            given[name].instance(str, "an expression in quotes, such as 'tokens*4'")
        if not list(self._expressions()):
            raise UsageError(f"Budgets(): names no budget; expected at least one of {', '.join(BUDGETS)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _budgets, ({f.name: getattr(self, f.name) for f in fields(self)} | {"where": dict(self.where)},)

    def _expressions(self) -> Iterator[tuple[str, SizeExpression]]:
        """Yields the name and the expression of each declared budget."""
        for name in BUDGETS:
            if text := getattr(self, name):
                try:
                    yield name, SizeExpression(text)
                except UsageError as error:
                    raise UsageError(f"Budgets({name}=...): {error}") from None

    def check_names(self, dims: tuple[str, ...]) -> None:
        """Checks that each expression names only dims that exist, and has a value on every layout.

        Args:
            dims: the dims of the head, of "vocab" and "hidden".

        Raises:
            UsageError: if a dim is unknown, with the nearest spelling; or if there is no value.
        """
        known = (*_ALWAYS, *dims, *self.where)
        for budget, expression in self._expressions():
            for name in expression.names:
                if name not in known:
                    raise UsageError(
                        f"candidate(budgets=Budgets({budget}={str(expression)!r})): unknown dim {name!r}; "
                        f"{nearest(name, known)}; sizes of the kernel's own go into where="
                    )
        for ranks in product((1.0, 2.0), repeat=len(AXES)):  # an expression may divide by tp - 1
            sizes = dict.fromkeys((*_ALWAYS, *dims), 1024.0)
            self.values({**sizes, **dict(zip(AXES, ranks, strict=True))})

    def names(self, budget: str) -> tuple[str, ...]:
        """Returns the dims that a declared budget names."""
        return SizeExpression(getattr(self, budget)).names

    def values(self, sizes: Mapping[str, float]) -> dict[str, float]:
        """Returns the declared budgets as numbers, by name.

        Args:
            sizes: by dim, on the rank that has most.

        Raises:
            UsageError: if a budget has no value for these sizes.
        """
        known = {**sizes, **self.where}
        found: dict[str, float] = {}
        for name, expression in self._expressions():
            try:
                found[name] = expression.value(known)
            except UsageError as error:
                raise UsageError(f"Budgets({name}=...): {error}") from None
        return found

    @property
    def allows_no_wait(self) -> bool:
        """Whether the host may not wait for a device, whatever the sizes."""
        if not self.host_waits:
            return False
        waits = SizeExpression(self.host_waits)
        return not waits.names and waits.value({}) == 0


BUDGETS = tuple(f.name for f in fields(Budgets) if f.name != "where")


def _is_size(item: tuple[Any, Any]) -> bool:
    name, size = item
    return isinstance(name, str) and name.isidentifier() and type(size) is int and size > 0


def _budgets(values: dict[str, Any]) -> Budgets:
    return Budgets(**values)
