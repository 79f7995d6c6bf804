# SPDX-License-Identifier: Apache-2.0
"""Tests of the command line as a user meets it: exit codes, output, evidence, replay."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import docstring_parser
import pytest

from lossgate import Candidate, Layout
from lossgate import candidate as declare
from lossgate.cli import Exit, app, replay, verify
from lossgate.cli.verify import exit_code
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.cell_record import KnownFailureRecord
from lossgate.engine.settings import Settings
from property_tests.meta.command_line import KERNELS, Lossgate, in_a_process
from property_tests.meta.evidence_lines import cells_in
from property_tests.meta.made_results import made_result


@pytest.mark.slow
def test_agree(folder: Path, lossgate: Lossgate) -> None:
    done = lossgate("verify", "kernels.py:right", "--layout", "single", "--layout", "dp=2", "--evidence", "out.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("4 cells\nAGREE  right  float32  single:  20 problems, 40 comparisons, at most ")
    assert "2, up to 2 ranks" in done.stdout
    assert "a test" in done.stdout
    assert "4 cells: 4 AGREE;" in done.stdout
    cells = cells_in(folder / "out.jsonl")
    assert [(c.candidate, c.spec, c.layout, c.dtype, c.verdict) for c in cells] == [
        ("right", "nll", layout, dtype, "AGREE") for dtype in ("float32", "bfloat16") for layout in ("single", "dp=2")
    ]
    assert all(0 < (c.mde or 1) < 0.01 and c.problems == 20 and set(c.required) <= set(c.coverage) for c in cells)
    assert not (folder / ".lossgate").exists()


def test_disagree_and_replay(folder: Path, lossgate: Lossgate) -> None:
    done = in_a_process(
        folder, "verify", "kernels.py:wrong", "--layout", "cp=2", "--dtype", "float32", "--evidence", "out.jsonl"
    )
    assert done.returncode == 1
    lines = done.stdout.split("DISAGREE  wrong  float32  cp=2\n")[1].splitlines()
    assert lines[0] == "  cause: loss and the gradient of logits: multiplied by 1.01"
    assert lines[1].startswith("  loss: got ")
    assert lines[1].endswith(", relative difference 0.01")
    assert "rounding explains" not in done.stdout
    on = next(line for line in lines if line.startswith("  on: "))
    assert "layout cp=2, float32" in on
    replay = next(line for line in lines if line.startswith("  replay: ")).removeprefix("  replay: lossgate ")
    again = lossgate(*replay.split())
    assert again.returncode == 1
    assert again.stdout.splitlines()[1:3] == [lines[0].replace("cause", "verify said of the cause"), lines[1]]
    assert again.stdout.splitlines()[-1] == "  it fails exactly as when the file was written"
    assert "  loss: 1.01 times the reference; rounding explains 1 +- " in lossgate(*replay.split(), "-v").stdout
    other = lossgate(*replay.split(), "--candidate", "kernels.py:right")
    assert other.returncode == 0
    assert other.stdout.startswith("AGREE  right  float32  cp=2\n")
    (cell,) = cells_in(folder / "out.jsonl")
    assert cell.verdict == "DISAGREE"
    assert cell.failure is not None
    assert cell.failure.problem["layout"] == {"cp": 2, "dp": 1, "tp": 1}
    assert cell.replay == f"lossgate {replay}"


@pytest.mark.slow
def test_a_broken_interface_is_the_verdict_of_its_cell(folder: Path, lossgate: Lossgate) -> None:
    few = ("--layout", "single", "--dtype", "float32", "--examples", "5")
    done = lossgate("verify", "kernels.py:shapeless", "kernels.py:right", *few, "--evidence", "cells.jsonl")
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert "candidate 'shapeless' on rank 0 returned loss of shape [1]; expected []" in text
    assert "vocab 1, layout single, float32" in text
    assert [cell.verdict for cell in cells_in(folder / "cells.jsonl")] == ["DISAGREE", "AGREE"]
    replay = next(line for line in done.stdout.splitlines() if line.startswith("  replay: ")).split()[2:]
    again = lossgate(*replay)
    assert again.returncode == 1
    assert "candidate 'shapeless' on rank 0 returned loss of shape [1]; expected []" in again.stdout


NEEDY = f"""
{KERNELS}
from dataclasses import replace
from lossgate.specs.coverage_goals import CoverageGoal

