# SPDX-License-Identifier: Apache-2.0
"""A disagreement that is known and expected."""

from dataclasses import dataclass
from pathlib import Path

from lossgate.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """A known disagreement of a candidate: its frozen example is judged in place of new problems,
    and must still disagree.

    Raises:
        UsageError: if the name is no string, or the example no ``Path``.
    """

    name: str
    """The heading under which a document describes it."""
    example: Path
    """A failure file, as ``lossgate verify`` writes it."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"KnownFailure(name={self.name!r}): expected the heading in the document that describes it"
            )
        if not isinstance(self.example, Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"KnownFailure(example={self.example!r}): expected a path; write Path({self.example!r})")
