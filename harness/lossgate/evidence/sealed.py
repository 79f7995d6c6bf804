# SPDX-License-Identifier: Apache-2.0
"""Lines of evidence: a record as JSON, sealed by a digest of its own bytes.

The digest shows that a line was cut or edited by accident. It is no signature: a forger can seal a
line again. So a release pipeline signs the statement of the gate, which has the digests of the
evidence.
"""

from collections.abc import Iterable
from hashlib import sha256

import msgspec

from lossgate.engine.cell_record import CellKey
from lossgate.evidence.records import Matrix, Record

_SEAL = b',"digest":"'
_END = b'"}'
_LENGTH = len(_SEAL) + 64 + len(_END)


def seal(record: Record) -> bytes:
    """Returns a record as one line of JSON, without the line's end."""
    body = msgspec.json.encode(record)
    return body[:-1] + _SEAL + sha256(body).hexdigest().encode() + _END


def digest_in(line: bytes) -> str | None:
    """Returns the digest at the end of a line, or None if there is none."""
    tail = line[-_LENGTH:]
    if len(tail) != _LENGTH or not tail.startswith(_SEAL) or not tail.endswith(_END):
        return None
    return tail[len(_SEAL) : -len(_END)].decode("ascii", "replace")


def is_intact(line: bytes) -> bool:
    """Returns whether the digest at the end of a line is the digest of its bytes."""
    return digest_in(line) == sha256(line[:-_LENGTH] + b"}").hexdigest()


def digest_of_cells(digests: list[str]) -> str:
    """Returns the digest of the cells of a run. The order of their lines does not matter."""
    return sha256("".join(sorted(digests)).encode()).hexdigest()


def matrix_of(keys: Iterable[CellKey]) -> Matrix:
    """Returns the number of cells and their digest. Their order does not matter."""
    names = sorted(set(map(str, keys)))
    return Matrix(cells=len(names), digest=sha256("\n".join(names).encode()).hexdigest())
