# SPDX-License-Identifier: Apache-2.0
"""The layouts and dtypes on which a candidate is verified.

Few layouts are enough. There are 38 layouts of at most 8 ranks, and the one that splits every axis
in two shows nearly all known mistakes that any of them shows. So by default the layouts cover only
what differs: no split, each axis alone, each pair, all axes, and uneven shards. Further dtypes
change how numbers are rounded, but hardly how they are split. They get three layouts.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from zlib import crc32

from lossgate.base.layout import AXES, Axis, Layout, layouts_up_to
from lossgate.declaration.candidate import Candidate
from lossgate.engine.settings import Settings
from lossgate.worlds import most_ranks

_FINEST = "float32"


def layouts_and_dtypes(candidate: Candidate, settings: Settings) -> list[tuple[Layout, str]]:
    """Returns the layouts and dtypes of a candidate, dtype by dtype, with smaller layouts first."""
    dtypes = _dtypes_of(candidate, settings)
    return [(layout, dtype) for dtype in dtypes for layout in _layouts_in(candidate, settings, dtype, dtypes)]


def finest(dtypes: Sequence[str]) -> str:
    """Returns the dtype that is verified on most layouts."""
    return _FINEST if _FINEST in dtypes else dtypes[0]


def _dtypes_of(candidate: Candidate, settings: Settings) -> list[str]:
    """Returns the dtypes in which a candidate is verified."""
    return [dtype for dtype in dict.fromkeys(settings.dtypes or candidate.dtypes) if dtype in candidate.dtypes]


def _layouts_in(candidate: Candidate, settings: Settings, dtype: str, dtypes: Sequence[str]) -> list[Layout]:
    if settings.layouts:
        named = dict.fromkeys(map(Layout.parse, settings.layouts))
        return [layout for layout in named if set(layout.axes) <= set(candidate.axes)]
    possible = list(layouts_up_to(min(settings.ranks, most_ranks(settings.world)), candidate.axes))
    if settings.matrix == "full":
        return possible
    chosen = covering(possible)
    if dtype != finest(dtypes):
        most_split = max(chosen, key=lambda layout: len(layout.axes))
        chosen = list(dict.fromkeys((Layout(), most_split)))
    rest = [layout for layout in possible if layout not in chosen]
    if rest:  # candidates differ in this layout, so that many candidates see many layouts
        chosen.append(rest[crc32(f"{candidate.name} {dtype} {settings.seed}".encode()) % len(rest)])
    return sorted(chosen, key=_size)


def covering(possible: Sequence[Layout]) -> list[Layout]:
    """Returns a few of the possible layouts, which cover what differs between all of them.

    They are: no split; each axis alone; each pair of axes, on 2 and 3 ranks if that is possible;
    and all axes. If no pair has 3 ranks on an axis, each axis alone on 3 ranks is added.
    """
    on_2 = [_split({axis: 2}) for axis in AXES]
    on_3 = [_split({axis: 3}) for axis in AXES]
    pairs = list(_pairs(possible))
    if any(3 in pair.sizes.values() for pair in pairs):
        on_3 = []
    wanted = (Layout(), *on_2, *on_3, *pairs, Layout(2, 2, 2))
    return [layout for layout in wanted if layout in possible]


def _pairs(possible: Sequence[Layout]) -> Iterator[Layout]:
    """Yields one layout for each pair of axes: 3 ranks on one axis and 2 on the other, or 2 on both
    if that is not possible. Over all pairs, each axis has 3 ranks once.
    """
    for one, other in combinations(AXES, 2):
        # Axes with 3 ranks: cp in dp-cp, dp in dp-tp, tp in cp-tp.
        three, two = (one, other) if (one, other) == ("dp", "tp") else (other, one)
        uneven, even = _split({two: 2, three: 3}), _split({one: 2, other: 2})
        yield uneven if uneven in possible else even


def _split(sizes: dict[Axis, int]) -> Layout:
    return Layout(**sizes)


def _size(layout: Layout) -> tuple[int, Layout]:
    return layout.ranks, layout
