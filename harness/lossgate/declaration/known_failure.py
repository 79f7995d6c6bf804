# SPDX-License-Identifier: Apache-2.0
"""A disagreement that is known and expected."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """A known disagreement of a candidate: its frozen example is judged in place of new problems,
    and must still disagree.

    Raises:
        UsageError: if the name is not one line, or the example no ``Path``.
    """

    name: str
    """The heading under which a document describes it."""
    example: Path
    """A failure file, as ``lossgate verify`` writes it."""

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise UsageError(
                f"KnownFailure(name={shown(name)}): expected the heading in the document that describes it, in one line"
            )
        example: Any = self.example
        if not isinstance(example, Path):
            way_out = f"; write Path({example!r})" if isinstance(example, str) else ", such as Path('failure.json')"
            raise UsageError(f"KnownFailure(example={shown(example)}): expected a path{way_out}")
