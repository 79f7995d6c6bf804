# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows, as a whole, at two widths and in a file.

The screens are the files in ``screens``. Where a change is meant, write them anew with
LOSSGATE_WRITE_SCREENS=1, and read what has changed.
"""

import contextlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from lossgate import Candidate, Layout, candidate
from lossgate.diagnosis.cause import Cause, Diagnosis
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.cell_record import PropertyRecord
from lossgate.engine.events import CellFinished, CellSkipped, CellStarted, Event, RunFinished, RunStarted
from lossgate.engine.recorded import record_of
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import pooled_outputs, reasons_of
from lossgate.judge.comparison import Comparison, Entry
from lossgate.judge.explain import explain
from lossgate.judge.statistics import SCALE
from lossgate.problems.problem import Problem
from lossgate.properties import PROPERTIES
from lossgate.reports.describe import print_replayed
from lossgate.reports.failures import FailureFiles
from lossgate.reports.terminal import Terminal, Volume
from lossgate.specs.outputs import LOSS, gradient_output
from property_tests.meta.command_line import Lossgate
from property_tests.meta.made_evidence import cell, disagreeing, inconclusive, whole_run, write
from property_tests.meta.made_results import made_result

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (80, 120)
PROBLEM = Problem(spec="nll", head="hidden", dtype="float32", lengths=(64,), masks=("all",), hidden=8, vocab=33, seed=0)
TWICE = Comparison(
    output=LOSS,
    values={SCALE: 1.0},
    limits={SCALE: 5.3e-07},
    farthest=(Entry("", 3.22619855, 1.61309923),),
)
GRADIENT = Comparison(
    output=gradient_output("weight", ("vocab", "hidden")),
    values={SCALE: 0.5012},
    limits={SCALE: 7.1e-06},
    farthest=(Entry("vocab 3, hidden 0", -0.327, -0.163), Entry("vocab 31, hidden 7", 0.0032, 0.0011)),
)
FOUND = tuple(explain((TWICE, GRADIENT)))


def declared(name: str) -> Candidate:
    declare = candidate("nll", head="logits", axes=("dp", "cp"), name=name, good_for="whole logits")
    return declare(lambda inputs, options, mesh: inputs.logits.sum())


NAMES = ("right", "fused_linear_cross_entropy", "unnamed", "writes", "raises")
RIGHT, WRONG, UNNAMED, WRITES, RAISES = map(declared, NAMES)
LAYOUTS = [Layout(), Layout(cp=2), Layout(dp=2, cp=2), Layout(dp=4)]


def result(
    kernel: Candidate,
    layout: Layout,
    margin: float,
    *reasons: str,
    diagnosis: Diagnosis | None = None,
    held_to: str = "agreement",
    **of_case: Any,
) -> CellResult:
    """A result with some reasons; it agrees if there are none."""
    agreeing = (Comparison(output=LOSS, values={"scale": margin}, limits={"scale": 1.0}),)
    given: dict[str, Any] = {"comparisons": agreeing, **of_case}
    case = CaseResult(problem=PROBLEM, findings=reasons, **given)
    return made_result(
        Cell(kernel, layout, "float32", PROPERTIES[held_to]),
        Verdict.DISAGREE if reasons else Verdict.AGREE,
        case.reasons,
        (case,) * 20,
        printed="hello from the kernel\n" * 30 if case.failure else "",
        of_run={
            "failure": case if reasons else None,
            "shrink_calls": 25,
            "diagnosis": diagnosis,
            "seconds": 1.25,
        },
        mde=None if case.failure else 3.5e-7,
    )


NAMED = Diagnosis(
    causes=(Cause(name="x", words="valid_tokens is not summed over cp", todo="sum valid_tokens over cp"),),
    problems=9,
    layouts=("cp=2", "cp=3"),
    asked=880,
)
NOT_NAMED = Diagnosis(
    where=("the gradient of weight is wrong at vocab rows of labels, 12 of 33, and at no others",), asked=880
)


def a_run() -> Iterator[Event]:
    """Yields the events of a run with all that there is to show."""
    raised = "rank 0 raised ValueError: 3 tokens are not mine, because they are somebody else's  [k.py:14 in raises]"
    results = [
        *(result(RIGHT, layout, 0.21) for layout in LAYOUTS),
        result(WRONG, LAYOUTS[0], 0.25),
        *(
            result(WRONG, layout, 3.4e6, *FOUND, diagnosis=NAMED, comparisons=(TWICE, GRADIENT))
            for layout in LAYOUTS[1:]
        ),
        result(UNNAMED, LAYOUTS[0], 3.4e6, *explain([GRADIENT]), diagnosis=NOT_NAMED, comparisons=(GRADIENT,)),
        result(WRITES, LAYOUTS[0], 0.0, "the kernel wrote to logits", held_to="inputs-kept", todo="write to no tensor"),
        *(result(RAISES, layout, 0.0, raised, failure="RankRaised", comparisons=()) for layout in LAYOUTS[:2]),
    ]
    skipped = [Cell(RAISES, layout, "float32") for layout in LAYOUTS[2:]]
    yield RunStarted((*(one.cell for one in results), *skipped), Settings())
    for one in results:
        yield CellStarted(one.cell)
        yield CellFinished(one)
    for one in skipped:
        yield CellSkipped(one, raised)
    yield RunFinished(tuple(results), "", 12.5)


def a_bad_day() -> Iterator[Event]:
    """Yields the events of a run in which a kernel crashed, and one could not be judged."""
    crash = (
        "CRASH: the process that ran the candidate was ended by SIGSEGV on this problem",
        '  File "/home/somebody/a_folder_with_a_long_name/kernels/my_extension.py", line 3 in launch',
        '  File "/home/somebody/a_folder_with_a_long_name/kernels/candidates.py", line 17 in raises',
    )
    unsure = (
        "goal never reached: label on a shard's last row",
        "a kernel that computes label_smoothing=0.1 as 0 would have passed every problem",
    )
    died = replace(result(RAISES, LAYOUTS[0], 0.0, *crash, failure="Crash", comparisons=()), printed="hello\n")
    short = result(RIGHT, LAYOUTS[0], 0.21)
    record = msgspec.structs.replace(short.record, verdict=Verdict.INCONCLUSIVE, reasons=unsure)
    results = died, replace(short, record=record)
    yield RunStarted(tuple(one.cell for one in results), Settings())
    for one in results:
        yield CellStarted(one.cell)
        yield CellFinished(one)
    yield RunFinished(results, "", 3.5)


def a_broken_promise() -> Iterator[Event]:
    """Yields the events of a run in which the numbers of a kernel agree, and it breaks promises."""
    finding, remedy = "loss: NaN", "select before computing: torch.where(mask, x, 0.0)"
    masked = PropertyRecord(name="masked-nan", problems=1, findings=(finding,), on="1 token", remedy=remedy)
    frozen = PropertyRecord(name="frozen-inputs", problems=1, findings=("the weight has a gradient",), on="1 token")
    case = CaseResult(problem=PROBLEM, findings=masked.findings, held_to="masked-nan")
    results: list[CellResult] = []
    for layout, broken in zip(LAYOUTS, ((masked,), (masked, frozen), (masked,), ()), strict=True):
        agreed = result(WRONG, layout, 0.21)
        run = replace(agreed.run, properties=broken, failure=case if broken else None)
        verdict = Verdict.DISAGREE if broken else Verdict.AGREE
        record = record_of(run, pooled_outputs(agreed.cases), verdict, reasons_of(broken), Verdict.AGREE)
        results.append(replace(agreed, run=run, record=msgspec.structs.replace(record, mde=3.5e-7)))
    results.append(result(RIGHT, LAYOUTS[0], 0.21))
    yield RunStarted(tuple(one.cell for one in results), Settings())
    for one in results:
        yield CellStarted(one.cell)
        yield CellFinished(one)
    yield RunFinished(tuple(results), "", 12.5)


class Files(FailureFiles):
    """Knows a file of each failure, and writes none."""

    def of(self, cell: Cell) -> Path | None:
        return Path(f".lossgate/failure-{cell.candidate.name}-agreement-{cell.dtype}-{cell.layout}-67dcaefa.json")


def verified(console: Console, volume: Volume = Volume.NORMAL, events: Iterable[Event] | None = None) -> None:
    terminal = Terminal(Files(Path(".lossgate")), console, volume)
    for event in a_run() if events is None else events:
        terminal(event)


REPLAYED = (
    "DISAGREE  fused_linear_cross_entropy  float32  cp=2",
    "  verify said of the cause: valid_tokens is not summed over cp",
    "  to do: sum valid_tokens over cp",
    *(f"  {line}" for line in FOUND),
    "  on: 3 tokens in 1 sequence [3], masks all, vocab 2, layout cp=2, float32, logit_std 1, seed 0",
    "  it fails exactly as when the file was written",
)
DRAWN: dict[str, Callable[[Console], None]] = {
    "verify": verified,
    "verify-crash": lambda console: verified(console, events=a_bad_day()),
    "verify-promise": lambda console: verified(console, events=a_broken_promise()),
    "verify-quiet": lambda console: verified(console, Volume.QUIET),
    "verify-verbose": lambda console: verified(console, Volume.VERBOSE),
    "replay": lambda console: print_replayed(REPLAYED, console),
}
COMMANDS = {
    "list": ("list",),
    "list-spec": ("list", "value"),
    "list-file": ("list", "kernels.py"),
    "init": ("init", "nll", "--head", "logits"),
    "audit": ("audit", "kernels.py:right", "--layout", "single", "--dtype", "float32", "--examples", "2"),
    "report": ("report", "after.jsonl"),
    "diff": ("diff", "before.jsonl", "after.jsonl"),
    "gate": ("gate", "after.jsonl", "--now", "2026-11-20T18:00:00Z"),
}
PLAIN = ("init", "audit")
"""Commands that colour nothing."""


def compare(name: str, text: str) -> None:
    """Compares a screen with its file, or writes the file."""
    shown = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    file = SCREENS / f"{name}.txt"
    if os.environ.get("LOSSGATE_WRITE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        file.write_text(shown)
    assert shown == file.read_text()


def check_width(text: str, width: int) -> None:
    """No line is wider than the screen, but for commands, which are copied whole."""
    for line in text.splitlines():
        assert len(line) <= width or "lossgate replay" in line or 'File "' in line or line.startswith("wrote "), line


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", DRAWN)
def test_on_a_terminal(name: str, width: int) -> None:
    text = StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None, highlight=False)
    DRAWN[name](console)
    screen = without_progress(text.getvalue())
    check_width(screen, width)
    compare(f"{name}-{width}", screen)


@pytest.mark.parametrize("name", DRAWN)
def test_in_a_file(name: str) -> None:
    text = StringIO()
    DRAWN[name](Console(file=text, width=180, force_terminal=False, highlight=False))
    assert "\x1b" not in text.getvalue()
    compare(f"{name}-file", text.getvalue())


STYLES = {"0": "/", "1": "bold", "2": "dim", "31": "red", "32": "green", "33": "yellow", "35": "magenta", "36": "cyan"}


@pytest.mark.parametrize("name", ["verify", "verify-crash", "verify-promise", "replay"])
def test_in_colour(name: str) -> None:
    """What is coloured or bold, and how."""
    text = StringIO()
    terminal: dict[str, Any] = {
        "width": 100,
        "force_terminal": True,
        "force_interactive": False,
        "color_system": "standard",
    }
    DRAWN[name](Console(file=text, highlight=False, **terminal))
    compare(f"{name}-colour", named_styles(text.getvalue()))


def named_styles(text: str) -> str:
    return re.sub(r"\x1b\[([\d;]+)m", lambda code: f"<{' '.join(map(STYLES.__getitem__, code[1].split(';')))}>", text)


def without_progress(text: str) -> str:
    """Returns what stays on a terminal: what is drawn and wiped out again is left out."""
    lines: list[str] = []
    for line in text.split("\n"):
        kept = re.split(r"\x1b\[2K", line)[-1]
        lines.append(re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", kept))
    return re.sub(r"^[ \u2501\u2578\u257a]*\d+/\d+ .*\n", "", "\n".join(lines), flags=re.MULTILINE)


@pytest.fixture
def evidence(folder: Path) -> None:
    """Evidence of two runs, and a policy."""
    name = "fused_linear_cross_entropy"
    before = [cell(), cell(candidate=name), cell(candidate=name, layout="tp=2"), inconclusive(candidate="unsure")]
    cause = "valid_tokens is not summed over tp"
    wrong = disagreeing(
        candidate=name,
        layout="tp=2",
        reasons=FOUND,
        cause=cause,
        causes=(f"cause: {cause}", "to do: sum valid_tokens over tp"),
    )
    after = [cell(), cell(candidate=name), wrong, inconclusive(candidate="unsure")]
    write(folder / "before.jsonl", whole_run(before))
    write(folder / "after.jsonl", whole_run(after, run="run-2"))
    (folder / "gate.toml").write_text('schema = 1\n[[require]]\ncandidates = ["*"]\n')


@pytest.mark.usefixtures("evidence")
@pytest.mark.parametrize("width", [*WIDTHS, None], ids=lambda width: "file" if width is None else str(width))
@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, width: int | None, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch) -> None:
    """``None``: not on a terminal, as in CI."""
    for variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CI", "true")
    if width is not None:
        for variable, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(width)}.items():
            monkeypatch.setenv(variable, value)
    done = lossgate(*COMMANDS[name])
    assert done.stderr == ""
    assert ("\x1b" in done.stdout) is (width is not None and name not in PLAIN)
    screen = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", done.stdout)
    screen = re.sub(r"sha256 \w{12}", "sha256 ............", screen)
    screen = re.sub(r"\d+\.\d CPU s", "#.# CPU s", screen)
    if width is not None:
        check_width(screen, width)
    compare(f"{name}-{'file' if width is None else width}", screen)


FEW = ("verify", "kernels.py:wrong", "--layout", "single", "--dtype", "float32", "--examples", "4")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("colours", [False, True])
def test_a_log_of_ci_has_no_control_characters(
    colours: bool, folder: Path, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FORCE_COLOR, which many CI systems set, asks for colours and for nothing else."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1") if colours else monkeypatch.delenv("FORCE_COLOR", raising=False)
    text = lossgate(*FEW, "--evidence", "ev.jsonl").stdout + lossgate("report", "ev.jsonl").stdout
    assert ("\x1b[1;31mDISAGREE" in text) is colours
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain.replace("\n", "").isprintable()
    assert "1 cell\n" in plain
    assert "\x1b" not in (folder / "ev.jsonl").read_text()
    if not colours:
        assert not re.search(r" $", plain, re.MULTILINE)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ci", ["", "true"])
def test_a_terminal_has_a_bar_that_is_gone_at_the_end_and_in_ci_it_has_none(folder: Path, ci: str) -> None:
    """A pseudo-terminal, as ``docker run -t`` and some CI systems have."""
    text = on_a_terminal(folder, {"CI": ci, "TERM": "xterm-256color", "COLUMNS": "80"}, *FEW)
    moves = re.findall(r"\x1b\[[\d;?]*[A-Za-ln-z]", text)
    assert bool(moves) is not bool(ci)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")
    assert ("1 cell\r\n" in text) is bool(ci)
    assert text.splitlines()[-1].startswith("1 cell: \x1b[1;31m1 DISAGREE\x1b[0m; ")


def on_a_terminal(folder: Path, environment: Mapping[str, str], *arguments: str) -> str:
    """Runs a command whose output is a terminal; returns all that it wrote there."""
    reader, terminal = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "lossgate", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=terminal, stderr=terminal, env=kept | dict(environment)) as run:
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError):  # Linux says so when nobody has the terminal open any more
            while some := os.read(reader, 1 << 16):
                written += some
        run.wait(timeout=60)
    os.close(reader)
    return written.decode()
