# SPDX-License-Identifier: Apache-2.0
"""Tests of memory snapshots, with a recorder that replaces that of CUDA.

With a GPU, CUDA's own recorder is tested too.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_losses import MemorySnapshots


class Recorder:
    """Logs the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, max_entries: int) -> None:
        self.calls.append(f"start {max_entries}")

    def dump(self, file: Path) -> None:
        self.calls.append(f"dump {file.name}")
        file.write_text("")

    def stop(self) -> None:
        self.calls.append("stop")


def snapshots(recorder: Recorder, folder: Path, **given: Any) -> MemorySnapshots:
    return MemorySnapshots(directory=folder / "snapshots", make_recorder=lambda: recorder, **given)


def test_one_file_for_each_step_named_by_step_and_rank(tmp_path: Path) -> None:
    recorder = Recorder()
    memory = snapshots(recorder, tmp_path, profile_steps=[0, 2], max_entries=50, ranks={"dp": 1, "cp": 2, "tp": 3})
    for step in range(4):
        with memory.step(step):
            recorder.calls.append(f"train {step}")
    names = [f"step{step}_dp1_cp2_tp3_pp0.pickle" for step in (0, 2)]
    assert recorder.calls == [
        *("start 50", "train 0", f"dump {names[0]}", "stop", "train 1"),
        *("start 50", "train 2", f"dump {names[1]}", "stop", "train 3"),
    ]
    assert sorted(file.name for file in (tmp_path / "snapshots").iterdir()) == names


def test_callbacks(tmp_path: Path) -> None:
    recorder = Recorder()
    memory = snapshots(recorder, tmp_path, profile_steps=[1])
    for step in range(3):
        memory.on_step_begin(step)
        memory.on_step_end(step + 5)  # No such step has begun.
        memory.on_step_end(step)
    assert recorder.calls == ["start 100000", "dump step1_dp0_cp0_tp0_pp0.pickle", "stop"]


def test_a_step_that_fails_leaves_its_file_and_its_error(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(torch.OutOfMemoryError), snapshots(recorder, tmp_path).step(0):
        raise torch.OutOfMemoryError("out of memory")
    assert recorder.calls[1:] == ["dump step0_dp0_cp0_tp0_pp0_failed.pickle", "stop"]


def test_recording_stops_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    recorder = Recorder()
    (tmp_path / "snapshots").write_text("in the way")
    with pytest.raises(FileExistsError), snapshots(recorder, tmp_path).step(0):
        pass
    assert recorder.calls[-1] == "stop"


def test_without_a_section_nothing_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder()
    memory = MemorySnapshots.from_config(None, make_recorder=lambda: recorder)
    with memory.step(0):
        pass
    assert recorder.calls == []
    configured = MemorySnapshots.from_config({"profile_steps": [3], "max_entries": 7, "directory": str(tmp_path)})
    assert (configured.profile_steps, configured.max_entries, Path(configured.directory)) == ([3], 7, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_it_warns_and_trains_on(tmp_path: Path) -> None:
    memory = MemorySnapshots(directory=tmp_path)
    with pytest.warns(RuntimeWarning, match="no memory snapshot of step 0: CUDA is not available"), memory.step(0):
        trained = True
    assert trained
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_with_cuda(tmp_path: Path) -> None:
    with MemorySnapshots(directory=tmp_path).step(0):
        torch.ones(1000, device="cuda")
    (file,) = tmp_path.iterdir()
    assert pickle.loads(file.read_bytes())["device_traces"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profile_steps": "01"}, "profile_steps '01': expected step numbers from 0"),
        ({"profile_steps": [-1]}, r"profile_steps \[-1\]: expected step numbers from 0"),
        ({"profile_steps": 3}, "profile_steps 3: expected step numbers from 0"),
        ({"max_entries": 0}, "max_entries 0: expected a positive number"),
        ({"ranks": {"ep": 1}}, "ranks ep: expected dp, cp, tp, pp"),
    ],
)
def test_bad_settings_raise_errors_that_name_them(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySnapshots(**given)
    if "ranks" not in given:
        with pytest.raises(ValueError, match=message):
            MemorySnapshots.from_config(given)


def test_an_unknown_setting_raises_an_error() -> None:
    with pytest.raises(ValueError, match="memory snapshots: steps: expected profile_steps, max_entries, directory"):
        MemorySnapshots.from_config({"steps": [0]})
