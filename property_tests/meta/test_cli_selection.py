# SPDX-License-Identifier: Apache-2.0
"""What ``lossgate verify`` leaves out, and how much it shows."""

from pathlib import Path

import pytest

from lossgate.evidence.records import EndRecord
from property_tests.meta.command_line import Lossgate
from property_tests.meta.evidence_lines import cells_in, records_in

NOISY = """
import warnings

import torch
import lossgate

print("imported")


@lossgate.candidate("nll", head="logprobs", axes=("dp", "cp"), dtypes=("float32",))
def raises(inputs, options, mesh):
    print("called")
    warnings.warn("beware")
    raise ValueError(f"{len(inputs.labels)} tokens are not mine")


@lossgate.candidate("nll", head="logprobs", axes=("dp",), dtypes=("float32",))
def doubled(inputs, options, mesh):
    return -2 * (inputs.logprobs * inputs.mask).sum() / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", head="logprobs", axes=("dp",), dtypes=("float32",))
def right(inputs, options, mesh):
    return -torch.where(inputs.mask, inputs.logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
"""


DIES = """
import os
import lossgate


@lossgate.candidate("nll", head="logprobs", dtypes=("float32",))
def dies(inputs, options, mesh):
    print("last words")
    os.abort()
"""


@pytest.fixture(autouse=True)
def noisy(folder: Path) -> None:
    (folder / "noisy.py").write_text(NOISY)


def test_a_candidate_that_raises_everywhere_is_given_up_and_said_so(folder: Path, lossgate: Lossgate) -> None:
    done = lossgate("verify", "noisy.py:raises", "--evidence", "out.jsonl")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "imported"  # by this process; what the others print as they import is not shown again
    assert lines.count("imported") == 1
    assert lines[1] == "7 cells"
    assert lines[2] == "DISAGREE  raises  float32  single"
    assert lines[3].startswith("  rank 0 raised ValueError: ")
    at = next(i for i, line in enumerate(lines) if line.startswith("  raises printed "))
    assert lines[at + 1] == "    called"
    assert lines[at + 2].endswith("UserWarning: beware")
    assert lines.count("    called") == 1
    assert lines[at + 4] == "DISAGREE  raises  float32  cp=2  like float32  single"
    assert lines[-2].startswith(
        "raises: 5 more cells not tried, since all before ended alike: rank 0 raised ValueError"
    )
    assert lines[-1].startswith("2 cells: 2 DISAGREE; ")
    *_, end = records_in(folder / "out.jsonl")
    assert isinstance(end, EndRecord)
    assert end.stopped == "5 cells not verified, since others failed alike"
    gate = lossgate("report", "out.jsonl")
    assert "it was stopped: 5 cells not verified, since others failed alike" in gate.stdout


def test_what_a_kernel_prints_before_it_dies_is_shown(folder: Path, lossgate: Lossgate) -> None:
    (folder / "dies.py").write_text(DIES)
    done = lossgate("verify", "dies.py", "--layout", "single")
    assert done.returncode == 1
    at = done.stdout.splitlines().index("    last words")
    assert "dies printed" in done.stdout.splitlines()[at - 1]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_first_cell_that_disagrees_ends_a_run_that_fails_fast(jobs: str, folder: Path, lossgate: Lossgate) -> None:
    done = lossgate("verify", "noisy.py", "--only", "doubled", "-x", "--jobs", jobs, "--evidence", "out.jsonl")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:-1] == ["stopped: --fail-fast: 1 of 4 cells were verified"]
    assert len(cells_in(folder / "out.jsonl")) == 1


def test_a_run_that_fails_fast_goes_on_while_cells_agree(lossgate: Lossgate) -> None:
    done = lossgate("verify", "noisy.py:right", "--ranks", "2", "--fail-fast")
    assert done.returncode == 0
    assert "stopped" not in done.stdout


@pytest.mark.slow
def test_only_some_candidates_and_cells_are_verified(folder: Path, lossgate: Lossgate) -> None:
    done = lossgate(
        "verify", "noisy.py", "--only", "right", "--only", "doubled", "-k", "single or dp=3", "--evidence", "out.jsonl"
    )
    assert done.returncode == 1
    names = [(cell.key.candidate, cell.key.layout) for cell in cells_in(folder / "out.jsonl")]
    assert names == [("doubled", "single"), ("doubled", "dp=3"), ("right", "single"), ("right", "dp=3")]


def test_quiet_is_one_line_if_all_agree(lossgate: Lossgate) -> None:
    done = lossgate("verify", "noisy.py:right", "--layout", "single", "-q")
    assert done.stdout.splitlines()[1:] == [done.stdout.splitlines()[-1]]
    assert done.stdout.splitlines()[-1].startswith("1 cell: 1 AGREE; ")


def test_verbose_says_what_the_work_cost(lossgate: Lossgate) -> None:
    done = lossgate("verify", "noisy.py:right", "--layout", "single", "-v")
    assert "asking which known mistakes would show took" in done.stdout.splitlines()[-1]
    assert done.stdout.splitlines()[2].startswith("AGREE  right  float32  single:  20 problems, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "rigt"), "--only rigt: no candidate has this name; did you mean 'right'?"),
        (("-k", "right and"), "-k 'right and': can't be read at the end"),
        (("-k", "tp"), "-k 'tp': no cell has such a name; the 15 cells have names such as raises[agreement-single-"),
        (("-q", "-v"), "-q and -v: expected one of them"),
    ],
)
def test_what_chooses_nothing_is_a_line(arguments: tuple[str, ...], message: str, lossgate: Lossgate) -> None:
    done = lossgate("verify", "noisy.py", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {message}")
    assert done.stderr.count("\n") == 1
