# SPDX-License-Identifier: Apache-2.0
"""Plans the cells that a run verifies."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
        UsageError: if a candidate has no cell, or if the world is unknown.
    """
    try:
        most_ranks(settings.world)  # raises if the world is unknown
    except UsageError as error:
        raise UsageError(f"{settings.where('world')}{error}") from None
    cells: list[Cell] = []
    for candidate in candidates:
        own = list(_cells(candidate, settings))
        if not own:
            raise _nothing_to_verify(candidate, settings)
        cells += own
    return cells


def _nothing_to_verify(candidate: Candidate, settings: Settings) -> UsageError:
    axes = f"axes {', '.join(candidate.axes)}" if candidate.axes else "no axes"
    layouts = ", ".join(settings.layouts) or f"of up to {settings.ranks} ranks"
    dtypes = ", ".join(settings.dtypes) or "of any kind"
    give_layouts, give_dtypes = _given_by(settings, "layouts", "--layout"), _given_by(settings, "dtypes", "--dtype")
    return UsageError(
        f"candidate {candidate.name!r}: nothing to verify; it has {axes} and dtypes {', '.join(candidate.dtypes)}, "
        f"but the run asks for layouts {layouts} and dtypes {dtypes}. Change {give_layouts} or {give_dtypes}, or leave "
        "the candidate out"
    )


def _given_by(settings: Settings, name: str, flag: str) -> str:
    """Returns the place that sets a setting, in words, or else its flag."""
    return settings.where(name).removesuffix(": ") or flag


def _cells(candidate: Candidate, settings: Settings) -> Iterator[Cell]:
    if candidate.known_failure is not None:
        known = read_known_failure(candidate.known_failure)
        problem = known.examples[0].problem
        yield Cell(candidate, problem.layout, problem.dtype, find_property(known.property), known.world, known.device)
        return
    places = layouts_and_dtypes(candidate, settings)
    for held_to, further in held_together(candidate, settings):
        for layout, dtype in places:
            also = tuple(one for one in further if _is_checked_on(one, layout, dtype, places, settings))
            yield Cell(candidate, layout, dtype, held_to, settings.world, settings.device, also)


def _is_checked_on(
    held_to: Property, layout: Layout, dtype: str, places: Sequence[tuple[Layout, str]], settings: Settings
) -> bool:
    """Returns whether the cell of agreement on a layout, in a dtype, also checks another property.

    ``places`` are the layouts and dtypes on which the candidate is verified.
    """
    if held_to.of_ranks or settings.layouts or settings.properties:
        return True
    allowed = [own for own, _ in places if max(own.sizes.values()) <= settings.property_ranks]
    if settings.matrix == "full":
        return layout in allowed
    # These properties call a kernel in other ways. The branches that it then takes depend on
    # whether axes are split, and hardly on which axis or on the dtype. So a single rank in each
    # dtype and, in one dtype, the layouts that split most axes are enough.
    if not layout.axes:
        return True
    most = max((len(own.axes) for own in allowed), default=0)
    return layout in allowed and len(layout.axes) == most and dtype == finest([one for _, one in places])


def held_together(candidate: Candidate, settings: Settings) -> list[tuple[Property, tuple[Property, ...]]]:
    """Returns the properties that have cells, each with the further properties of these cells.

    Agreement has cells, and all other properties are checked in them. If a run names properties
    without agreement, each of them has its own cells.

    Raises:
        UsageError: if the candidate or the run names an unknown property.
    """
    _check_exempt(candidate)
    try:
        named = [find_property(name) for name in settings.properties] or list(PROPERTIES.values())
    except UsageError as error:
        raise UsageError(f"{settings.where('properties')}{error}") from None
    apply = [held_to for held_to in dict.fromkeys(named) if held_to.applies(candidate)]
    first = next((held_to for held_to in apply if held_to.needs_adequacy), None)
    if first is None:
        return [(held_to, ()) for held_to in apply if held_to.name not in candidate.exempt]
    # Exempt properties stay among these, so that the record of the cell names them.
    further = tuple(held_to for held_to in apply if not held_to.needs_adequacy)
    others = [held_to for held_to in apply if held_to.needs_adequacy and held_to is not first]
    return [(first, further), *((held_to, ()) for held_to in others)]


