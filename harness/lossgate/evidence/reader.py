# SPDX-License-Identifier: Apache-2.0
"""Reads evidence, line by line. A damaged line is returned with a message, without an error."""

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
    """The kinds of damage to a line."""

    CUT = "cut"
    EDITED = "edited"
    UNREADABLE = "unreadable"
    OTHER_SCHEMA = "other schema"


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that is no evidence, because it is damaged."""

    where: Where
    damage: Damage
    message: str
    """What is wrong with the line, and what to do."""


@dataclass(frozen=True, slots=True)
class GoodLine:
    """An intact line, with its record."""

    where: Where
    record: Record
    digest: str


Line = GoodLine | DamagedLine


class _Header(msgspec.Struct):
    """The fields that say whether this version can read a record."""

    kind: str
    schema: str


_HEADER = msgspec.json.Decoder(_Header)
_RECORD = msgspec.json.Decoder(Record)
_KINDS = ("run", "cell", "end")


def read_lines(file: Path, digest: "Hash | None" = None) -> Iterator[Line]:
    """Yields the lines of a file of evidence.

    It leaves out empty lines, and records of a kind that a later version of lossgate added.

    Args:
        file: the file.
        digest: a hash that is updated with every byte of the file.

    Raises:
        UsageError: if the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            for number, text in enumerate(stream, 1):
                if digest is not None:
                    digest.update(text)
                if text.strip() and (line := _read_line(Where(str(file), number), text)) is not None:
                    yield line
    except OSError as error:
        raise UsageError(
            f"can't read {file}: {error.strerror}; name a file that lossgate verify --evidence wrote"
        ) from None


def _read_line(where: Where, line: bytes) -> Line | None:
    """Reads one line. Returns None if a later version of lossgate added its kind of record."""
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
    if not _is_known(record.schema):
        return _other_schema(where, record.schema)
    return GoodLine(where, record, digest)


def _no_record(where: Where, body: bytes, error: Exception) -> DamagedLine | None:
    """Returns the damage of an intact line that is no record; None if a later version added it."""
    unreadable = DamagedLine(where, Damage.UNREADABLE, f"it is no record of evidence: {error}")
    try:
        header = _HEADER.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return unreadable
    if not _is_known(header.schema):
        return _other_schema(where, header.schema)
    return unreadable if header.kind in _KINDS else None


def _is_known(schema: str) -> bool:
    """Returns whether a schema is ours, or has at most further fields."""
    return schema.partition(".")[0] == SCHEMA.partition(".")[0]


def _without_digest(where: Where, body: bytes) -> DamagedLine:
    try:
        is_whole = isinstance(msgspec.json.decode(body), dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        is_whole = False
    if is_whole:
        return DamagedLine(
            where,
            Damage.UNREADABLE,
            "it has no digest: an earlier version of lossgate or another program wrote it. Verify again",
        )
    return DamagedLine(where, Damage.CUT, "it is cut: it does not end as a line of evidence does. Verify again")


def _other_schema(where: Where, schema: str) -> DamagedLine:
    return DamagedLine(
        where,
        Damage.OTHER_SCHEMA,
        f"it has schema {schema!r}, but this version of lossgate reads {SCHEMA.partition('.')[0]}.x; "
        "read it with the version that wrote it, or verify again",
    )
