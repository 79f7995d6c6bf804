# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate verify`` for hooks and programs: ``--quick``, ``--changed``, ``--json``."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from lossgate import Layout
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import Verdict
from lossgate.engine.events import CellFinished, CellSkipped, RunFinished, RunStarted
from lossgate.engine.settings import PROFILES, Settings
from lossgate.losses import SPECS
from lossgate.reports.json_file import ForPrograms
from property_tests.meta.command_line import Lossgate
from property_tests.meta.made_evidence import breaking
from property_tests.meta.made_results import made_result

ROOT = Path(__file__).parents[2]
FEW = ("--layout", "single", "--dtype", "float32", "--property", "agreement")
CELL = Cell(dense_candidate(SPECS["nll"], "logprobs"), Layout(), "float32")
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


@pytest.mark.slow
def test_the_file_has_what_mends_a_kernel(folder: Path, lossgate: Lossgate) -> None:
    done = lossgate("verify", "kernels.py", "--only", "right", "--only", "wrong", *FEW, "--json", "verdict.json")
    found = json.loads((folder / "verdict.json").read_text())
    right, wrong = found["cells"]
    assert (done.returncode, found["schema"], found["verdict"], found["stopped"]) == (1, "1", "DISAGREE", "")
    assert (right["cell"], right["verdict"], right["passes"]) == ("right[agreement-single-float32]", "AGREE", True)
    assert (right["cause"], right["reasons"], right["example"], right["replay"]) == ("", [], None, None)
    assert (wrong["verdict"], wrong["passes"], wrong["layout"], wrong["dtype"]) == (
        "DISAGREE", False, "single", "float32")  # fmt: skip
    assert wrong["source"].endswith("kernels.py:wrong")
    assert wrong["reasons"][0].startswith("loss: got ")
    assert wrong["example"]["description"] in done.stdout
    assert wrong["example"]["spec"] == "nll"
    assert lossgate(*shlex.split(wrong["replay"])[1:]).returncode == 1


def test_the_file_says_what_passes_what_to_do_and_what_was_not_verified() -> None:
    record = msgspec.structs.replace(
        breaking("masked-nan"), cause="a sum", causes=("cause: a sum", "to do: add"), reasons=("x", "to do: add", "y")
    )
    told = ForPrograms(lambda _: "lossgate replay FILE")
    told(RunStarted((), Settings(numbers_only=True)))
    told(CellFinished(replace(made_result(CELL, Verdict.DISAGREE), record=record)))
    told(CellSkipped(CELL, "it always raises"))
    told(RunFinished((), "the world is lost"))
    found = json.loads(told.text("AGREE"))
    (cell,) = found["cells"]
    assert (cell["verdict"], cell["passes"]) == ("PROMISE BROKEN", True)
    assert (cell["cause"], cell["to_do"], cell["reasons"]) == ("a sum", "add", ["x", "y"])
    assert cell["replay"] == "lossgate replay FILE"
    assert (found["skipped"], found["stopped"]) == ({str(CELL): "it always raises"}, "the world is lost")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere.py", "--json", "verdict.json"), 2, "nowhere.py: no such file"),
        (("plain.py", "--changed", "--json", "verdict.json"), 0, "no candidate in plain.py, so nothing is verified"),
        (("kernels.py", "--json", "kernels.py"), 2, "--json kernels.py: it would write over kernels.py"),
        (("kernels.py", "--evidence", "a", "--json", "a"), 2, "--json a: it would write over a"),
        (("kernels.py", "--quick", "--profile", "ci"), 2, "--quick and --profile ci: expected one of them"),
        (("plain.py", "--quick"), 2, "plain.py: can't be imported"),
    ],
)
def test_without_a_verdict_there_is_no_file(
    folder: Path, lossgate: Lossgate, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """One of an earlier run is gone, so that nobody takes it for this run's."""
    (folder / "plain.py").write_text("raise SystemExit('a script')\n")
    (folder / "verdict.json").write_text("{}")
    done = lossgate("verify", *arguments)
    assert done.returncode == code
    assert done.stderr.startswith(f"lossgate: {said}")
    assert (folder / "verdict.json").exists() == ("verdict.json" not in arguments)
    assert (folder / "kernels.py").exists()


def test_the_hook_passes_over_files_without_a_candidate(folder: Path, lossgate: Lossgate) -> None:
    (folder / "script.py").write_text("raise SystemExit('this is not to be imported')\n")
    (folder / "only_says.py").write_text("import lossgate\n")
    (folder / "notes.md").write_text("lossgate\n")
    program, *entry = shlex.split(HOOK["entry"])
    assert (program, entry) == ("lossgate", ["verify", "--quick", "--changed"])
    none = lossgate(*entry, "script.py", "only_says.py", "notes.md")
    assert (none.returncode, none.stdout) == (0, "")
    assert none.stderr == "lossgate: no candidate in script.py, only_says.py and notes.md, so nothing is verified\n"
    assert lossgate(*entry, "kernels.py:nobody").returncode == 2


@pytest.mark.slow
def test_a_quick_look_finds_what_is_wrong_and_says_what_it_leaves_out(folder: Path, lossgate: Lossgate) -> None:
    (folder / "script.py").write_text("")
    done = lossgate("verify", "--quick", "--changed", "--jobs", "1", "script.py", "kernels.py", "--only", "right")
    assert done.stderr == "lossgate: no candidate in script.py\n"
    assert "a quick look: one rank, and one layout that splits most axes, in one dtype" in done.stdout
    assert re.search(r"^2 cells: 2 AGREE;", done.stdout, re.MULTILINE)
    assert lossgate("verify", "--quick", "kernels.py:wrong").returncode == 1


@pytest.mark.parametrize(
    ("file", "taken"),
    [("my_kernels.py", True), ("src/latest.py", True), ("tests/test_my.py", False), ("conftest.py", False)],
)
def test_the_hook_takes_no_tests(file: str, taken: bool) -> None:
    """They import candidates of other files, which would be verified twice."""
    assert (re.search(HOOK["exclude"], file) is None) == taken


def test_a_quick_look_has_as_much_for_agree_as_any() -> None:
    quick: Any = PROFILES["quick"].values
    assert quick["examples"] >= 8
    assert not quick["numbers_only"]
    assert not quick["properties"]
