# SPDX-License-Identifier: Apache-2.0
"""On which layouts and in which dtypes a candidate is verified.

Few layouts say nearly all. Of the known mistakes that any of the 38 layouts of at most 8 ranks
shows, the one that splits every axis in two shows nearly all. So by default the layouts cover
what differs: no split, each axis alone, each pair, all axes, uneven shards. Further dtypes change
how numbers are rounded, hardly how they are split: they get three layouts.
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
    """Returns what a candidate is verified on, dtype by dtype, and smaller layouts first."""
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
        most = max(chosen, key=lambda layout: len(layout.axes))
        chosen = list(dict.fromkeys((Layout(), most)))
    rest = [layout for layout in possible if layout not in chosen]
    if rest:  # another one for each candidate, so that many candidates see many layouts
        chosen.append(rest[crc32(f"{candidate.name} {dtype} {settings.seed}".encode()) % len(rest)])
    return sorted(chosen, key=_size)


def covering(possible: Sequence[Layout]) -> list[Layout]:
    """Returns few of some layouts that cover what differs between all of them.

    That is no split; each axis alone; each pair of axes, on 2 and 3 ranks if there is such a
    layout; all axes; and each axis alone on 3 ranks, where no pair is uneven.
    """
    alone = [_split({axis: 2}) for axis in AXES]
    pairs = list(_pairs(possible))
    three = [] if any(3 in pair.sizes.values() for pair in pairs) else [_split({axis: 3}) for axis in AXES]
    wanted = (Layout(), *alone, *three, *pairs, Layout(2, 2, 2))
    return [layout for layout in wanted if layout in possible]


def _pairs(possible: Sequence[Layout]) -> Iterator[Layout]:
    """Yields a layout for each pair of axes, of which each axis has 3 ranks once."""
    for one, other in combinations(AXES, 2):
        three, two = (one, other) if (one, other) == ("dp", "tp") else (other, one)
        uneven, even = _split({two: 2, three: 3}), _split({one: 2, other: 2})
        yield uneven if uneven in possible else even


def _split(sizes: dict[Axis, int]) -> Layout:
    return Layout(**sizes)


def _size(layout: Layout) -> tuple[int, Layout]:
    return layout.ranks, layout
