# SPDX-License-Identifier: Apache-2.0
"""What a kernel may use at most: memory, and traffic between ranks."""

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
    """What each rank may use in a call, forward and backward.

    Each is an expression of named dims, such as ``"chunk*vocab/tp"``. The dims are ``tokens`` and
    ``sequences`` (of the rank, padding included), ``vocab`` (all of it, at heads with logits),
    ``hidden`` (at head "hidden"), ``dp``, ``cp``, ``tp``, ``itemsize`` (bytes of an element of the
    inputs), and what ``where`` names. An expression may have numbers, ``+ - * / // %``,
    comparisons (1 or 0), ``ceil``, ``floor``, ``max`` and ``min``.

    Raises:
        UsageError: if an expression can't be read, or ``where`` is no mapping of sizes.
    """

    largest_tensor: str = ""
    """Elements of the largest tensor that is made. A tensor that is no larger than the rank's
    largest input is always allowed: gradients are as large."""
    peak: str = ""
    """Bytes that live at the same time: all that is made, gradients among it, and no inputs."""
    saved: str = ""
    """Bytes that live from forward to backward, beside inputs and outputs: what autograd keeps."""
    collectives: str = ""
    """Collectives and sends, over groups of more than one rank."""
    bytes: str = ""
    """Bytes that a rank brings to them."""
    host_waits: str = ""
    """Operations for which the host would wait for a device, if their tensors were there:
    ``.item()``, ``bool(tensor)``, a boolean index. With "0", property "device" looks for them,
    too."""
    where: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Sizes of the kernel's own, such as ``{"chunk": 1024}``."""

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
        if not [*self._expressions()]:
            raise UsageError(f"Budgets(): names no budget; expected one at least of {', '.join(BUDGETS)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _budgets, ({f.name: getattr(self, f.name) for f in fields(self)} | {"where": dict(self.where)},)

    def _expressions(self) -> Iterator[tuple[str, SizeExpression]]:
        for name in BUDGETS:
            if text := getattr(self, name):
                try:
                    yield name, SizeExpression(text)
                except UsageError as error:
                    raise UsageError(f"Budgets({name}=...): {error}") from None

    def check_names(self, dims: tuple[str, ...]) -> None:
        """Checks that each expression names dims of the head.

        Args:
            dims: "vocab" and "hidden", or those of them that the head has.

        Raises:
            UsageError: if it names another; the message gives the nearest spelling.
        """
        known = (*_ALWAYS, *dims, *self.where)
        for budget, expression in self._expressions():
            for name in expression.names:
                if name not in known:
                    raise UsageError(
                        f"candidate(budgets=Budgets({budget}={str(expression)!r})): unknown dim {name!r}; "
                        f"{nearest(name, known)}; sizes of the kernel's own go into where="
                    )
        for ranks in product((1.0, 2.0), repeat=len(AXES)):  # raises where one has no value
            sizes = dict.fromkeys((*_ALWAYS, *dims), 1024.0)
            self.values({**sizes, **dict(zip(AXES, ranks, strict=True))})

    def names(self, budget: str) -> tuple[str, ...]:
        """Returns the dims that a declared budget names."""
        return SizeExpression(getattr(self, budget)).names

    def values(self, sizes: Mapping[str, float]) -> dict[str, float]:
        """Returns the declared budgets as numbers, by name.

        Args:
            sizes: of the dims, on the rank that has most.

        Raises:
            UsageError: if one is no number there.
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
