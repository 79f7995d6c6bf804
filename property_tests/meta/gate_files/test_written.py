# SPDX-License-Identifier: Apache-2.0
"""Tests of writing a report: whole, or not at all."""

import io
import os
import re
import stat
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from lossgate.base.errors import UsageError
from lossgate.reports.written import write_file

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def test_a_file_is_written_in_utf8_with_its_line_ends(tmp_path: Path) -> None:
    write_file(tmp_path / "new.txt", "é\n\r\n")
    assert (tmp_path / "new.txt").read_bytes() == b"\xc3\xa9\n\r\n"
    assert os.listdir(tmp_path) == ["new.txt"]


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "old.txt"
    file.write_text("old and longer")
    file.chmod(0o640)
    write_file(file, "new")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "like").touch()
    write_file(tmp_path / "new", "")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "like").stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_the_old_file_stays_if_the_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "old.txt"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_file(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["old.txt"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere/new.txt", "No such file or directory"),
        ("file/new.txt", "Not a directory"),
        ("folder", "Is a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_the_error_names_option_path_and_reason(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=rf"^--junit {re.escape(str(tmp_path / path))}: can't be written: .*{reason}"):
        write_file(tmp_path / path, "", option="--junit")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "old").chmod(0o444)
    with pytest.raises(UsageError, match="Permission denied"):
        write_file(tmp_path / "old", "new")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_device_is_written_directly() -> None:
    before = os.stat("/dev/full")
    with pytest.raises(UsageError, match=r"^--output /dev/full: can't be written: No space left on device"):
        write_file(Path("/dev/full"), "text")
    assert os.path.samestat(before, os.stat("/dev/full"))


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_a_dash_is_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print("before")
    write_file(Path("-"), "é\n")
    assert capfdbinary.readouterr().out == b"before\n\xc3\xa9\n"


def test_standard_output_may_be_a_stream_of_text() -> None:
    with redirect_stdout(io.StringIO()) as out:
        write_file(Path("-"), "é\n")
    assert out.getvalue() == "é\n"


def test_a_closed_standard_output_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Closed()))
    with pytest.raises(UsageError, match=r"^--html -: can't be written: Broken pipe"):
        write_file(Path("-"), "text", option="--html")
