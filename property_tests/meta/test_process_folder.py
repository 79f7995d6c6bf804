# SPDX-License-Identifier: Apache-2.0
"""Temporary folders of processes that are killed leave nothing behind."""

import subprocess
import sys
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest

from lossgate.base.own_process import new_folder, process_folder, remove_folder, take_folder
from lossgate.engine.child import Child


def test_a_folder_is_removed_while_others_make_files_in_it(tmp_path: Path) -> None:
    """They stop when it is gone, as a rank does that meets others there."""
    for turn in range(20):
        folder, busy = tmp_path / str(turn), Event()
        folder.mkdir()

        def fill(folder: Path = folder, busy: Event = busy) -> None:
            try:
                for number in count():
                    (folder / str(number)).touch()
                    busy.set()
            except FileNotFoundError:
                pass

        writers = [Thread(target=fill) for _ in range(2)]
        for writer in writers:
            writer.start()
        busy.wait()
        remove_folder(str(folder))
        for writer in writers:
            writer.join()
        assert not folder.exists()


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    remove_folder(str(tmp_path / "gone"))


def test_a_process_has_one_folder_or_the_one_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.base.own_process._of_this_process", [])
    take_folder("given")
    assert process_folder() == process_folder() == "given"
    monkeypatch.setattr("lossgate.base.own_process._of_this_process", [])
    made = process_folder()
    assert process_folder() == made
    assert Path(made).is_dir()
    remove_folder(made)


def test_a_process_that_ends_removes_its_folder() -> None:
    script = "from lossgate.base.own_process import new_folder; print(new_folder())"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(made).name.startswith("lossgate-")
    assert not Path(made).exists()


def test_a_worker_that_is_killed_leaves_no_folder() -> None:
    """It may be killed before its ranks have started, and then only its parent can remove it."""
    worker = Child()
    Path(worker.folder, "of its ranks").mkdir()
    worker.end()
    assert not Path(worker.folder).exists()


def test_a_folder_is_new() -> None:
    one, other = new_folder(), new_folder()
    assert one != other
    remove_folder(one)
    remove_folder(other)
