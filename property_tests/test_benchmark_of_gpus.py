# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/gpu.py`` works as far as that shows without a GPU, and sees what it is there for."""

import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from rich.console import Console

from fused_losses import MemorySnapshots
from lossgate.declaration.candidate import Candidate
from property_tests.kernels.our_candidates import OURS


def console() -> Console:
    return Console(width=160)


def test_every_kernel_is_checked_and_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--small"])
    assert gpu.main() == 0
    shown = capsys.readouterr().out
    assert [name for name in OURS if f"agree     {name}, 1 problems" not in shown] == []
    assert [name for name in gpu.KERNELS if f"│ {name} " not in shown] == []
    assert "DISAGREE" not in shown
    assert "no snapshots: they are of CUDA's memory" in shown


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    shown = capsys.readouterr().out
    assert shown.startswith("no CUDA device: torch ")
    assert "nothing was checked" in shown
    assert len(shown.splitlines()) == 1


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = OURS["fused_vocab_parallel_cross_entropy"]

    def twice(inputs: Any, options: Any, mesh: Any) -> Any:
        return 2 * right.kernel(inputs, options, mesh)

    cells: list[tuple[Candidate, str, str]] = [(replace(right, kernel=twice), "float32", "cp=2,tp=2")]
    monkeypatch.setattr(gpu, "cells", lambda small: cells)
    assert not gpu.check("cpu", 2, False, console())
    shown = capsys.readouterr().out
    assert f"DISAGREE  {right.name}, 2 problems\n          float32 cp=2,tp=2; " in shown
    assert "1 kernels on cpu, 1 wrong" in shown


def test_all_kernels_run_in_all_dtypes_and_on_ranks() -> None:
    cells = gpu.cells(small=False)
    assert {(one.name, dtype, "single") for one in OURS.values() for dtype in one.dtypes} <= {
        (one.name, dtype, layout) for one, dtype, layout in cells
    }
    assert {one.name for one, _, layout in cells if layout == "cp=2,tp=2"} >= {"fused_linear_logprobs"}


# Snapshots


def event(action: str, size: int = 0) -> dict[str, Any]:
    return {"action": action, "size": size, "addr": 1}


def test_allocations_of_a_snapshot() -> None:
    trace = [event("segment_alloc", 99), event("alloc", 3), event("alloc", 5), event("free_requested", 3)]
    trace += [event("free_completed", 3), event("alloc", 2)]
    found = gpu.Allocations.of({"device_traces": [[], trace]})
    assert found == gpu.Allocations(number=3, largest=5, peak=8)


@pytest.mark.parametrize(("largest", "right"), [(8 * 32 * 4 - 1, True), (8 * 32 * 4, False), (None, False)])
def test_a_snapshot_shows_whether_logits_were_made(
    largest: int | None, right: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Recorder:
        def start(self, max_entries: int) -> None: ...

        def dump(self, file: Path) -> None:
            file.write_bytes(pickle.dumps({"device_traces": [[event("alloc", largest or 0)] * (largest is not None)]}))

        def stop(self) -> None: ...

    monkeypatch.setattr(gpu, "RECORDED", ((8, 4, 32), torch.float32))
    monkeypatch.setattr(gpu, "MemorySnapshots", partial(MemorySnapshots, make_recorder=Recorder))
    assert gpu.record("cpu", tmp_path, console()) is right
    assert {file.name for file in tmp_path.iterdir()} == {
        "cross_entropy_ours_rank0.pickle",
        "cross_entropy_dense_rank0.pickle",
    }
