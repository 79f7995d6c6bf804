# SPDX-License-Identifier: Apache-2.0
"""Where in the sources the findings of a verdict are shown."""

import ast
import posixpath
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lossgate.evidence.summary import CellSummary
from lossgate.gate.verdict import Blocker, GateVerdict

_LARGEST_SOURCE = 2_000_000
"""Bytes. Evidence names the file, so it may be any file: nobody declares candidates in a larger."""


class Places:
    """Finds the place of each candidate and of each line of the policy.

    Args:
        verdict: says which file declares each candidate.
        root: the folder that paths of sources start from. A source is read only to find the line
            of a candidate, and only if it is the very file that was verified; None reads nothing.
    """

    def __init__(self, verdict: GateVerdict, root: Path | None) -> None:
        self._policy, self._root = verdict.policy.file, root
        self._sources: dict[str, CellSummary] = {}
        for cell in verdict.cells:
            if cell.summary is not None:
                self._sources.setdefault(cell.key.candidate, cell.summary)
        self._lines: dict[tuple[str, str | None], dict[str, int]] = {}

    def of_candidate(self, candidate: str, summary: CellSummary | None) -> dict[str, Any] | None:
        """Returns the place that declares a candidate, or None if no file is known.

        Args:
            summary: of the cell in question. Without one, another cell of the candidate says it.
        """
        found = summary or self._sources.get(candidate)
        stem, suffix, name = found.source.partition(".py:") if found is not None else ("", "", "")
        if found is None or not suffix:  # package.module:name names no file
            return None
        file = f"{stem}.py"
        return _physical(file, self._lines_of(file, found.source_digest).get(name, 1))

    def of_policy(self, blocker: Blocker) -> dict[str, Any] | None:
        """Returns the line of the policy that a blocker names, else the policy's first line."""
        file, line = file_and_line(blocker.where)
        return _physical(self._policy, line if file == self._policy else 1) if self._policy else None

    def of_evidence(self, blocker: Blocker) -> dict[str, Any] | None:
        """Returns the line of evidence that a blocker names, or None if it names none."""
        file, line = file_and_line(blocker.where)
        return _physical(file, line) if file and file != self._policy else None

    def _lines_of(self, file: str, digest: str | None) -> dict[str, int]:
        if (file, digest) not in self._lines:
            text = _text(self._root / file, digest) if self._root is not None else None
            self._lines[file, digest] = _declared(text) if text is not None else {}
        return self._lines[file, digest]


def file_and_line(where: str) -> tuple[str, int]:
    """Returns the parts of ``file:line``; the line is 1 if there is none."""
    file, colon, line = where.rpartition(":")
    is_line = colon and line.isascii() and line.isdigit() and 0 < len(line) < 10 and int(line) > 0
    return (file, int(line)) if is_line else (where, 1)


def _physical(file: str, line: int) -> dict[str, Any]:
    return {"artifactLocation": _artifact(file), "region": {"startLine": line}}


def _artifact(file: str) -> dict[str, Any]:
    """Returns the location of a file: relative to the root of the sources, if it is."""
    path = posixpath.normpath(file.replace("\\", "/"))
    uri = quote(path, safe="/", errors="replace")
    if path.startswith("/"):
        return {"uri": f"file:///{uri.lstrip('/')}"}
    if path[1:3] == ":/":  # a drive of Windows
        return {"uri": f"file:///{quote(path, safe='/:', errors='replace')}"}
    return {"uri": uri, "uriBaseId": "%SRCROOT%"}


def _text(path: Path, digest: str | None) -> bytes | None:
    """Returns the bytes of a source if they have the digest. A device or a huge file isn't read."""
    try:
        if digest is None or not path.is_file() or path.stat().st_size > _LARGEST_SOURCE:
            return None
        text = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a path with a null character
        return None
    return text if sha256(text).hexdigest() == digest else None


def _declared(text: bytes) -> dict[str, int]:
    """Returns the line on which each function, class and name of a source is declared first."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    lines: dict[str, int] = {}
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                lines.setdefault(name, node.lineno)
            case ast.Assign(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        lines.setdefault(target.id, node.lineno)
            case ast.AnnAssign(target=ast.Name(id=name)):
                lines.setdefault(name, node.lineno)
            case _:
                pass
    return lines
