# SPDX-License-Identifier: Apache-2.0
"""A loss as named terms over named normalisers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lossgate.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of a loss: the sum of ``values``, divided by a normaliser."""

    values: Tensor
    """``[tokens]`` or ``[sequences]``; 0 where nothing counts. Its sum is the term before the
    normaliser."""
    over: str | None = None
    """The name of the normaliser that divides the sum; None for a plain sum."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a reference may return in place of the loss: the terms that it is the sum of.

    Nothing reads the terms yet but their sum.
    """

    terms: Mapping[str, Term]
    normalisers: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars that divide, of the whole batch."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor:
        """The sum of all terms.

        Raises:
            UsageError: if there is no term, one is no ``Term``, or names a normaliser that is not
                there.
        """
        if not self.terms:
            raise UsageError("Terms(terms={}): expected at least one term")
        return torch.stack([self._total(name, term) for name, term in self.terms.items()]).sum()

    def _total(self, name: str, term: Term) -> Tensor:
        if not isinstance(term, Term):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"term {name!r} is a {type(term).__name__}; expected lossgate.Term(values=..., over='a normaliser')"
            )
        total = term.values.sum()
        if term.over is None:
            return total
        if term.over not in self.normalisers:
            known = ", ".join(map(repr, self.normalisers)) or "none"
            raise UsageError(f"term {name!r} is over {term.over!r}, which is no normaliser; there are: {known}")
        return total / self.normalisers[term.over]
