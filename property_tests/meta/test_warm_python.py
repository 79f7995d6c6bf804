# SPDX-License-Identifier: Apache-2.0
"""Warm commands do what Python does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from property_tests.warm_python import warm_commands

PYTHON = ("python", "-c")


def run(folder: Path, *command: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    name, *arguments = command
    given = {**os.environ, **environment}
    program = [warm_commands() / name, *arguments]
    return subprocess.run(program, cwd=folder, input=stdin, env=given, capture_output=True, text=True, timeout=60)


def test_how_it_ends(tmp_path: Path) -> None:
    assert run(tmp_path, *PYTHON, "import sys; sys.exit(3)").returncode == 3
    raised = run(tmp_path, *PYTHON, "1 / 0")
    assert (raised.returncode, raised.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    said = run(tmp_path, *PYTHON, "import sys; sys.exit('no')")
    assert (said.returncode, said.stderr) == (1, "no\n")
    assert run(tmp_path, *PYTHON, "import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    late = run(tmp_path, *PYTHON, "import atexit; atexit.register(print, 'late'); print('early')")
    assert late.stdout == "early\nlate\n"


def test_what_it_is_given(tmp_path: Path) -> None:
    shown = "import os, sys; print(os.getcwd(), sys.argv[1:], sys.stdin.read(), os.environ['OWN'], __name__)"
    expected = f"{tmp_path} ['a', 'b'] in out __main__\n"
    assert run(tmp_path, *PYTHON, shown, "a", "b", stdin="in", OWN="out").stdout == expected
    (tmp_path / "own.py").write_text(shown)
    assert run(tmp_path, "python", "own.py", "a", "b", stdin="in", OWN="out").stdout == expected
    assert run(tmp_path, "python", "-m", "own", "a", "b", stdin="in", OWN="out").stdout == expected
    assert run(tmp_path, "python", "-", stdin="print(__name__)").stdout == "__main__\n"
    (tmp_path / "elsewhere").mkdir()
    found = run(tmp_path / "elsewhere", *PYTHON, "import own", stdin="in", OWN="out", PYTHONPATH=str(tmp_path))
    assert found.stdout.startswith(f"{tmp_path}/elsewhere []")


def test_nothing_of_the_tests_can_be_imported(tmp_path: Path) -> None:
    assert "No module named 'property_tests'" in run(tmp_path, *PYTHON, "import property_tests").stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_command(tmp_path: Path, number: int) -> None:
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([warm_commands() / "python", "-c", text], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        process = int(command.stdout.readline())
        command.send_signal(number)
        assert command.wait(60) == -number
        deadline = time.monotonic() + 60
        while _lives(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_torch_is_loaded_on_linux(tmp_path: Path) -> None:
    loaded = run(tmp_path, *PYTHON, "import sys; print('torch' in sys.modules)").stdout
    assert loaded == f"{sys.platform == 'linux'}\n"
