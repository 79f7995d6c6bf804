# SPDX-License-Identifier: Apache-2.0
"""The script that prints the time of each property counts what evidence says."""

from pathlib import Path

import property_times
import pytest

from lossgate.engine.cell_record import PropertyRecord
from property_tests.meta.made_evidence import cell, whole_run, write


def test_times_are_added_up_and_compared_with_agreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = (
        PropertyRecord(name="no-grad", problems=2, seconds=0.5),
        PropertyRecord(name="int32-ids", problems=1, seconds=1.5),
    )
    cells = [cell(candidate=name, properties=held, seconds=6.0) for name in ("a", "b")]
    write(tmp_path / "out.jsonl", whole_run(cells))
    assert property_times.main([str(tmp_path / "out.jsonl")]) == 0
    bug = "labels that are not in int64 are taken for 0"
    assert capsys.readouterr().out.splitlines() == [
        "property               seconds  checks     ms  of agreement  a bug that it shows",
        "agreement                  8.0       2 cells",
        f"int32-ids                  3.0       2   1500         0.375  {bug} (alone)",
        "no-grad                    1.0       4    250         0.125  without gradients the loss is 1% too large",
        "all beside agreement       4.0; 0.50 of agreement",
    ]


def test_without_cells_there_is_nothing_to_print(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert property_times.main([str(tmp_path / "empty.jsonl")]) == 1
