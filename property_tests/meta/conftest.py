# SPDX-License-Identifier: Apache-2.0
"""What tests of the command line share."""

from pathlib import Path

import pytest

from lossgate.cli import main
from property_tests.meta.command_line import KERNELS, Done, Lossgate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of kernels."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    return tmp_path


@pytest.fixture
def lossgate(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lossgate:
    """Returns ``lossgate(*arguments)``, which runs a command in this process."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as done:
            main(arguments)
        return Done(int(done.value.code or 0), *capsys.readouterr())

    return run
