# SPDX-License-Identifier: Apache-2.0
"""The pages of commands and of names in Python are as the code has them."""

import re
import subprocess
import sys

import lossgate
from lossgate.cli import app

from .markdown import ROOT

WRITER = ROOT / "docs/reference/write.py"


def test_they_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, WRITER, "--check"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_page_that_is_not_is_seen(tmp_path: object) -> None:
    namespace: dict[str, object] = {"__name__": "writer", "__file__": str(tmp_path) + "/write.py"}
    exec(compile(WRITER.read_text(), str(WRITER), "exec"), namespace)
    assert namespace["main"](["--check"]) == 1  # type: ignore[operator]


def test_every_command_and_name_is_there() -> None:
    commands, names = ((ROOT / f"docs/reference/{page}.md").read_text() for page in ("commands", "python"))
    assert {name for name in app if name.isalpha()} <= set(re.findall(r"^## lossgate (\w+)$", commands, re.MULTILINE))
    assert set(lossgate.__all__) == set(re.findall(r"^## (\w+)$", names, re.MULTILINE))
