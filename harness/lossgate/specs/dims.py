# SPDX-License-Identifier: Apache-2.0
"""What a rank has of each dim of a tensor, in words for kernel authors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class RankPart:
    """What a rank has of a dim."""

    split_over: tuple[str, ...]
    """The mesh axes over whose ranks it is split; none if each rank has all of it."""
    meaning: str


_PARTS: Mapping[str, RankPart] = MappingProxyType(
    {
        "token": RankPart(
            ("dp", "cp"),
            "the tokens of its dp rank's sequences, padded; of each, the two zigzag chunks of its cp rank",
        ),
        "sequence": RankPart(("dp",), "the sequences of its dp rank"),
        "sequences+1": RankPart(("dp",), "one more than its dp rank has sequences"),
        "vocab": RankPart(
            ("tp",), "rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split is padded"
        ),
        "hidden": RankPart((), "the whole width"),
    }
)
_WHOLE = RankPart((), "the whole")


def parts_of(dims: Iterable[str]) -> dict[str, RankPart]:
    """Returns what a rank has of some dims, by name, those that are split first."""
    named = {*dims}
    known = {name: part for name, part in _PARTS.items() if name in named}
    return known | dict.fromkeys(sorted(named - known.keys()), _WHOLE)
