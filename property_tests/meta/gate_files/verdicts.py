# SPDX-License-Identifier: Apache-2.0
"""Verdicts of a gate, made by hand."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import asdict

from lossgate.engine.cell_record import SCHEMA, CellKey, Failure, PropertyRecord
from lossgate.evidence.reader import Where
from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import Blocker, Committed, Digested, GatedCell, GateReason, GateVerdict

COMMIT = "0123456789abcdef0123456789abcdef01234567"
POLICY = Digested(file="ci/gate.toml", sha256="a" * 64)
EVIDENCE = Digested(file="out/evidence.jsonl", sha256="b" * 64)
SOURCE = Digested(file="ci/kernels.py", sha256="c" * 64)
ISSUE = "https://example.org/issues/7"
HOSTILE = (
    "a|b `c` ``d`` <script>x</script> <!-- @here @org/team #1 \x00\x1b[31m \u202e]]> "
    "& \"' {0} [x](https://evil.example)"
    " www.evil.example ~~e~~ *f* _g_ $h$ \\| \udcff \ufffe é 漢 😀\r\n- item\n# head\n```\n</details>\x85\u2028end`"
)
"""A text that breaks every format in which it stands bare."""


def key(candidate: str = "kernel", layout: str = "single", **changed: str) -> CellKey:
    parts = {"property": "agreement", "dtype": "float32", "world": "simulated", "device": "cpu", **changed}
    return CellKey(candidate, layout=layout, **parts)


def summary(of: CellKey, verdict: Any = "AGREE", **changed: Any) -> CellSummary:
    whole: dict[str, Any] = {
        "schema": SCHEMA,
        **asdict(of),
        "needs_adequacy": True,
        "where": Where(EVIDENCE.file, 3),
        "digest": "d" * 64,
        "run": "0123456789abcdef",
        "spec": "nll",
        "head": "logits",
        "source": f"{SOURCE.file}:{of.candidate}",
        "source_digest": SOURCE.sha256,
        "verdict": verdict,
        "reasons": () if verdict == "AGREE" else ("loss: 1.01 times the reference",),
        "problems": 12,
        "comparisons": 24,
        "margin": 0.25,
        "mde": 1e-6,
        "failure": failure() if verdict == "DISAGREE" else None,
        "replay": "lossgate replay failures/one.json" if verdict == "DISAGREE" else None,
        "known_failure": None,
        "seconds": 1.5,
        "time": "2026-01-31T12:00:00+00:00",
        **changed,
    }
    return CellSummary(**whole)


EXEMPT = (PropertyRecord(name="masked-nan", exempt="it multiplies"),)
"""A property from which a candidate is exempt."""


def failure(**changed: Any) -> Failure:
    whole: dict[str, Any] = {
        "problem": {"spec": "nll"},
        "description": "3 tokens in 1 sequence [3]",
        "findings": ("loss: 1.01 times the reference",),
        "symptoms": ("loss",),
        **changed,
    }
    return Failure(**whole)


def agreeing(of: CellKey) -> GatedCell:
    return GatedCell(key=of, summary=summary(of))


def blocked(of: CellKey, kind: GateReason, message: str = "What is wrong. What to do.", where: str = "") -> GatedCell:
    """Returns a cell with one blocker; a missing one has no summary."""
    verdict = {GateReason.DISAGREE: "DISAGREE", GateReason.INCONCLUSIVE: "INCONCLUSIVE"}.get(kind, "AGREE")
    result = None if kind is GateReason.MISSING else summary(of, verdict)
    return GatedCell(key=of, summary=result, blockers=(Blocker(reason=kind, message=message, cell=of, where=where),))


def excused(of: CellKey, issue: str = ISSUE) -> GatedCell:
    return GatedCell(key=of, summary=summary(of, "DISAGREE"), excused=issue)


def breaking(of: CellKey, *blockers: Blocker) -> GatedCell:
    """Returns a cell whose numbers agree, and which breaks a promise."""
    broken = PropertyRecord(name="masked-nan", problems=1, findings=("loss: not finite",), on="3 tokens")
    return GatedCell(key=of, summary=summary(of, "DISAGREE", numbers="AGREE", properties=(broken,)), blockers=blockers)


def verdict(cells: Iterable[GatedCell], *general: Blocker, **changed: Any) -> GateVerdict:
    cells = tuple(sorted(cells, key=lambda cell: cell.key))
    whole: dict[str, Any] = {
        "general": general,
        "cells": cells,
        "policy": POLICY,
        "evidence": (EVIDENCE,),
        "commits": (COMMIT,),
        "committed": Committed.YES,
        "sources": (SOURCE,),
        "versions": {"torch": ("2.13.0",), "lossgate": ("0.1.0",)},
        **changed,
    }
    return GateVerdict(**whole)


def of_gate(kind: GateReason, message: str = "What is wrong. What to do.", where: str = "") -> Blocker:
    return Blocker(reason=kind, message=message, where=where)


def hostile() -> GateVerdict:
    """A closed gate in which each text is hostile."""
    first, second = key(HOSTILE, HOSTILE, property=HOSTILE, dtype=HOSTILE), key(HOSTILE, "x", world=HOSTILE)
    failed = failure(description=HOSTILE, findings=(HOSTILE,), symptoms=(HOSTILE,))
    result = summary(
        first,
        "DISAGREE",
        failure=failed,
        replay=HOSTILE,
        source=f"{HOSTILE}.py:{HOSTILE}",
        where=Where(HOSTILE, 2),
        seconds=float("nan"),
    )
    blocker = Blocker(reason=GateReason.DISAGREE, message=HOSTILE, cell=first, where=HOSTILE)
    file = Digested(file=HOSTILE, sha256="e" * 64)
    return verdict(
        [GatedCell(key=first, summary=result, blockers=(blocker,)), excused(second, HOSTILE)],
        of_gate(GateReason.MIXED, HOSTILE, HOSTILE),
        policy=file,
        evidence=(file,),
        sources=(file,),
        commits=(HOSTILE,),
        versions={HOSTILE: (HOSTILE,)},
    )


def many(count: int = 30_000) -> GateVerdict:
    """A closed gate with a blocker in each of many cells."""
    kinds = list(GateReason)
    return verdict(blocked(key(f"kernel{n % 7}", f"dp={n}"), kinds[n % len(kinds)]) for n in range(count))


VERDICTS: dict[str, GateVerdict] = {
    "open": verdict([agreeing(key()), agreeing(key(layout="tp=2", device="cuda", world="gloo"))]),
    "open, with an excused known failure": verdict([agreeing(key()), excused(key(layout="tp=2"))]),
    "open, with a cell that nobody asks for": verdict(
        [agreeing(key()), GatedCell(key=key("other"), summary=summary(key("other"), "INCONCLUSIVE"), required=False)]
    ),
    "open, with a broken promise that the policy lets pass": verdict([agreeing(key()), breaking(key("other"))]),
    "closed, without cells": verdict([], of_gate(GateReason.EMPTY), evidence=(), versions={}),
    "closed by a cell that is not there": verdict([blocked(key(), GateReason.MISSING, "It's not there.")]),
    "hostile": hostile(),
    **{f"closed: {kind}": verdict([agreeing(key())], of_gate(kind, where=f"{POLICY.file}:4")) for kind in GateReason},
    **{f"a cell is closed: {kind}": verdict([blocked(key(), kind), agreeing(key("other"))]) for kind in GateReason},
}
"""Verdicts of every sort, by name."""
