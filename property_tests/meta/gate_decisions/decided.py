# SPDX-License-Identifier: Apache-2.0
"""A gate with good evidence and a policy that it opens: tests change one thing of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from lossgate.engine.cell_record import CellRecord, KnownFailureRecord
from lossgate.evidence.gather import gather
from lossgate.evidence.records import Record
from lossgate.gate.decide import decide
from lossgate.gate.gate_verdict import GateReason, GateVerdict
from lossgate.gate.policy import load_policy
from property_tests.meta.made_evidence import (
    cell,
    disagreeing,
    write,
)

NOW = datetime(2026, 11, 20, 18, tzinfo=UTC)
"""Six hours after the runs of ``made_evidence``."""

RULES = """
schema = 1

[evidence]
max_age = "1 day"
unmodified = true

[[require]]
candidates = ["nll"]
layouts = ["single", "tp=2"]
dtypes = ["float32"]
min_problems = 3
"""

KNOWN = """
[[known_failure]]
candidate = "nll"
layout = "tp=2"
dtype = "float32"
name = "nll-1"
example = "frozen.json"
issue = "https://example.com/issues/1"
owner = "somebody"
expires = 2026-12-01
"""

FROZEN = b'{"examples": [{"symptoms": ["loss", "grad of hidden"]}]}'
FROZEN_DIGEST = sha256(FROZEN).hexdigest()
CELLS = (cell(), cell(layout="tp=2"))
SECOND = 1


@dataclass(frozen=True)
class Gate:
    """A folder with a policy and evidence."""

    folder: Path

    def decide(
        self, *files: Sequence[Record], rules: str = RULES, now: datetime = NOW, commit: str | None = None
    ) -> GateVerdict:
        """Decides about files, each with some records."""
        (self.folder / "gate.toml").write_text(rules)
        (self.folder / "frozen.json").write_bytes(FROZEN)
        paths = [write(self.folder / f"{number}.jsonl", records) for number, records in enumerate(files)]
        return decide(gather(paths), load_policy(self.folder / "gate.toml"), now, commit)


def reported(verdict: GateVerdict) -> list[tuple[GateReason, str]]:
    return [(blocker.reason, blocker.sentence) for blocker in verdict.blockers]


def only(verdict: GateVerdict) -> tuple[GateReason, str]:
    """Returns the one thing that keeps a gate closed."""
    (found,) = reported(verdict)
    return found


def declared(**changes: Any) -> CellRecord:
    """Returns the record of a cell whose candidate declares the known failure."""
    known = KnownFailureRecord(name="nll-1", example=FROZEN_DIGEST, expected=True)
    record = disagreeing(layout="tp=2", needs_adequacy=False, coverage={}, required=())
    return msgspec.structs.replace(
        record, **{"known_failure": msgspec.structs.replace(known, **changes.pop("known", {}))} | changes
    )
