# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate verify --evidence`` and ``--shard``, and of exit codes of no verdict."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lossgate.engine.cell_record import CellRecord
from lossgate.evidence.records import EndRecord, RunRecord
from property_tests.meta.command_line import Lossgate
from property_tests.meta.evidence_lines import cells_in, records_in

FEW = ("--layout", "single", "--dtype", "float32", "--examples", "5")


@pytest.mark.slow
def test_a_run_is_written_from_its_start_to_its_end(folder: Path, lossgate: Lossgate) -> None:
    lossgate("verify", "kernels.py:right", *FEW, "--seed", "7", "--evidence", "out.jsonl")
    run, cell, end = records_in(folder / "out.jsonl")
    assert isinstance(run, RunRecord)
    assert isinstance(cell, CellRecord)
    assert isinstance(end, EndRecord)
    assert run.cells == (cell.key,)
    assert (run.settings["seed"], run.settings["examples"], run.part) == (7, 5, None)
    assert run.run == cell.run == end.run
    assert (end.cells, end.stopped) == (1, "")


@pytest.mark.slow
def test_runs_add_to_a_file(folder: Path, lossgate: Lossgate) -> None:
    for _ in range(2):
        lossgate("verify", "kernels.py:right", *FEW, "--evidence", "out.jsonl")
    one, two = (record for record in records_in(folder / "out.jsonl") if isinstance(record, RunRecord))
    assert one.run != two.run
    assert len(cells_in(folder / "out.jsonl")) == 2


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("no/such/folder.jsonl", "No such file or directory"),
        (".", "Is a directory"),
        pytest.param(
            "/dev/full",
            "No space left on device",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full"),
        ),
    ],
)
def test_a_file_that_cannot_be_written_is_reported_and_the_verdict_is_printed(
    lossgate: Lossgate, file: str, reason: str
) -> None:
    done = lossgate("verify", "kernels.py:right", *FEW, "--evidence", file)
    assert done.stderr.startswith(f"lossgate: --evidence {file}: can't be written: {reason}. ")
    assert done.stderr.count("\n") == 1
    assert "1 cell: 1 AGREE;" in done.stdout
    assert done.returncode == 2


def test_a_file_that_cannot_be_written_is_reported_before_the_work(
    lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def first_cell(*_: object) -> None:
        said.append(capsys.readouterr().err)
        raise KeyboardInterrupt

    monkeypatch.setattr("lossgate.engine.run.run_side_by_side", first_cell)
    lossgate("verify", "kernels.py:right", *FEW, "--evidence", "no/such/folder.jsonl")
    assert "can't be written" in said[0]


def test_a_disagreement_wins_over_lost_evidence(lossgate: Lossgate) -> None:
    assert lossgate("verify", "kernels.py:wrong", *FEW, "--evidence", "no/such/folder.jsonl").returncode == 1


@pytest.mark.slow
def test_the_parts_of_a_matrix_are_the_matrix(folder: Path, lossgate: Lossgate) -> None:
    arguments = ("verify", "kernels.py:right", "--ranks", "2", "--examples", "2", "--property", "agreement")
    lossgate(*arguments, "--evidence", "whole.jsonl")
    whole = cells_in(folder / "whole.jsonl")
    (the_whole,) = (record for record in records_in(folder / "whole.jsonl") if isinstance(record, RunRecord))
    for parts in (1, 2, 3, 6):
        evidence = f"{parts}.jsonl"
        for part in range(1, parts + 1):
            lossgate(*arguments, "--shard", f"{part}/{parts}", "--evidence", evidence)
        together = cells_in(folder / evidence)
        assert sorted(cell.key for cell in together) == sorted(cell.key for cell in whole)
        assert {cell.key: cell.outputs for cell in together} == {cell.key: cell.outputs for cell in whole}
        runs = [record for record in records_in(folder / evidence) if isinstance(record, RunRecord)]
        assert [run.part for run in runs] == [f"{part}/{parts}" for part in range(1, parts + 1)]
        sizes = [len(run.cells or ()) for run in runs]
        assert max(sizes) - min(sizes) <= 1
        assert {run.matrix for run in runs} == {the_whole.matrix}


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/", "1/0", "²/3"])
def test_a_part_that_is_none_is_refused(lossgate: Lossgate, shard: str) -> None:
    done = lossgate("verify", "kernels.py:right", "--shard", shard)
    assert done.returncode == 2
    assert f"shard {shard!r}: expected a part and the number of parts" in done.stderr


def test_more_parts_than_cells_are_refused(lossgate: Lossgate) -> None:
    done = lossgate("verify", "kernels.py:right", *FEW, "--shard", "1/2")
    assert (done.returncode, done.stderr) == (
        2,
        "lossgate: shard 1/2: the matrix has only 1 cell; use at most 1 part\n",
    )


def test_a_crash_of_lossgate_has_its_own_code(lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("lossgate.engine.run.run_side_by_side", broken)
    done = lossgate("verify", "kernels.py:right", *FEW)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-2:] == [
        "ZeroDivisionError: a fault",
        "lossgate: this is a fault of lossgate itself; please report it with the lines above",
    ]


def test_a_closed_pipe_is_no_disagreement(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lossgate", "list"],
            stdout=writing,
            stderr=subprocess.PIPE,
            cwd=folder,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
