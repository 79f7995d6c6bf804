# SPDX-License-Identifier: Apache-2.0
"""Which versions of torch lossgate works with, and what is said of others."""

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
import torch_versions as table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d

import lossgate
from lossgate import TESTED_TORCH, Layout
from lossgate.base.errors import CandidateError, UsageError
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.worlds.processes.server import _raised
from lossgate.worlds.torch_versions import check_torch

ROOT = Path(__file__).parents[2]
EXPECTED = f"expected a version from {TESTED_TORCH[0]} to {TESTED_TORCH[1]}"


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git1234", "2.14.1+cu130", torch.__version__, "2.99.0", "3.0"])
def test_a_torch_that_is_not_too_old_is_taken(version: str) -> None:
    check_torch(version, distributed_c10d)


@pytest.mark.parametrize(
    ("version", "module", "why"),
    [
        ("2.10.1+cpu", distributed_c10d, ""),
        ("1.13", distributed_c10d, ""),
        ("2.99.0", ModuleType("c10d"), "; this one lacks _World, .* of torch.distributed"),
    ],
)
def test_another_torch_is_refused(version: str, module: ModuleType, why: str) -> None:
    with pytest.raises(UsageError, match=rf"^torch {re.escape(version)}: {EXPECTED}{why}; install one of them, "):
        check_torch(version, module)


def test_a_command_says_so_in_one_line() -> None:
    old = "import torch; torch.__version__ = '2.10.0'; from lossgate.cli import main; main()"
    command = [sys.executable, "-c", old, "verify", "lossgate.tour", "--layout", "cp=2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"lossgate: torch 2.10.0: {EXPECTED}; install .*\n", done.stderr)


@lossgate.candidate("nll", head="logits", axes=("cp",), dtypes=("float32",))
def calls_a_collective(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
    dist.all_reduce(torch.ones(1), group=mesh.get_group("cp"))
    return inputs.logits.sum()


def asks_for_what_is_not_there() -> Any:
    """Returns a function of lossgate that asks torch for a name that it lacks."""
    made: dict[str, Any] = {"c10d": distributed_c10d}
    exec(compile("def lacks(*_, **__): c10d._not_there", str(ROOT / "harness/lossgate/made.py"), "exec"), made)
    return made["lacks"]


@pytest.mark.parametrize("where", ["simulated_world.register", "group.SimulatedGroup.allreduce"])
def test_a_name_that_torch_lacks_is_no_fault_of_a_kernel(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before the kernel is called, nor where it calls a collective."""
    monkeypatch.setattr(f"lossgate.worlds.simulated.{where}", asks_for_what_is_not_there())
    with pytest.raises(AttributeError, match="has no attribute '_not_there'"):
        run_cell(Cell(calls_a_collective, Layout(cp=2), "float32"), Settings(examples=1, rounds=1))


def tells_of_the_candidate(body: Callable[[], object]) -> None:
    """Tells every error as one of the candidate, as a call of a kernel does."""
    try:
        body()
    except (AttributeError, ValueError) as error:
        raise CandidateError(f"candidate 'k' raised {type(error).__name__}") from error


@pytest.mark.parametrize(
    ("body", "sent"),
    [(asks_for_what_is_not_there(), AttributeError), (lambda: int("one"), CandidateError)],
    ids=["ours", "the candidate's"],
)
def test_a_rank_of_processes_sends_our_fault_as_ours(body: Callable[[], object], sent: type[Exception]) -> None:
    with pytest.raises(CandidateError) as told:
        tells_of_the_candidate(body)
    error = _raised(told.value).error
    assert error is not None
    assert type(pickle.loads(error)) is sent


def test_threads_of_ranks_that_have_ended_do_no_harm_to_fake_tensors() -> None:
    """Torch 2.11 crashed."""
    for _ in range(3):
        with lossgate.SimulatedRanks() as ranks:
            ranks.world("cp=2").run(_makes_fake_tensors)


def _makes_fake_tensors(context: Any) -> None:
    with FakeTensorMode():
        torch.ones(2)


def test_what_is_installed_and_tried_in_ci_is_the_range() -> None:
    assert f'"torch>={TESTED_TORCH[0]},<3"' in (ROOT / "pyproject.toml").read_text()
    for workflow in ("github-nightly.yml", "gitlab.yml"):
        text = (ROOT / "ci/workflows" / workflow).read_text()
        tried = re.findall(r"\d+\.\d+", re.findall(r"torch: \[(.*)\]", text, re.IGNORECASE)[0])
        assert (tried[0], tried[-1]) == TESTED_TORCH


# The table


def report(*tests: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<testsuites><testsuite>{''.join(tests)}</testsuite></testsuites>")


RIGHT = '<testcase classname="tests.a" name="test_b"/>'
SKIPPED = '<testcase classname="tests.a" name="test_c"><skipped/></testcase>'
WRONG = '<testcase classname="tests.a" name="test_d"><failure>assert</failure></testcase>'
BROKEN = '<testcase classname="tests" name="test_e.py"><error>import</error></testcase>'
FOUND = [f'<testcase classname="tests.a" name="test_f[torch-{n}]"/>' for n in (1, 4)]


@pytest.mark.parametrize(
    ("tests", "cell", "failed"),
    [
        ((RIGHT, SKIPPED), "1 passed", []),
        ((RIGHT, WRONG, BROKEN), "2 of 3 FAILED", ["tests.a::test_d", "tests::test_e.py"]),
        ((RIGHT, *FOUND), "3 passed; torch-1, torch-4 found", []),
    ],
)
def test_a_cell_of_the_table(tests: tuple[str, ...], cell: str, failed: list[str]) -> None:
    assert table.outcome(report(*tests)) == (cell, failed)


def test_the_table_of_two_versions_one_of_which_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def environment(version: str) -> Path:
        if version == "2.99.0":
            raise subprocess.CalledProcessError(1, ["pip", "install"])
        return Path("python")

    monkeypatch.setattr(table, "environment", environment)
    monkeypatch.setattr(table, "run", lambda python, tests: report(RIGHT, *[WRONG] * (tests == table.PARTS["kernels"])))
    monkeypatch.setattr(sys, "argv", ["torch_versions.py", "2.11.0", "2.99.0"])
    with pytest.raises(SystemExit) as ended:
        table.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "| torch | install | tour | worlds | kernels | references | findings |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 2.11.0 | installed | 1 passed | 1 passed | 1 of 2 FAILED | 1 passed | 1 passed |",
        "| 2.99.0 | FAILED | - | - | - | - | - |",
        "torch 2.11.0, kernels: tests.a::test_d",
        "torch 2.99.0: pip install",
    ]


def test_constraints_are_those_of_ci_but_for_what_torch_decides() -> None:
    assert table.others("numpy==2.4.6\ntorch==2.13.0\n# why\ntriton==3.7.1\nsetuptools==84.2.1\n") == (
        "numpy==2.4.6\n# why\n"
    )


def test_every_part_has_its_tests() -> None:
    assert [test for tests in table.PARTS.values() for test in tests if not (ROOT / test).exists()] == []


def test_the_command_of_the_tests_takes_versions() -> None:
    done = subprocess.run([ROOT / "ci/test", "--torch"], capture_output=True, text=True)
    assert (done.returncode, "the following arguments are required: VERSION" in done.stderr) == (2, True)
