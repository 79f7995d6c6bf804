# SPDX-License-Identifier: Apache-2.0
"""10,000 mutated files of evidence and policies: the gate never opens where it was closed, and
never fails in another way than by an error of use.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec
import pytest

from lossgate.base.errors import UsageError
from lossgate.evidence.gather import gather
from lossgate.evidence.records import Record
from lossgate.evidence.sealed import seal
from lossgate.gate.decide import decide
from lossgate.gate.policy import load_policy
from property_tests.meta.gate_decisions.decided import CELLS, FROZEN, KNOWN, NOW, RULES, declared
from property_tests.meta.made_evidence import cell, disagreeing, inconclusive, whole_run

EVIDENCE: dict[str, tuple[Sequence[Record], bool]] = {
    "good": (whole_run(CELLS), True),
    "known failure": (whole_run([cell(), declared()]), True),
    "disagrees": (whole_run([cell(), disagreeing(layout="tp=2")]), False),
    "inconclusive": (whole_run([cell(), inconclusive(layout="tp=2")]), False),
    "missing": (whole_run([cell()]), False),
    "stopped": (whole_run(CELLS)[:-1], False),
    "old": (whole_run([msgspec.structs.replace(c, time="2026-01-01T00:00:00+00:00") for c in CELLS]), False),
    "contradictory": ([*whole_run(CELLS), *whole_run([inconclusive()], run="run-2")], False),
}
"""Files, and whether the gate is open for them."""

CLOSED_BY_ANY_POLICY = ("disagrees", "stopped", "contradictory")
"""What a policy can't let through. The others hang on a number or a name in it, such as the
greatest age: a mutated policy that allows more is a good policy."""

ALPHABET = b'"{}[],:.0123456789eE+-= \n\r\\nulltruefalse\x00\xff'


def cut(text: bytes, random: Random) -> bytes:
    start = random.randrange(len(text))
    return text[:start] + text[start + random.choice([1, 2, 10, 100, 1000]) :]


def truncate(text: bytes, random: Random) -> bytes:
    return text[: random.randrange(len(text))]


def flip(text: bytes, random: Random) -> bytes:
    at = random.randrange(len(text))
    return text[:at] + bytes([random.choice(ALPHABET)]) + text[at + 1 :]


def insert(text: bytes, random: Random) -> bytes:
    at = random.randrange(len(text))
    return text[:at] + bytes(random.choices(ALPHABET, k=random.randrange(1, 9))) + text[at:]


def on_lines(change: Callable[[list[bytes], int, Random], None]) -> Callable[[bytes, Random], bytes]:
    def mutate(text: bytes, random: Random) -> bytes:
        lines = text.splitlines(keepends=True)
        change(lines, random.randrange(len(lines)), random)
        return b"".join(lines)

    return mutate


def swap(lines: list[bytes], at: int, random: Random) -> None:
    other = random.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


def glue(lines: list[bytes], at: int, random: Random) -> None:
    lines[at] = lines[at].rstrip(b"\n")


def reseal(lines: list[bytes], at: int, random: Random) -> None:
    """Changes a number or a word in a line, and seals it anew, as who forges it would."""
    try:
        values = msgspec.json.decode(lines[at])
    except msgspec.MsgspecError:
        return
    if isinstance(values, dict) and values:
        name = random.choice(sorted(values))
        values.pop("digest", None)
        values[name] = random.choice([None, 0, -1, 1e308, "", "AGREE", [], {}, [None], {"a": [1]}, True])
        lines[at] = seal(values) + b"\n"  # type: ignore[arg-type]


MUTATIONS = (
    cut,
    truncate,
    flip,
    flip,
    insert,
    on_lines(lambda lines, at, _: lines.pop(at)),  # type: ignore[arg-type, return-value]
    on_lines(lambda lines, at, _: lines.insert(at, lines[at])),
    on_lines(swap),
    on_lines(glue),
)


def mutated(text: bytes, random: Random) -> bytes:
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        text = random.choice(MUTATIONS)(text, random) or b"\n"
    return text


def opens(folder: Path, evidence: bytes, policy: bytes) -> bool:
    """Returns whether the gate is open. Raises all but errors of use."""
    (folder / "gate.toml").write_bytes(policy)
    (folder / "out.jsonl").write_bytes(evidence)
    try:
        return decide(gather([folder / "out.jsonl"]), load_policy(folder / "gate.toml"), NOW).passes
    except UsageError:
        return False


def text_of(name: str) -> bytes:
    return b"".join(seal(record) + b"\n" for record in EVIDENCE[name][0])


def policy_for(name: str) -> bytes:
    return (RULES + KNOWN if name == "known failure" else RULES).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "frozen.json").write_bytes(FROZEN)
    return tmp_path


@pytest.mark.parametrize("name", EVIDENCE)
def test_untouched_files_are_judged_as_expected(folder: Path, name: str) -> None:
    assert opens(folder, text_of(name), policy_for(name)) == EVIDENCE[name][1]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", EVIDENCE)
def test_mutated_evidence_opens_no_gate(folder: Path, name: str) -> None:
    """7,200 files."""
    random, text, policy, may_open = Random(name), text_of(name), policy_for(name), EVIDENCE[name][1]
    opened = sum(opens(folder, mutated(text, random), policy) for _ in range(900))
    assert opened == 0 or may_open


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", EVIDENCE)
def test_forged_evidence_is_no_crash(folder: Path, name: str) -> None:
    """2,000 files whose digests are right, and whose fields are not."""
    random, text = Random(name), text_of(name)
    for _ in range(250):
        opens(folder, on_lines(reseal)(text, random), policy_for(name))


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", EVIDENCE)
def test_mutated_policies_open_no_gate(folder: Path, name: str) -> None:
    """2,000 policies."""
    random, text, policy = Random(name), text_of(name), policy_for(name)
    opened = sum(opens(folder, text, mutated(policy, random)) for _ in range(250))
    assert opened == 0 or name not in CLOSED_BY_ANY_POLICY


def test_a_mutation_is_seen() -> None:
    """Nearly all mutations close the gate: those that do not swap, repeat or add empty lines."""
    assert len({mutated(text_of("good"), Random(seed)) for seed in range(100)}) > 80


def test_digests_are_of_the_mutated_bytes(folder: Path) -> None:
    (folder / "out.jsonl").write_bytes(mutated(text_of("good"), Random(0)))
    (file,) = gather([folder / "out.jsonl"]).files
    assert file.sha256 == sha256((folder / "out.jsonl").read_bytes()).hexdigest()
