# SPDX-License-Identifier: Apache-2.0
"""A loss as named terms over named normalisers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lossgate.base.argument import arguments
from lossgate.base.errors import UsageError
from lossgate.specs.users_code import described


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of a loss: the sum of ``values``, divided by a normaliser.

    Args:
        values: ``[tokens]`` or ``[sequences]``; 0 where nothing counts.
        over: the name of the normaliser that divides the sum; None for a plain sum.
    """

    values: Tensor
    over: str | None = None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The loss as a sum of terms. A reference may return this instead of the loss.

    Args:
        terms: a ``Term`` for each name.
        normalisers: the divisors of terms, by name: scalars that count the whole batch.
        metrics: scalars, by name.

    So far lossgate uses only the sum of the terms.
    """

    terms: Mapping[str, Term]
    normalisers: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that terms and normalisers fit.

        Raises:
            UsageError: if there is no term; if a term is no ``Term``, or its normaliser is missing;
                or if a normaliser is no scalar, or divides nothing.
        """
        for given in arguments("Terms(", vars(self)).values():
            given.instance(Mapping, "a dict")
        if not self.terms:
            raise UsageError("Terms(terms={}): expected at least one term")
        for name, term in self.terms.items():
            self._check(name, term)
        for name, normaliser in self.normalisers.items():
            if not isinstance(normaliser, Tensor) or normaliser.dim():  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"normaliser {name!r} is {described(normaliser)}; expected a scalar tensor")
            if all(term.over != name for term in self.terms.values()):
                raise UsageError(f"normaliser {name!r} divides no term; write Term(..., over={name!r}), or drop it")

    def _check(self, name: str, term: Any) -> None:
        if not isinstance(term, Term):
            raise UsageError(
                f"term {name!r} is {described(term)}; expected lossgate.Term(values=..., over='a normaliser')"
            )
        if not isinstance(term.values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"term {name!r} has values={term.values!r}; expected a tensor")
        if term.over is not None and term.over not in self.normalisers:
            known = ", ".join(map(repr, self.normalisers)) or "none"
            raise UsageError(
                f"term {name!r} has over={term.over!r}, which normalisers= does not name; it names {known}"
            )

    @property
    def loss(self) -> Tensor:
        """The sum of all terms."""
        return torch.stack([self._total(term) for term in self.terms.values()]).sum()

    def _total(self, term: Term) -> Tensor:
        total = term.values.sum()
        return total if term.over is None else total / self.normalisers[term.over]
