# SPDX-License-Identifier: Apache-2.0
"""Finds the lines of sources, policy and evidence to which SARIF points."""

import posixpath
import re
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import GateVerdict
from lossgate.reports.gate_files.findings import GateFinding

_LARGEST_SOURCE = 2_000_000
"""The most bytes that are read. Evidence may name any file, but sources are never so large."""


class SourcePlaces:
    """Finds the place of each candidate and of each line of the policy.

    Args:
        verdict: the verdict, whose cells name the files that declare candidates.
        root: the folder from which paths of sources start. A source is read only to find the line
            of a candidate, and only if it has not changed since it was verified. None reads no
            source.
    """

    def __init__(self, verdict: GateVerdict, root: Path | None) -> None:
        self._policy, self._root = verdict.policy.file, root
        self._sources: dict[str, CellSummary] = {}
        for cell in verdict.cells:
            if cell.summary is not None:
                self._sources.setdefault(cell.key.candidate, cell.summary)
        self._texts: dict[tuple[str, str | None], str] = {}

    def of_candidate(self, candidate: str, summary: CellSummary | None) -> dict[str, Any] | None:
        """Returns the place that declares a candidate, or None if no file is known.

        Args:
            candidate: the name of the candidate.
            summary: the result of the cell. Without it, another cell of the candidate gives the
                source.
        """
        found = summary or self._sources.get(candidate)
        if found is None or ".py:" not in found.source:  # package.module:name names no file
            return None
        stem, _, name = found.source.partition(".py:")
        file = f"{stem}.py"
        return _physical(file, _declared(name, self._text_of(file, found.source_digest)))

    def of_policy(self, finding: GateFinding) -> dict[str, Any] | None:
        """Returns the line of the policy that a finding names, else the policy's first line."""
        if not self._policy:
            return None
        file, line = _file_and_line(finding.blocker.where)
        return _physical(self._policy, line if file == self._policy else 1)

    def of_evidence(self, finding: GateFinding) -> dict[str, Any] | None:
        """Returns the line of evidence that a finding names, or None if it names none."""
        file, line = _file_and_line(finding.blocker.where)
        return _physical(file, line) if file and file != self._policy else None

    def _text_of(self, file: str, digest: str | None) -> str:
        if self._root is not None and (file, digest) not in self._texts:
            self._texts[file, digest] = _text(self._root / file, digest)
        return self._texts.get((file, digest), "")


def _file_and_line(where: str) -> tuple[str, int]:
    """Returns the parts of ``file:line``; the line is 1 if there is none."""
    found = re.fullmatch(r"(.*):0*([1-9][0-9]{0,8})", where, re.DOTALL)
    return (found[1], int(found[2])) if found else (where, 1)


def _physical(file: str, line: int) -> dict[str, Any]:
    return {"artifactLocation": _artifact(file), "region": {"startLine": line}}


def _artifact(file: str) -> dict[str, Any]:
    """Returns the location of a file. A relative path starts from the root of the sources."""
    path = posixpath.normpath(file.replace("\\", "/"))
    uri = quote(path, safe="/", errors="replace")
    if path.startswith("/"):
        return {"uri": f"file:///{uri.lstrip('/')}"}
    if path[1:3] == ":/":  # a drive of Windows
        return {"uri": f"file:///{quote(path, safe='/:', errors='replace')}"}
    return {"uri": uri, "uriBaseId": "%SRCROOT%"}


def _text(path: Path, digest: str | None) -> str:
    """Returns a source if it has the digest, else nothing. Devices and huge files aren't read."""
    try:
        if digest is None or not path.is_file() or path.stat().st_size > _LARGEST_SOURCE:
            return ""
        content = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a path with a null character
        return ""
    return content.decode(errors="replace") if sha256(content).hexdigest() == digest else ""


def _declared(name: str, source: str) -> int:
    """Returns the first line that declares a name; 1 if no line does."""
    declaration = rf"^(?:(?:async )?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]"
    found = re.search(declaration, source, re.MULTILINE)
    return source.count("\n", 0, found.start()) + 1 if found else 1
