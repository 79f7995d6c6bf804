# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate gate`` as a user meets it: exit codes, files, bad use."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from property_tests.meta.command_line import Done, in_a_process
from property_tests.meta.made_evidence import COMMIT, cell, disagreeing, inconclusive, whole_run, write

NOW = "2026-11-20T18:00:00Z"
POLICY = 'schema = 1\n[[require]]\ncandidates = ["nll"]\n'
FILES = ("--junit", "gate.xml", "--sarif", "gate.sarif", "--markdown", "gate.md", "--statement", "gate.json")

Gate = Callable[..., Done]


@pytest.fixture
def gate(folder: Path, lossgate: Callable[..., Done]) -> Gate:
    """Returns ``gate(*arguments)``, beside a policy, and evidence that agrees, disagrees, or sees
    too little.
    """
    (folder / "gate.toml").write_text(POLICY)
    (folder / "typo.toml").write_text(f'{POLICY}keeps = ["temperatur"]\n')
    write(folder / "good.jsonl", whole_run([cell()]))
    write(folder / "bad.jsonl", whole_run([disagreeing()]))
    write(folder / "few.jsonl", whole_run([inconclusive()]))
    write(folder / "old.jsonl", whole_run([cell(time="2026-11-19T12:00:00+00:00")], run="old"))
    return lambda *arguments: lossgate("gate", *arguments)


@pytest.mark.parametrize(
    ("file", "code", "first"),
    [
        ("good.jsonl", 0, "OPEN: the evidence is what the policy asks for"),
        ("bad.jsonl", 1, "CLOSED: 1 reason"),
        ("few.jsonl", 3, "CLOSED: 1 reason"),
        ("/dev/null", 3, "CLOSED: 2 reasons"),
    ],
)
def test_exit_codes(gate: Gate, file: str, code: int, first: str) -> None:
    done = gate(file, "--now", NOW)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines()[0] == first


@pytest.mark.parametrize(("file", "code"), [("good.jsonl", 0), ("bad.jsonl", 1), ("few.jsonl", 3)])
def test_every_file_is_written_and_is_the_same_again(gate: Gate, folder: Path, file: str, code: int) -> None:
    pytest.importorskip("vl_convert")
    written: list[dict[str, bytes]] = []
    for _ in range(2):
        done = gate(
            file, *FILES, "--html", "gate.html", "--history", "old.jsonl", "--subject", "kernels.py", "--now", NOW
        )
        assert (done.returncode, done.stderr) == (code, "")
        written.append({name: (folder / name).read_bytes() for name in (*FILES[1::2], "gate.html")})
    assert written[0] == written[1]
    assert json.loads(written[0]["gate.json"])["predicate"]["result"] == ("FAILED" if code else "PASSED")
    assert all(written[0].values())


def test_the_order_of_files_does_not_matter(gate: Gate, folder: Path) -> None:
    gate("good.jsonl", "old.jsonl", "--statement", "one.json", "--now", NOW)
    gate("old.jsonl", "good.jsonl", "--statement", "two.json", "--now", NOW)
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "gate: no evidence named"),
        (["nowhere.jsonl"], "can't read nowhere.jsonl: No such file or directory"),
        (["x" * 5000], "can't read xxx"),
        (["good.jsonl", "--policy", "none.toml"], "none.toml"),
        (["good.jsonl", "--policy", "typo.toml"], "typo.toml:2: [[require]] keeps='temperatur': neither lossgate nor"),
        (["good.jsonl", "--commit", "HEAD"], '--commit HEAD: expected the whole hash of a commit; write --commit "$('),
        (["good.jsonl", "--commit", COMMIT[:12]], "expected the whole hash of a commit"),
        (["good.jsonl", "--now", "yesterday"], "--now yesterday: expected a time such as"),
        (["good.jsonl", "--now", "0001-01-01T00:00:00+23:59"], "expected a time such as"),
        (["good.jsonl", "--history", "old.jsonl"], "--history needs --html, the only file that shows history; add it"),
        (["good.jsonl", "--subject", "kernels.py"], "--subject needs --statement, the only file that names subjects"),
        (["good.jsonl", "--statement", "s.json", "--subject", "none.whl"], "--subject none.whl: can't be read"),
        (
            ["good.jsonl", "--junit", "good.jsonl"],
            "it would write over good.jsonl; name another file",
        ),
        (["good.jsonl", "--sarif", "gate.toml"], "it would write over gate.toml"),
        (["good.jsonl", "--junit", "x", "--sarif", "./x"], "--sarif x: it would write over --junit x"),
        (["good.jsonl", "--init", "--html", "x.html"], "--init writes a policy and judges nothing; leave --html out"),
        (["good.jsonl", "--init"], "gate --init: gate.toml exists already"),
        (["good.jsonl", "--junit", "no/folder.xml", "--now", NOW], "--junit no/folder.xml: can't be written"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_use_is_one_clear_line(gate: Gate, arguments: list[str], message: str) -> None:
    done = gate(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("lossgate: ")
    assert done.stderr.count("\n") == 1


def test_a_link_to_itself_is_a_file_that_cannot_be_read(gate: Gate, folder: Path) -> None:
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    done = gate("loop.jsonl")
    assert done.returncode == 2
    assert "can't read loop.jsonl" in done.stderr


def test_a_file_that_cannot_be_written_does_not_keep_others_from_being_written(gate: Gate, folder: Path) -> None:
    done = gate("bad.jsonl", "--junit", "no/folder.xml", "--sarif", "gate.sarif", "--now", NOW)
    assert done.returncode == 1, "the disagreement is graver"
    assert (folder / "gate.sarif").exists()


def test_the_files_are_written_though_nobody_reads_the_screen(gate: Gate, folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lossgate", "gate", "good.jsonl", "--now", NOW, "--markdown", "gate.md"]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=folder, text=True, timeout=300)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    assert (folder / "gate.md").read_text().startswith("## The gate is open")


def test_sarif_points_at_the_candidate(gate: Gate, folder: Path) -> None:
    (folder / "kernels.py").write_text(
        'import lossgate\n\n\n@lossgate.candidate("nll", head="logits")\ndef nll(): ...\n'
    )

    digest = sha256((folder / "kernels.py").read_bytes()).hexdigest()
    write(folder / "bad.jsonl", whole_run([disagreeing(source_digest=digest)]))
    gate("bad.jsonl", "--sarif", "gate.sarif", "--now", NOW)
    (result,) = json.loads((folder / "gate.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] > 1


def test_a_first_policy_opens_the_gate(gate: Gate) -> None:
    done = gate("good.jsonl", "--init", "--policy", "first.toml")
    assert (done.returncode, done.stdout) == (0, "wrote first.toml, which asks for the one cell of the evidence\n")
    assert gate("good.jsonl", "--policy", "first.toml", "--now", NOW).returncode == 0


def test_a_first_policy_says_what_closes_the_gate(gate: Gate) -> None:
    done = gate("bad.jsonl", "--init", "--policy", "first.toml")
    assert "the gate is closed now: 1 of them does not agree" in done.stdout


def test_the_process_needs_no_torch(gate: Gate, folder: Path) -> None:
    (folder / "torch.py").write_text("raise ImportError('no torch here')")
    done = in_a_process(folder, "gate", "good.jsonl", "--now", NOW, *FILES, "--subject", "kernels.py")
    assert (done.returncode, done.stderr) == (0, "")
