# SPDX-License-Identifier: Apache-2.0
"""Reads evidence, line by line. What is wrong with a line is returned, not raised."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import SCHEMA
from lossgate.evidence.records import Record
from lossgate.evidence.sealed import digest_in, is_intact

if TYPE_CHECKING:
    from hashlib import _Hash as Hash


class Where(NamedTuple):
    """A line of a file."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, kw_only=True)
class Digested:
    """A file and its SHA-256."""

    file: str
    sha256: str


class Damage(StrEnum):
    """What can be wrong with a line."""

    CUT = "cut"
    EDITED = "edited"
    UNREADABLE = "unreadable"
    OTHER_SCHEMA = "other schema"


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that can't be taken for evidence."""

    where: Where
    damage: Damage
    message: str
    """What is wrong with it, and what to do."""


@dataclass(frozen=True, slots=True)
class GoodLine:
    """A line that holds a record, as it was written."""

    where: Where
    record: Record
    digest: str


Line = GoodLine | DamagedLine


class _Header(msgspec.Struct):
    """What tells whether a line can be read as a record."""

    kind: str
    schema: str


_HEADER = msgspec.json.Decoder(_Header)
_RECORD = msgspec.json.Decoder(Record)
_KINDS = ("run", "cell", "end")


def read_lines(file: Path, digest: "Hash | None" = None) -> Iterator[Line]:
    """Yields the lines of a file of evidence.

    Empty lines are left out, and so are records of a kind that a later version of lossgate added.

    Args:
        file: the file.
        digest: is updated with all that is read.

    Raises:
        UsageError: if the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            for number, text in enumerate(stream, 1):
                if digest is not None:
                    digest.update(text)
                if text.strip() and (line := read_line(Where(str(file), number), text)) is not None:
                    yield line
    except OSError as error:
        raise UsageError(
            f"can't read {file}: {error.strerror}; name a file that lossgate verify --evidence wrote"
        ) from None


def read_line(where: Where, line: bytes) -> Line | None:
    """Reads one line; returns None for a record of a kind that a later version added."""
    body = line.rstrip(b"\r\n")
    digest = digest_in(body)
    if digest is None:
        return _without_digest(where, body)
    if not is_intact(body):
        return DamagedLine(
            where, Damage.EDITED, "its digest is not that of its text; it was changed after it was written"
        )
    try:
        record = _RECORD.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return _no_record(where, body, error)
    return GoodLine(where, record, digest) if _is_known(record.schema) else _other_schema(where, record.schema)


def _no_record(where: Where, body: bytes, error: Exception) -> DamagedLine | None:
    """Returns what is wrong with an intact line; None if a later version added its kind."""
    try:
        header = _HEADER.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return DamagedLine(where, Damage.UNREADABLE, f"it is no record of evidence: {error}")
    if not _is_known(header.schema):
        return _other_schema(where, header.schema)
    if header.kind not in _KINDS:
        return None
    return DamagedLine(where, Damage.UNREADABLE, f"it is no record of evidence: {error}")


def _is_known(schema: str) -> bool:
    """Returns whether a schema differs from ours at most in what it adds."""
    return schema.partition(".")[0] == SCHEMA.partition(".")[0]


def _without_digest(where: Where, body: bytes) -> DamagedLine:
    try:
        whole = isinstance(msgspec.json.decode(body), dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        whole = False
    if whole:
        return DamagedLine(
            where,
            Damage.UNREADABLE,
            "it has no digest: an earlier version of lossgate wrote it, or another program. Verify again",
        )
    return DamagedLine(where, Damage.CUT, "it is cut: it does not end as a line of evidence does. Verify again")


def _other_schema(where: Where, schema: str) -> DamagedLine:
    return DamagedLine(
        where,
        Damage.OTHER_SCHEMA,
        f"it has schema {schema!r}, and this version of lossgate reads {SCHEMA.partition('.')[0]}.x; "
        "read it with the version that wrote it, or verify again",
    )
