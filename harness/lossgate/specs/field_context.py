# SPDX-License-Identifier: Apache-2.0
"""The problem as the ``draw=`` functions of a spec are given it, and checks of what they return."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Dims
from lossgate.problems.random_streams import RandomStreams


@dataclass(frozen=True, kw_only=True)
class FieldContext:
    """The problem for which a spec draws its own fields.

    T is the number of tokens of all sequences, laid end to end without padding. S is the number of
    sequences. Padding is added later, for each layout. The same problem always draws the same
    numbers.
    """

    batch: GlobalBatch
    options: Any
    """The options of the problem, an object of the spec's option class."""
    streams: RandomStreams
    """Named streams of numbers: ``streams.normal("name", 3, 4)``, ``streams.uniform("name", 3)`` in
    [0, 1), ``streams.integers("name", below, 3)``. One name always gives the same numbers."""
    scenario: Mapping[str, str]
    """The choice of each of ``Spec.scenarios``."""
    policy: Callable[[], tuple[Tensor, Tensor]]
    """A function that computes ``logprobs`` and ``unfiltered``, once for the problem."""
    untempered: Callable[[], Tensor]
    """A function that computes the reference's logits ``[T, vocab]``."""
    field: str = ""
    """The name of the field that is being drawn, if its own ``draw`` draws it."""
    dims: Dims = ()
    """Its dims."""

    def logits(self) -> Tensor:
        """Returns ``[T, vocab]`` float64: the logits of the policy, after the soft-cap and *before*
        the temperature. For heads with logits.
        """
        return self.untempered()

    @property
    def logprobs(self) -> Tensor:
        """``[T]`` float64: the policy's log-probabilities of the labels, *after* the temperature
        and the filter. A label that the filter leaves out has its log-probability without the
        filter. At heads "values" and "rewards" it holds the values or rewards.
        """
        return self.policy()[0]

    @property
    def unfiltered(self) -> Tensor:
        """``[T]``: the same log-probabilities, all without the filter."""
        return self.policy()[1]

    @property
    def labels(self) -> Tensor:
        """``[T]`` int64."""
        return self.batch.fields["labels"]

    @property
    def mask(self) -> Tensor:
        """``[T]`` bool: the label is trained. Further tokens may be masked later."""
        return self.batch.fields["mask"]

    @property
    def sequence(self) -> Tensor:
        """``[T]`` int64: the number of each token's sequence."""
        return self.batch.fields["sequence"]

    @property
    def tokens(self) -> int:
        return self.batch.partition.tokens

    @property
    def sequences(self) -> int:
        return len(self.batch.partition.lengths)

    @property
    def vocab(self) -> int:
        return self.batch.partition.vocab

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the field that is being drawn.

        Raises:
            UsageError: if it has a dim whose size no problem knows.
        """
        sizes = _sizes(self)
        for dim in self.dims:
            if dim not in sizes:
                raise UsageError(
                    f"field {self.field!r} has dim {dim!r}, whose size no problem knows; {nearest(dim, sizes)}. "
                    "For a dim of your own, make the tensor in draw= from c.streams, c.tokens, c.sequences and c.vocab"
                )
        return tuple(sizes[dim] for dim in self.dims)

    def normal(self, std: float = 1.0) -> Tensor:
        """Draws normal numbers in the shape of the field."""
        return self.streams.normal(self.field, *self.shape) * std

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draws uniform numbers from ``low`` to ``high`` in the shape of the field."""
        return low + (high - low) * self.streams.uniform(self.field, *self.shape)

    def coin(self, chance: float = 0.5) -> Tensor:
        """Draws bools in the shape of the field. Each is true with this chance."""
        return self.streams.uniform(self.field, *self.shape) < chance

    def integers(self, below: int) -> Tensor:
        """Draws int64 numbers of at least 0 and less than ``below`` in the shape of the field."""
        return self.streams.integers(self.field, below, *self.shape)

    def on(self, name: str, dims: Dims) -> "FieldContext":
        """Returns the context for drawing one field."""
        return replace(self, field=name, dims=dims)


def _sizes(context: FieldContext) -> dict[str, int]:
    return {"token": context.tokens, "sequence": context.sequences, "vocab": context.vocab}


def draw_default(context: FieldContext, dtype: str) -> Tensor:
    """Draws a field that has no ``draw``: normal numbers, or bools of which two in three are true.

    Raises:
        UsageError: if the field is declared neither float32 nor bool.
    """
    if dtype not in ("bool", "float32"):
        raise UsageError(
            f"field {context.field!r} is declared {dtype} and has no draw=; give it one, such as "
            "draw=lambda c: c.integers(8), or count= if it counts other fields"
        )
    return context.coin(2 / 3) if dtype == "bool" else context.normal()


def checked(context: FieldContext, drawn: Any, dtype: str) -> Tensor:
    """Returns a drawn field, and checks it.

    Raises:
        UsageError: if it is no tensor of the field's shape and kind of dtype.
    """
    name = context.field
    checked_dtype(f"field {name!r}: its draw=", drawn, dtype)
    expected = [_sizes(context).get(dim, "any") for dim in context.dims]
    fits = len(expected) == drawn.dim() and all(
        size in ("any", own) for size, own in zip(expected, drawn.shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"field {name!r}: its draw= gave the shape {tuple(drawn.shape)}; expected that of its dims "
            f"[{', '.join(context.dims)}], here {tuple(expected)}"
        )
    return drawn


def checked_dtype(who: str, made: Any, dtype: str) -> Tensor:
    """Returns a tensor that a function of the spec made, and checks its dtype.

    Raises:
        UsageError: if it is no tensor of the declared kind of dtype.
    """
    if not isinstance(made, Tensor):
        raise UsageError(f"{who} gave {type(made).__name__}; expected a tensor")
    if dtype == "float32":
        fits = made.is_floating_point()
    elif dtype == "bool":
        fits = made.dtype is torch.bool
    else:
        fits = made.dtype in (torch.int64, torch.int32)
    if not fits:
        raise UsageError(f"{who} gave {made.dtype}; it is declared {dtype}")
    return made
