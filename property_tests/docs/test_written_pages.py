# SPDX-License-Identifier: Apache-2.0
"""The pages of commands, of names in Python and of adapters are as the code has them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import lossgate
from lossgate.cli import app

from .markdown import ROOT

WRITER = ROOT / "docs/reference/write.py"


def checked(writer: Path) -> tuple[int, str]:
    """Returns the exit code and the output of a check of the pages beside a writer."""
    done = subprocess.run([sys.executable, writer, "--check"], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_they_are_up_to_date() -> None:
    assert checked(WRITER) == (0, "")


def test_pages_that_are_not_are_named(tmp_path: Path) -> None:
    writer = shutil.copy(WRITER, tmp_path)
    (tmp_path / "commands.md").write_text((WRITER.parent / "commands.md").read_text() + "more\n")
    code, said = checked(Path(writer))
    assert (code, said.count("is not as python docs/reference/write.py writes it")) == (1, 3)  # two are missing


def test_every_command_and_name_is_there() -> None:
    commands, names = ((ROOT / f"docs/reference/{page}.md").read_text() for page in ("commands", "python"))
    assert {name for name in app if name.isalpha()} <= set(re.findall(r"^## lossgate (\w+)$", commands, re.MULTILINE))
    assert set(lossgate.__all__) == set(re.findall(r"^## (\w+)$", names, re.MULTILINE))
