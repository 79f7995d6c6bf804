# SPDX-License-Identifier: Apache-2.0
"""Which cells a run verifies."""

from collections.abc import Iterable, Iterator, Sequence

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.declaration.candidate import Candidate, KnownFailure
from lossgate.engine.cell import Cell
from lossgate.engine.failure_files import FailureFile, read_failure
from lossgate.engine.matrix import finest, layouts_and_dtypes
from lossgate.engine.settings import Settings
from lossgate.properties import PROPERTIES, Property, find_property
from lossgate.worlds import most_ranks


def plan(candidates: Iterable[Candidate], settings: Settings) -> list[Cell]:
    """Returns the cells to verify.

    A candidate with a known failure has one cell: that of its frozen example.

    Raises:
        UsageError: if a candidate has no cell, or there is no such world.
    """
    try:
        most_ranks(settings.world)  # there is such a world
    except UsageError as error:
        raise UsageError(f"{settings.where('world')}{error}") from None
    cells: list[Cell] = []
    for candidate in candidates:
        own = list(_cells(candidate, settings))
        if not own:
            axes = f"axes {', '.join(candidate.axes)}" if candidate.axes else "no axes"
            layouts = ", ".join(settings.layouts) or f"of up to {settings.ranks} ranks"
            ways = [_given_by(settings, name, flag) for name, flag in (("layouts", "--layout"), ("dtypes", "--dtype"))]
            raise UsageError(
                f"candidate {candidate.name!r}: nothing to verify; it has {axes} and dtypes "
                f"{', '.join(candidate.dtypes)}, and the run has layouts {layouts} and dtypes "
                f"{', '.join(settings.dtypes) or 'of any kind'}. Change {' or '.join(ways)}, or leave the candidate out"
            )
        cells += own
    return cells


def _given_by(settings: Settings, name: str, flag: str) -> str:
    """Returns what gives a setting, in words."""
    return settings.where(name).removesuffix(": ") or flag


def _cells(candidate: Candidate, settings: Settings) -> Iterator[Cell]:
    if candidate.known_failure is not None:
        known = read_known_failure(candidate.known_failure)
        problem = known.examples[0].problem
        yield Cell(candidate, problem.layout, problem.dtype, find_property(known.property), known.world, known.device)
        return
    places = layouts_and_dtypes(candidate, settings)
    for held_to, also in held_together(candidate, settings):
        for layout, dtype in places:
            own = tuple(one for one in also if _is_checked_on(one, layout, dtype, places, settings))
            yield Cell(candidate, layout, dtype, held_to, settings.world, settings.device, own)


def _is_checked_on(
    held_to: Property, layout: Layout, dtype: str, places: Sequence[tuple[Layout, str]], settings: Settings
) -> bool:
    """Returns whether a property is checked beside agreement on a layout, in a dtype.

    Args:
        held_to: the property.
        layout: the layout.
        dtype: the dtype.
        places: where the candidate is verified.
        settings: of the run.
    """
    if held_to.of_ranks or settings.layouts or settings.properties:
        return True
    allowed = [own for own, _ in places if max(own.sizes.values()) <= settings.property_ranks]
    if settings.matrix == "full":
        return layout in allowed
    # A kernel that is called in another way takes other branches where an axis is split, but hardly
    # others for each axis or dtype: one rank in each dtype, and most axes split in one.
    most = max((len(own.axes) for own in allowed), default=0)
    return not layout.axes or (
        layout in allowed and len(layout.axes) == most and dtype == finest([one for _, one in places])
    )


def held_together(candidate: Candidate, settings: Settings) -> list[tuple[Property, tuple[Property, ...]]]:
    """Returns to what a candidate is held: each property that has cells of its own, and those that
    are checked in the same cells.

    Agreement has cells, and all others are checked in them. If it is not among the properties that
    a run names, each has its own.

    Raises:
        UsageError: if the candidate is exempt from a property that there is not.
    """
    for name in candidate.exempt:
        try:
            find_property(name)
        except UsageError as error:
            raise UsageError(f"candidate {candidate.name!r}: exempt={dict(candidate.exempt)!r}: {error}") from None
    try:
        named = [find_property(name) for name in settings.properties] or list(PROPERTIES.values())
    except UsageError as error:
        raise UsageError(f"{settings.where('properties')}{error}") from None
    apply = [held_to for held_to in dict.fromkeys(named) if held_to.applies(candidate)]
    first = next((held_to for held_to in apply if held_to.needs_adequacy), None)
    if first is None:
        return [(held_to, ()) for held_to in apply if held_to.name not in candidate.exempt]
    others = [held_to for held_to in apply if held_to.needs_adequacy and held_to is not first]
    return [(first, tuple(p for p in apply if not p.needs_adequacy)), *((held_to, ()) for held_to in others)]


def left_out(candidates: Iterable[Candidate], settings: Settings) -> Iterator[str]:
    """Yields a line for each layout and dtype that a run names and a candidate is not verified on.

    It can't do it, or has a known failure: that is frozen on one layout, in one dtype.
    """
    for candidate in candidates:
        known = candidate.known_failure
        frozen = None if known is None else read_known_failure(known).examples[0].problem
        only = "" if known is None or frozen is None else f"its known failure {known.name} is frozen"
        axes = f"axes are {', '.join(candidate.axes)}" if candidate.axes else "declaration names no axes"
        for layout in dict.fromkeys(map(Layout.parse, settings.layouts)):
            if not set(layout.axes) <= set(candidate.axes):
                yield f"{candidate.name}: {layout} is left out, because its {axes}"
            elif frozen is not None and layout != frozen.layout:
                yield f"{candidate.name}: {layout} is left out, because {only} on {frozen.layout}"
        for dtype in dict.fromkeys(settings.dtypes):
            if dtype not in candidate.dtypes:
                yield f"{candidate.name}: {dtype} is left out, because its dtypes are {', '.join(candidate.dtypes)}"
            elif frozen is not None and dtype != frozen.dtype:
                yield f"{candidate.name}: {dtype} is left out, because {only} in {frozen.dtype}"


def read_known_failure(known: KnownFailure) -> FailureFile:
    """Reads the failure file of a known failure; its first example is the frozen one.

    Raises:
        UsageError: if the file cannot be read, or its problems disagree only when pooled.
    """
    failure = read_failure(known.example)
    if failure.pooled:
        raise UsageError(
            f"known failure {known.name}: the problems in {known.example} disagree only when pooled; "
            "freeze one that disagrees on its own"
        )
    return failure