def _check_exempt(candidate: Candidate) -> None:
    for name in candidate.exempt:
        try:
            find_property(name)
        except UsageError as error:
            raise UsageError(f"candidate {candidate.name!r}: exempt={dict(candidate.exempt)!r}: {error}") from None


def left_out(candidates: Iterable[Candidate], settings: Settings) -> Iterator[str]:
    """Yields a line for each layout or dtype that a run names but that a candidate leaves out.

    The candidate does not support it, or has a known failure on another layout or in another dtype.
    """
    for candidate in candidates:
        known = candidate.known_failure
        frozen = read_known_failure(known).examples[0].problem if known is not None else None
        only = f"its known failure {known.name} is frozen" if known is not None else ""
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
    """Reads the failure file of a known failure. Its first example is the frozen one.

    Raises:
        UsageError: if the file cannot be read, or its problems disagree only when pooled.
    """
    failure = read_failure(known.example)
    if failure.pooled:
        raise UsageError(
            f"known failure {known.name}: the problems in {known.example} disagree only when pooled; "
            "freeze a problem that disagrees on its own"
        )
    return failure


_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")
_WORDS = ("and", "or", "not")


@dataclass(frozen=True)
class Selection:
    """An expression over the names of cells, like those of pytest: ``bfloat16 and not dp``.

    A word matches a cell if the name of the cell contains it. An example of a name is
    ``my_kernel[agreement-cp=2-float32]``.
    """

    text: str

    def __post_init__(self) -> None:
        self.matches("")  # raises if the expression is wrong

    def take(self, cells: Sequence[Cell]) -> list[Cell]:
        """Returns the cells whose names match.

        Raises:
            UsageError: if no cell matches.
        """
        chosen = [cell for cell in cells if self.matches(str(cell))]
        if not chosen:
            raise UsageError(
                f"-k {self.text!r}: no cell has such a name; the {len(cells)} cells have names such as {cells[0]}"
            )
        return chosen

    def matches(self, name: str) -> bool:
        """Returns whether a name matches. Upper and lower case are the same.

        Raises:
            UsageError: if the expression is wrong.
        """
        tokens = _TOKEN.findall(self.text)
        value, rest = self._joined("or", tokens, name.lower())
        if rest:
            raise self._error(rest[0])
        return value

    def _joined(self, word: str, tokens: list[str], name: str) -> tuple[bool, list[str]]:
        """Returns the value of terms that are joined by "or" or "and", and the tokens after them.

        "and" binds tighter: the terms between "or" may be joined by "and".
        """

        def term(tokens: list[str]) -> tuple[bool, list[str]]:
            return self._joined("and", tokens, name) if word == "or" else self._one(tokens, name)

        value, rest = term(tokens)
        while rest and rest[0] == word:
            other, rest = term(rest[1:])
            value = (value or other) if word == "or" else (value and other)
        return value, rest

    def _one(self, tokens: list[str], name: str) -> tuple[bool, list[str]]:
        """Returns the value of a word, a negation or parentheses, and the tokens after them."""
        if not tokens:
            raise self._error("the end")
        first, *rest = tokens
        if first == "not":
            value, rest = self._one(rest, name)
            return not value, rest
        if first == "(":
            value, rest = self._joined("or", rest, name)
            if not rest or rest[0] != ")":
                raise self._error(rest[0] if rest else "the end")
            return value, rest[1:]
        if first == ")" or first in _WORDS:
            raise self._error(first)
        return first.lower() in name, rest

    def _error(self, at: str) -> UsageError:
        where = at if at == "the end" else repr(at)
        return UsageError(
            f"-k {self.text!r}: can't be read at {where}; expected parts of names with 'and', 'or', 'not' and "
            "parentheses, such as 'bfloat16 and not dp'"
        )
