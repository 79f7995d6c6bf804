# SPDX-License-Identifier: Apache-2.0
"""Tests of our own release gate: ``ci/gate.toml`` asks for the cells that ``ci/gate`` verifies, and
evidence of them that is damaged in any way closes it.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell_record import CellKey
from lossgate.engine.plan import Selection, plan
from lossgate.engine.recorded import key_of
from lossgate.engine.settings import load_settings
from lossgate.evidence.gather import gather
from lossgate.gate.decide import decide
from lossgate.gate.gate_verdict import GateReason, GateVerdict
from lossgate.gate.policy import Policy, load_policy
from lossgate.gate.policy_patterns import KnownCells
from property_tests.meta.made_evidence import cell, whole_run, write

ROOT = Path(__file__).parents[2]
POLICY = load_policy(ROOT / "ci/gate.toml")
SMALL = load_policy(ROOT / "ci/small_gate.toml")
NOW = datetime(2026, 11, 20, 18, tzinfo=UTC)
FULL, ONE_DTYPE = "--matrix full", '-k "float32 or (logprobs_sequence_parallel and bfloat16)"'


def verified(flags: str) -> list[CellKey]:
    """Returns the cells that ``ci/gate`` verifies."""
    text = (ROOT / "ci/gate").read_text()
    command = re.search(r"lossgate verify (\S+) --profile (\w+) --ranks (\d) \"\$\{cells\[@\]\}\"", text)
    assert command is not None
    assert f"cells=({flags})" in text
    settings = load_settings(command[2], ROOT, ranks=int(command[3]), matrix="full" if flags == FULL else None)
    cells = plan(load_candidates(str(ROOT / command[1])), settings)
    return [key_of(one) for one in (cells if flags == FULL else Selection(flags.split('"')[1]).take(cells))]


KEYS = verified(FULL)


@pytest.mark.parametrize(("policy", "flags"), [(POLICY, FULL), (SMALL, ONE_DTYPE)])
def test_a_policy_asks_for_the_cells_that_are_verified(policy: Policy, flags: str) -> None:
    keys = verified(flags)
    known = KnownCells(keys)
    demands = [demand for rule in policy.require for demand in rule.demands(known)]
    assert [str(demand) for demand in demands if not demand.is_met] == []
    assert sorted(key for demand in demands for key in demand.cells) == sorted(keys)
    assert all(demand.key is not None for demand in demands), "each cell is named, so that none can vanish unseen"


def test_the_small_gate_asks_for_no_less_of_a_cell() -> None:
    assert SMALL.evidence == POLICY.evidence
    assert {(rule.min_problems, rule.largest_mde) for rule in (*SMALL.require, *POLICY.require)} == {(12, 0.01)}
    assert set(verified(ONE_DTYPE)) < set(KEYS)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Evidence in which every cell agrees: the start of a run, its cells, its end."""
    records = [
        cell(**dict(zip(CellKey.__struct_fields__, msgspec.structs.astuple(key), strict=True)), problems=12)
        for key in KEYS
    ]
    run = whole_run(records, versions={"lossgate": "0.1.0", "torch": "2.13.0", "python": "3.11.7"})
    return write(tmp_path_factory.mktemp("evidence") / "out.jsonl", run).read_bytes().splitlines(keepends=True)


def gated(folder: Path, lines: list[bytes], now: datetime = NOW) -> GateVerdict:
    (folder / "out.jsonl").write_bytes(b"".join(lines))
    return decide(gather([folder / "out.jsonl"]), POLICY, now)


def test_good_evidence_opens_it(tmp_path: Path, lines: list[bytes]) -> None:
    assert gated(tmp_path, lines).passes


@pytest.mark.slow
def test_each_cell_is_missed(tmp_path: Path, lines: list[bytes]) -> None:
    for number, key in enumerate(KEYS, 1):
        verdict = gated(tmp_path, [line for i, line in enumerate(lines) if i != number])
        missed = [blocker.message for blocker in verdict.blockers if blocker.cell == key]
        assert any("asks for it. Verify it, or change the policy" in message for message in missed), key
        assert any("planned it, but has no result of it" in message for message in missed), key


CHANGES: dict[str, tuple[Callable[[bytes], bytes], GateReason]] = {
    "a verdict is flipped": (lambda line: line.replace(b'"AGREE"', b'"DISAGREE"'), GateReason.DAMAGED),
    "cut in half": (lambda line: line[: len(line) // 2], GateReason.DAMAGED),
    "cut in half, with a line end": (lambda line: line[: len(line) // 2] + b"\n", GateReason.DAMAGED),
    "a number is edited": (lambda line: line.replace(b'"problems":12', b'"problems":13'), GateReason.DAMAGED),
    "another digit": (lambda line: line.replace(b"e-8", b"e-9", 1), GateReason.DAMAGED),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", [1, 50, len(KEYS)])
def test_a_changed_line_closes_it(tmp_path: Path, lines: list[bytes], change: str, number: int) -> None:
    mutate, kind = CHANGES[change]
    mutated = mutate(lines[number])
    assert mutated != lines[number]
    verdict = gated(tmp_path, [mutated if i == number else line for i, line in enumerate(lines)])
    assert kind in {blocker.reason for blocker in verdict.blockers}


def test_old_evidence_closes_it(tmp_path: Path, lines: list[bytes]) -> None:
    (blocker,) = gated(tmp_path, lines, NOW.replace(day=22)).blockers
    assert blocker.reason is GateReason.STALE
    assert "but the policy allows evidence of at most 1 day. Verify again" in blocker.message