goals = {{**right.spec.goals, "never": CoverageGoal(meaning="what no problem has")}}
needy = replace(right, name="needy", spec=replace(right.spec, goals=goals))
"""


@pytest.mark.slow
def test_inconclusive(folder: Path, lossgate: Lossgate) -> None:
    (folder / "pyproject.toml").write_text("[tool.lossgate]\nrounds = 1\n")
    (folder / "needy.py").write_text(NEEDY)
    done = lossgate("verify", "needy.py:needy", "--layout", "single", "--dtype", "bfloat16", "--examples", "1")
    assert done.returncode == 3, done.stderr
    assert "INCONCLUSIVE  needy  bfloat16  single" in done.stdout
    assert "no problem reached goal 'never': what no problem has; none of " in done.stdout


@pytest.mark.slow
def test_side_by_side_gives_the_same(folder: Path, lossgate: Lossgate) -> None:
    arguments = ("verify", "kernels.py:right", "--ranks", "2", "--dtype", "float32", "--examples", "5", "--evidence")
    assert lossgate(*arguments, "one.jsonl").returncode == lossgate(*arguments, "two.jsonl", "--jobs", "2").returncode
    one, two = (cells_in(folder / name) for name in ("one.jsonl", "two.jsonl"))
    assert [c.layout for c in one] == [c.layout for c in two] == ["single", "cp=2", "dp=2"]
    assert [c.outputs for c in one] == [c.outputs for c in two]


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ("", Exit.AGREE),
        ("AGREE AGREE", Exit.AGREE),
        ("AGREE INCONCLUSIVE", Exit.INCONCLUSIVE),
        ("INCONCLUSIVE DISAGREE AGREE", Exit.DISAGREE),
        ("DISAGREE INCONCLUSIVE", Exit.DISAGREE),
        ("known AGREE", Exit.AGREE),
        ("known INCONCLUSIVE", Exit.INCONCLUSIVE),
        ("known DISAGREE", Exit.DISAGREE),
    ],
)
def test_the_exit_code_is_that_of_the_worst_cell(verdicts: str, code: Exit) -> None:
    """Known disagreements are no reason to fail, and excuse no other cell."""
    assert (
        exit_code(
            cell_result("DISAGREE" if word == "known" else word, expected=word == "known") for word in verdicts.split()
        )
        == code
    )


def cell_result(verdict: str, expected: bool) -> CellResult:
    cell = Cell(
        declare("nll", head="logits", name="a")(lambda inputs, options, mesh: inputs.logits.sum()), Layout(), "float32"
    )
    known = KnownFailureRecord(name="torch-1", example="e" * 64, expected=True) if expected else None
    return made_result(cell, Verdict(verdict), known_failure=known)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify"], "verify: nothing named; expected files or modules with candidates, such as my_kernels.py"),
        (["verify", "nowhere.py"], "nowhere.py: no such file"),
        (["verify", "kernels.py:other"], "kernels.py: no candidate named 'other'"),
        (
            ["verify", "kernels.py", "--layout", "tp=x"],
            "layout 'tp=x': can't read 'tp=x'; expected 'single' or sizes of dp, cp, tp such as 'tp=2,cp=2'",
        ),
        (
            ["verify", "kernels.py", "--layout", "dp=65"],
            "layout dp=65 has 65 ranks; at most 64 can be simulated: choose a smaller one",
        ),
        (
            ["verify", "kernels.py:right", "--layout", "tp=2"],
            "candidate 'right': nothing to verify; it has axes dp, cp and dtypes",
        ),
        (
            ["verify", "kernels.py", "--dtype", "int8"],
            "unknown dtype 'int8'; expected one of float32, bfloat16, float16",
        ),
        (
            ["verify", "kernels.py", "--profile", "huge"],
            "unknown profile 'huge'; expected one of dev, quick, ci, nightly, release",
        ),
        (["verify", "kernels.py", "--examples", "0"], "examples=0: expected a positive whole number"),
        (
            ["verify", "kernels.py", "--jobs", "-1"],
            "jobs=-1: expected a number of processes, or 0 for one on each core",
        ),
        (["verify", "kernels.py:wrong", "--failures", "kernels.py"], "choose another folder with --failures"),
        (["verify", "kernels.py", "--nope"], "Unknown option: --nope."),
        (["check"], 'Unknown command "check".'),
        (["replay", "nowhere.json"], "can't read nowhere.json: No such file or directory"),
        (["replay", "kernels.py"], "kernels.py is no failure file"),
        (["list", "nowhere.py"], "nowhere.py: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_use_is_one_clear_line(lossgate: Lossgate, arguments: list[str], message: str) -> None:
    done = lossgate(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("lossgate: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_disagreement_is_told_though_its_failure_file_cannot_be_written(lossgate: Lossgate) -> None:
    done = lossgate(
        "verify", "kernels.py:wrong", "--layout", "single", "--dtype", "float32", "--failures", "kernels.py/below"
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[1].startswith("DISAGREE  wrong  float32  single")
    assert "replay:" not in done.stdout
    assert done.stderr == (
        "lossgate: can't keep the failure files of wrong[agreement-single-float32]: kernels.py/below: Not a directory; "
        "choose another --failures\n"
    )


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[tool.lossgate]\nexample = 3", "unknown key 'example'; did you mean 'examples'?"),
        ("[tool.lossgate.profiles.dev]\nexamples = 'many'", "examples='many': expected a positive whole number"),
        ("[tool.lossgate", "pyproject.toml: "),
    ],
)
def test_bad_settings_are_one_clear_line(folder: Path, lossgate: Lossgate, toml: str, message: str) -> None:
    (folder / "pyproject.toml").write_text(toml)
    done = lossgate("verify", "kernels.py")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_bad_use_from_the_shell(folder: Path) -> None:
    done = in_a_process(folder, "verify", "nowhere.py")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "lossgate: nowhere.py: no such file\n")


@pytest.mark.slow
def test_profiles_of_pyproject(folder: Path, lossgate: Lossgate) -> None:
    (folder / "pyproject.toml").write_text(
        "[tool.lossgate]\nlayouts = ['single']\nrounds = 1\n"
        "[tool.lossgate.profiles.quick]\nexamples = 12\ndtypes = ['float32']\n"
    )
    quick = ("verify", "kernels.py:right", "--profile", "quick")
    shown = [lossgate(*quick, *flags).stdout for flags in ((), ("--examples", "30"))]
    assert all(text.startswith("1 cell\n") for text in shown)
    counts = [re.search(r"float32  single:  (\d+) problems", text) for text in shown]
    few, more = (int(count[1]) for count in counts if count is not None)
    assert 12 <= few < Settings().examples < 30 <= more  # properties may add some


def test_list(folder: Path, lossgate: Lossgate) -> None:
    specs = lossgate("list")
    assert specs.returncode == 0
    assert "  nll              negative log-likelihood of the labels" in specs.stdout
    assert re.search(r"^  agreement +Every output", specs.stdout, re.MULTILINE)
    candidates = lossgate("list", "kernels.py")
    assert "shapeless" in candidates.stdout
    assert "dp, cp" in candidates.stdout


def test_neither_command_line_nor_plugin_loads_torch() -> None:
    code = (
        "import sys, lossgate, lossgate.cli, lossgate.engine.settings, lossgate.base.fork_server; "
        "from importlib.metadata import entry_points; "
        "(plugin,) = entry_points(group='pytest11', name='lossgate'); plugin.load(); "
        "lossgate.engine.settings.Settings(dtypes=('float32',)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process starts afresh")
def test_all_processes_of_a_run_load_torch_once(folder: Path) -> None:
    """Python tells what each of them imports."""
    command = ("-X", "importtime", "-m", "lossgate", "verify", "kernels.py:right", "--examples", "1", "--ranks", "1")
    ran = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    imported = [line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()]
    assert imported.count("torch") == 1
    assert imported.count("lossgate.engine.run_cell") == 1


@pytest.mark.slow
def test_a_run_imports_a_file_once(folder: Path) -> None:
    """The process in which cells run tells what the file declares."""
    with (folder / "kernels.py").open("a") as file:
        file.write("with open('imported', 'a') as file:\n    file.write('once ')\n")
    in_a_process(folder, "verify", "kernels.py:right", "--examples", "1", "--ranks", "1")
    assert (folder / "imported").read_text() == "once "


DECLARE = f"{KERNELS}\ndeclare = lossgate.candidate"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(0)", "kernels.py: can't be imported: it calls sys.exit(0), on line 1; put"),
        ("raise RuntimeError('no GPU')", "kernels.py: can't be imported: RuntimeError: no GPU"),
        (f"{DECLARE}('nll', head='logits', name='right')(cross_entropy)", "two candidates are named 'right'"),
        (
            f"{KERNELS}\nimport functools\nlossgate.candidate('nll', head='logits')(functools.partial(cross_entropy))",
            "which has no name; give it one",
        ),
        (
            f"{DECLARE}('nll', head='logits', tiles={{'token': 0}})",
            "tiles['token']=0): expected a positive number of rows",
        ),
    ],
    ids=["exits", "raises", "twice", "nameless", "tile"],
)
def test_bad_files_are_one_clear_line(folder: Path, lossgate: Lossgate, text: str, message: str) -> None:
    (folder / "kernels.py").write_text(text)
    done = lossgate("verify", "kernels.py")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_failure_file_without_examples_is_one_clear_line(folder: Path, lossgate: Lossgate) -> None:
    (folder / "empty.json").write_text(
        '{"candidate": "kernels.py:right", "reasons": [], "examples": [], "pooled": false, "versions": {}}'
    )
    done = lossgate("replay", "empty.json")
    assert (done.returncode, done.stderr) == (2, "lossgate: empty.json holds no example; expected at least one\n")


def test_a_kernel_from_elsewhere_is_found_again(folder: Path, lossgate: Lossgate) -> None:
    """Its file is where it was declared a candidate, not where the function is."""
    plain = "def plain(inputs, options, mesh): return 2 * cross_entropy(inputs, options)"
    (folder / "library.py").write_text(KERNELS.split("@lossgate")[0] + plain)
    declared = "plain = lossgate.candidate('nll', head='logits', dtypes=('float32',))(library.plain)"
    (folder / "mine.py").write_text(f"import lossgate, library\n{declared}")
    done = lossgate("verify", "mine.py", "--layout", "single", "--jobs", "2")
    assert done.returncode == 1
    replay = next(line for line in done.stdout.splitlines() if line.startswith("  replay: ")).removeprefix(
        "  replay: lossgate "
    )
    assert lossgate(*replay.split()).stdout.splitlines()[-1] == "  it fails exactly as when the file was written"


@pytest.mark.parametrize("command", [verify, replay])
def test_help_gives_the_meaning_of_each_parameter(command: Callable[..., int]) -> None:
    """cyclopts reads the meanings from the docstring.

    One that it cannot read would be shown as a single paragraph.
    """
    parsed = docstring_parser.parse(command.__doc__ or "")
    described = {parameter.arg_name for parameter in parsed.params if parameter.description}
    assert described == set(inspect.signature(command).parameters)
    assert parsed.long_description is None


def test_messages_name_commands_that_exist() -> None:
    """In a string, what follows the name of the tool is a command, or a word of a sentence."""
    words = {"adds", "can", "found", "has", "itself", "makes", "nor", "on", "or", "puts", "reads", "wrote"}
    files = list(Path(inspect.getfile(Candidate)).parents[1].rglob("*.py"))
    named = {(file.name, word) for file in files for word in _commands_in(file.read_text())}
    assert {word for _, word in named} & {"verify", "replay", "gate"}
    assert [(file, word) for file, word in sorted(named) if word not in app and word not in words] == []


def _commands_in(source: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from re.findall(r"\blossgate ([a-z]+)", node.value)
