# SPDX-License-Identifier: Apache-2.0
"""``lossgate gate --init``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from lossgate.cli.app import Exit


def write_first_policy(evidence: Sequence[Path], policy: Path) -> Exit:
    """Writes a policy that asks for the cells of evidence, and says what it leaves to do.

    Raises:
        UsageError: if there is a file of this name already, or it cannot be written.
    """
    from lossgate.base.errors import UsageError
    from lossgate.evidence.gather import gather
    from lossgate.gate.init_policy import first_policy

    if policy.exists():
        raise UsageError(f"gate --init: {policy} is there already; name another file with --policy, or remove it")
    gathered = gather(evidence)
    cells = gathered.newest.values()
    results = [result for of_cell in gathered.cells.values() for result in of_cell]
    text = first_policy(results, gathered.runs.values(), _examples(policy))
    try:
        with policy.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--policy {policy}: can't be written: {error.strerror}") from None
    count = "the one cell" if len(cells) == 1 else f"the {len(cells)} cells"
    print(f"wrote {policy}, which asks for {count} of the evidence")
    if any(cell.known_failure is not None for cell in cells):
        print("fill in issue, owner and expires of each known failure before you use it")
    if failing := sum(cell.verdict != "AGREE" and not cell.expected for cell in cells):
        print(f"the gate is closed now: {failing} of them {'does' if failing == 1 else 'do'} not agree")
    if gathered.damaged or gathered.contradictory:
        print(f"the gate is closed now: {len(gathered.damaged) + len(gathered.contradictory)} lines are no evidence")
    return Exit.AGREE


_LARGEST_EXAMPLE = 1 << 20
"""Files that are larger are no failure files: those are a few kilobytes."""


def _examples(policy: Path) -> dict[str, Path]:
    """Returns the JSON files below the working folder by their SHA-256, as the policy would name
    them.
    """
    folder = policy.resolve().parent
    found: dict[str, Path] = {}
    for inside, folders, files in os.walk("."):
        folders[:] = sorted(name for name in folders if name == ".lossgate" or not name.startswith("."))
        for name in sorted(files):
            file = Path(inside, name)
            with suppress(OSError):  # a file that can't be read is no example
                if file.suffix == ".json" and file.is_file() and file.stat().st_size <= _LARGEST_EXAMPLE:
                    found[sha256(file.read_bytes()).hexdigest()] = Path(os.path.relpath(file, folder))
    return found
