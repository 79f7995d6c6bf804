# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: one line, evidence kept, nothing left running or in the temporary folder."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest

from property_tests.meta.evidence_lines import cells_in

ROOT = Path(__file__).parents[2]


def processes_of(session: int) -> list[int]:
    """Returns the processes of a session that have not ended."""
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[2]) == session and state != "Z":
            found.append(int(status.parent.name))
    return found


@pytest.mark.slow(but=1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("world", "jobs", "ends"),
    [
        ("simulated", 1, signal.SIGTERM),
        ("simulated", 2, signal.SIGINT),
        ("gloo", 1, signal.SIGINT),
        ("gloo", 2, signal.SIGTERM),
    ],
)
def test_what_a_signal_leaves(tmp_path: Path, world: str, jobs: int, ends: signal.Signals) -> None:
    evidence, temporary = tmp_path / "evidence.jsonl", Path(mkdtemp())  # sockets need a short path
    command = [sys.executable, "-m", "lossgate", "verify", "ci/candidates/ours.py", "--world", world, "--ranks", "2"]
    command += ["--jobs", str(jobs), "--evidence", str(evidence), "--failures", str(tmp_path)]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait = Random(f"{world} {ends} {jobs}")
    while run.poll() is None and not (evidence.exists() and len(evidence.read_bytes().splitlines()) > 1):
        time.sleep(0.01)
    time.sleep(wait.uniform(0, 2))
    run.send_signal(ends)
    _, last_words = run.communicate()
    (said,) = last_words.splitlines()
    assert run.returncode == 128 + ends
    found = re.fullmatch(rf"lossgate: stopped by {ends.name} after (\d+) of \d+ cells; their evidence is in (.*)", said)
    assert found is not None, said
    assert found[2] == str(evidence)
    assert len(cells_in(evidence)) == int(found[1]) > 0
    patience = time.monotonic() + 30
    while processes_of(run.pid) and time.monotonic() < patience:
        time.sleep(0.1)  # those that still load torch end when they find that nobody waits
    assert processes_of(run.pid) == []
    assert list(temporary.iterdir()) == []
    temporary.rmdir()


LEAVES = """
import multiprocessing, lossgate

@lossgate.candidate("nll", head="logprobs", dtypes=("float32",))
def leaves(inputs, options, mesh):
    global left
    left = multiprocessing.get_context("spawn").Semaphore()
    return -inputs.logprobs[inputs.mask].sum() / inputs.valid_tokens.clamp(min=1)
"""


@pytest.mark.slow
def test_a_semaphore_of_a_kernel_ends_with_its_process(tmp_path: Path) -> None:
    """Torch's compiler makes some. Python would warn of them."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    command = [sys.executable, "-m", "lossgate", "verify", "leaves.py", "--property", "no-grad", "--examples", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
