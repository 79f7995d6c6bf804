# SPDX-License-Identifier: Apache-2.0
"""What the further fields of a spec are drawn from."""

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
    """What a spec draws its further fields from.

    T tokens of the sequences end to end, without padding; S sequences. Padding is added later, for
    each layout. The same problem always draws the same numbers.
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
    """Computes ``logprobs`` and ``unfiltered``, once."""
    untempered: Callable[[], Tensor]
    """Computes the reference's logits ``[T, vocab]``."""
    field: str = ""
    """The field that is being drawn by its own ``draw``."""
    dims: Dims = ()
    """Its dims."""

    def logits(self) -> Tensor:
        """Returns ``[T, vocab]`` float64: the logits of the policy, after the soft-cap and *before*
        the temperature. For heads with logits.
        """
        return self.untempered()

    @property
    def logprobs(self) -> Tensor:
        """``[T]`` float64: the policy's log-probabilities of the labels, *after* the temperature,
        or what the head gives in their place; without the filter where that leaves a label out.
        """
        return self.policy()[0]

    @property
    def unfiltered(self) -> Tensor:
        """``[T]``: the same without any filter."""
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
        sizes = {"token": self.tokens, "sequence": self.sequences, "vocab": self.vocab}
        for dim in self.dims:
            if dim not in sizes:
                raise UsageError(
                    f"field {self.field!r} has dim {dim!r}, whose size no problem knows; {nearest(dim, sizes)}. "
                    "If it is a dim of its own, make the tensor in its draw= from c.streams, c.tokens, c.sequences "
                    "and c.vocab"
                )
        return tuple(sizes[dim] for dim in self.dims)

    def normal(self, std: float = 1.0) -> Tensor:
        """Draws normal numbers in the shape of the field."""
        return self.streams.normal(self.field, *self.shape) * std

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draws numbers between two others in the shape of the field."""
        return low + (high - low) * self.streams.uniform(self.field, *self.shape)

    def coin(self, chance: float = 0.5) -> Tensor:
        """Draws bools in the shape of the field, each true with a chance."""
        return self.streams.uniform(self.field, *self.shape) < chance

    def integers(self, below: int) -> Tensor:
        """Draws int64 numbers from 0 on, below another, in the shape of the field."""
        return self.streams.integers(self.field, below, *self.shape)

    def on(self, name: str, dims: Dims) -> "FieldContext":
        """Returns the same, for a field."""
        return replace(self, field=name, dims=dims)


def draw_default(context: FieldContext, dtype: str) -> Tensor:
    """Draws a field that says nothing of how: normal numbers, or bools of which two in three are
    true.

    Raises:
        UsageError: if it is neither.
    """
    if dtype not in ("bool", "float32"):
        raise UsageError(
            f"field {context.field!r} is declared {dtype} and does not say how it is drawn; "
            "give it draw=lambda c: c.integers(8), say, or count= if it counts others"
        )
    return context.coin(2 / 3) if dtype == "bool" else context.normal()


def checked(context: FieldContext, drawn: Any, dtype: str) -> Tensor:
    """Returns what a ``draw`` gave.

    Raises:
        UsageError: if it is no tensor of the field's shape and kind of dtype.
    """
    name = context.field
    checked_dtype(f"field {name!r}: its draw=", drawn, dtype)
    sizes = {"token": context.tokens, "sequence": context.sequences, "vocab": context.vocab}
    expected = [sizes.get(dim) for dim in context.dims]
    if drawn.dim() != len(expected) or any(e not in (None, n) for e, n in zip(expected, drawn.shape, strict=True)):
        raise UsageError(
            f"field {name!r}: its draw= gave the shape {tuple(drawn.shape)}; expected that of its dims "
            f"[{', '.join(context.dims)}], here {tuple('any' if e is None else e for e in expected)}"
        )
    return drawn


def checked_dtype(who: str, made: Any, dtype: str) -> Tensor:
    """Returns what a function of the spec made.

    Raises:
        UsageError: if it is no tensor of the declared kind of dtype.
    """
    if not isinstance(made, Tensor):
        raise UsageError(f"{who} gave {type(made).__name__}; expected a tensor")
    kinds = {"float32": made.is_floating_point(), "bool": made.dtype is torch.bool}
    if not kinds.get(dtype, made.dtype in (torch.int64, torch.int32)):
        raise UsageError(f"{who} gave {made.dtype}; it is declared {dtype}")
    return made
