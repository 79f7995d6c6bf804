# SPDX-License-Identifier: Apache-2.0
"""Layouts: how many data-, context- and tensor-parallel ranks a problem is split over."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, Self

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown

Axis = Literal["dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "cp", "tp")

MAX_RANKS = 64
"""The most ranks that a layout may have. With so many, one process simulates a collective in a few
milliseconds."""


@dataclass(frozen=True, order=True)
class Layout:
    """A mesh of ``dp x cp x tp`` ranks, numbered row by row: tp varies fastest, as in Megatron-LM
    and DeviceMesh.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise UsageError(f"layout: {axis}={size} is not a positive whole number")
        if self.ranks > MAX_RANKS:
            raise UsageError(
                f"layout {self} has {self.ranks} ranks; at most {MAX_RANKS} can be simulated: choose a smaller one"
            )

    @property
    def sizes(self) -> dict[Axis, int]:
        return {"dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that have more than one rank."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    def coordinate(self, rank: int) -> dict[Axis, int]:
        return {"dp": rank // (self.cp * self.tp), "cp": rank // self.tp % self.cp, "tp": rank % self.tp}

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "single"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a layout such as ``"tp=2,cp=2"`` or ``"single"``; the inverse of ``str``."""
        if text.strip() == "single":
            return cls()
        sizes: dict[Axis, int] = {}
        for part in text.split(","):
            name, equals, size = part.strip().partition("=")
            axis: Axis | None = next((a for a in AXES if a == name), None)
            if axis is None or not equals or not re.fullmatch(r"\d{1,9}", size, re.ASCII) or axis in sizes:
                raise UsageError(
                    f"layout {shown(text)}: can't read {shown(part.strip())}; "
                    f"expected 'single' or sizes of {', '.join(AXES)} such as 'tp=2,cp=2'"
                )
            sizes[axis] = int(size)
        return cls(**sizes)


def layouts_up_to(ranks: int, axes: Iterable[Axis] = AXES) -> Iterator[Layout]:
    """Yields every layout of at most ``ranks`` ranks that splits only ``axes``, smallest first."""
    allowed = set(axes)
    sizes = [range(1, ranks + 1) if axis in allowed else (1,) for axis in AXES]
    found = [of_axes for of_axes in product(*sizes) if prod(of_axes) <= ranks]
    for dp, cp, tp in sorted(found, key=lambda of_axes: (prod(of_axes), of_axes)):
        yield Layout(dp, cp, tp)


def name_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks in words, such as ``rank 1`` or ``ranks 0, 2``."""
    numbers = [str(rank) for rank in ranks]
    noun = "ranks" if len(numbers) > 1 else "rank"
    return f"{noun} {', '.join(numbers)}"
