# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate report``: what people see of evidence without a policy."""

import re
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellKey, CellRecord, KnownFailureRecord, PropertyRecord
from lossgate.evidence.gather import gather
from lossgate.evidence.records import Matrix, Record
from lossgate.evidence.sealed import seal
from lossgate.reports.describe import EXEMPT, NOT_DISTINGUISHED
from lossgate.reports.evidence_table import print_report, troubles
from property_tests.meta.command_line import Done, Lossgate, in_a_process
from property_tests.meta.made_evidence import cell, disagreeing, inconclusive, output, whole_run, write

Change = Callable[[list[Record]], list[Record]]
KNOWN = disagreeing(known_failure=KnownFailureRecord(name="torch-1", example="e" * 64, expected=True))
LATER = "2026-11-21T12:00:30+00:00"


@pytest.fixture
def report(folder: Path, lossgate: Lossgate) -> Callable[..., Done]:
    """Returns ``report(cells, *arguments)``, which reports a whole run of cells."""

    def run(cells: Sequence[CellRecord], *arguments: str) -> Done:
        write(folder / "out.jsonl", whole_run(cells))
        return lossgate("report", "out.jsonl", *arguments)

    return run


def shown(files: Sequence[Path], width: int = 180, terminal: bool = False) -> str:
    text = StringIO()
    gathered = gather(files)
    console = Console(file=text, width=width, highlight=False, force_terminal=terminal, color_system=None)
    print_report(console, gathered, troubles(gathered))
    return text.getvalue()


@pytest.mark.parametrize(
    ("cells", "code", "summary"),
    [
        ([cell()], 0, "1 cell: 1 AGREE"),
        ([cell(), inconclusive(dtype="bfloat16")], 3, "2 cells: 1 AGREE, 1 INCONCLUSIVE"),
        (
            [cell(), inconclusive(dtype="bfloat16"), disagreeing(dtype="float16")],
            1,
            "3 cells: 1 AGREE, 1 DISAGREE, 1 INCONCLUSIVE",
        ),
        ([KNOWN], 0, "1 cell: 1 known failure"),
    ],
)
def test_the_exit_code_and_the_last_line_are_those_of_verify(
    report: Callable[..., Done], cells: list[CellRecord], code: int, summary: str
) -> None:
    done = report(cells)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines()[-1] == summary


def test_runs_are_reported(report: Callable[..., Done]) -> None:
    text = report([cell()]).stdout
    assert "out.jsonl  (sha256 " in text
    assert "run-1  2026-11-20 12:00:00 to 12:01:00 UTC, 60 s, 1 cell, seed 0" in text
    for line in ("c" * 12, "lossgate 0.1.0, torch 2.13.0", "host"):
        assert line in text


def test_a_cell_that_disagrees_is_reported_as_verify_tells_it(folder: Path, lossgate: Lossgate) -> None:
    verified = lossgate(
        "verify", "kernels.py:wrong", "--layout", "single", "--dtype", "float32", "--evidence", "out.jsonl"
    )
    reported = lossgate("report", "out.jsonl")
    assert verified.returncode == reported.returncode == 1
    detail = verified.stdout[: verified.stdout.index("\nVerdicts")].splitlines()[1:]
    assert detail[-1].startswith("  replay: lossgate replay ")
    assert "\n".join(detail) in reported.stdout
    table = [line.split() for line in verified.stdout.splitlines() if "<--" in line]
    assert table == [line.split() for line in reported.stdout.splitlines() if "<--" in line]


def test_the_first_failing_cells_of_a_candidate_are_described_and_the_others_counted(
    report: Callable[..., Done],
) -> None:
    text = report([disagreeing(layout=f"tp={tp}") for tp in range(2, 8)] + [disagreeing(candidate="other")]).stdout
    assert [f"DISAGREE  nll  float32  tp={tp}\n" in text for tp in range(2, 8)] == [True] + [False] * 5
    assert "  alike: 6 cells, float32 on " in text
    assert "DISAGREE  other" in text
    assert "alike: 1 cell" not in text


def test_a_report_of_many_candidates_is_short_and_the_worst_stands_first(report: Callable[..., Done]) -> None:
    agreeing = [cell(candidate=f"right_{i}") for i in range(70)]
    text = report([*agreeing, *(disagreeing(candidate=f"wrong_{i}") for i in range(20))]).stdout
    assert "\nand 12 more cells of 12 other candidates\n" in text
    assert "\nand 30 more rows, none of them worse: 30 cells: 30 AGREE\n" in text
    assert text.count("<--") == 20
    assert len(text.splitlines()) < 130


def test_cells_of_other_places_have_rows_of_their_own(report: Callable[..., Done]) -> None:
    text = report([cell(), cell(device="cuda", world="nccl")]).stdout
    assert "nll on nccl/cuda" in text
    assert len(re.findall(r"^nll ", text, re.MULTILINE)) == 2


def test_the_newest_of_a_cell_counts(folder: Path) -> None:
    old = write(folder / "old.jsonl", whole_run([disagreeing()]))
    new = write(folder / "new.jsonl", whole_run([cell(time=LATER)], run="run-2"))
    for files in ([old, new], [new, old]):
        text = shown(files)
        assert text.splitlines()[-1].startswith("1 cell: 1 AGREE")
        assert "1 cell was verified more than once, in 2 runs from 2026-11-20 12:00:30 UTC to " in text
        assert "1 cell had another verdict before: nll[agreement-single-float32]." in text
    assert "more than once" not in shown([new])


def cut(records: list[Record]) -> list[Record]:
    return records[:-1]


def cell_gone(records: list[Record]) -> list[Record]:
    return [records[0], *records[2:]]


def start_gone(records: list[Record]) -> list[Record]:
    return records[1:]


def stopped(records: list[Record]) -> list[Record]:
    return [*records[:-1], msgspec.structs.replace(records[-1], stopped="a rank was lost")]


def a_part(records: list[Record]) -> list[Record]:
    return [msgspec.structs.replace(records[0], part="2/3", matrix=Matrix(cells=9, digest="d" * 64)), *records[1:]]


def another_start(records: list[Record]) -> list[Record]:
    return [*records, msgspec.structs.replace(records[0], host="elsewhere")]


def contradictory(records: list[Record]) -> list[Record]:
    return whole_run([cell(), cell(dtype="bfloat16", verdict="DISAGREE")])


def empty(records: list[Record]) -> list[Record]:
    return []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (cut, "run run-1: the record of its end is missing"),
        (cell_gone, "nll[agreement-single-float32]: run run-1 planned it, but has no result of it"),
        (start_gone, "run run-1: the record of its start is missing"),
        (stopped, "run run-1: it was stopped: a rank was lost"),
        (a_part, "parts 1/3, 3/3 of the matrix of 9 cells are missing"),
        (another_start, "out.jsonl:5: another line has started or ended this run differently"),
        (
            contradictory,
            "out.jsonl:3: nll[agreement-single-bfloat16] contradicts its own numbers: its verdict is DISAGREE, but",
        ),
        (empty, "there is no evidence of any cell"),
    ],
)
def test_what_is_wrong_with_evidence_is_reported_and_is_no_pass(
    folder: Path, lossgate: Lossgate, change: Change, line: str
) -> None:
    whole = whole_run([cell(), cell(dtype="bfloat16")])
    write(folder / "out.jsonl", whole)
    assert lossgate("report", "out.jsonl").returncode == 0
    write(folder / "out.jsonl", change(whole))
    done = lossgate("report", "out.jsonl")
    assert (done.returncode, done.stderr) == (3, "")
    assert f"  {line}" in done.stdout.partition("The evidence is not whole:\n")[2]


def test_damaged_lines_are_reported_with_their_place(folder: Path, lossgate: Lossgate) -> None:
    lines = [seal(record) for record in whole_run([cell(layout=f"tp={tp}") for tp in range(2, 12)])]
    damaged = [line[:-9] if b'"kind":"cell"' in line else line for line in lines]
    (folder / "out.jsonl").write_bytes(b"\n".join(damaged))
    done = lossgate("report", "out.jsonl")
    assert done.returncode == 3
    assert [f"out.jsonl:{number}: it is cut" in done.stdout for number in range(2, 12)] == [True] * 5 + [False] * 5
    assert "  and 6 more like these\n" in done.stdout  # the last is that the end tells of more cells


def test_a_disagreement_stays_one_when_lines_are_damaged(folder: Path, lossgate: Lossgate) -> None:
    write(folder / "out.jsonl", cut(whole_run([disagreeing()])))
    assert lossgate("report", "out.jsonl").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report: nothing named; expected files or folders"),
        (["nowhere.jsonl"], "can't read nowhere.jsonl: No such file or directory"),
        (["bare"], "bare: no *.jsonl in this folder or below"),
        (["out.jsonl", "--cell", "other"], "--cell other: no cell has such a name"),
        (["out.jsonl", "--html", "no/such/page.html"], "--html no/such/page.html: can't be written"),
    ],
)
def test_bad_use_is_one_clear_line(folder: Path, lossgate: Lossgate, arguments: list[str], message: str) -> None:
    if "--html" in arguments:
        pytest.importorskip("lossgate.reports.page.render")
    (folder / "bare").mkdir()
    write(folder / "out.jsonl", whole_run([cell()]))
    done = lossgate("report", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {message}")
    assert done.stderr.count("\n") == 1


def test_a_page_is_written(folder: Path, lossgate: Lossgate) -> None:
    pytest.importorskip("lossgate.reports.page.render")
    write(folder / "out.jsonl", whole_run([cell()]))
    assert lossgate("report", "out.jsonl", "--html", "page.html").returncode == 0
    assert "<html" in (folder / "page.html").read_text()


NAME = "nll[agreement-tp=2-float32]"


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (NAME, True),
        ("nll", True),
        ("n*", True),
        ("n??", True),
        ("nll[*tp=2*]", True),
        ("*[*-float32]", True),
        ("*float32", True),
        ("nll*-float32", True),
        ("*tp=2", False),
        ("nll[*tp=4*]", False),
        ("nl", False),
        ("agreement", False),
        ("[n]ll", False),
    ],
)
def test_brackets_of_a_pattern_stand_for_themselves(pattern: str, matched: bool) -> None:
    assert CellKey("nll", "agreement", "tp=2", "float32", "simulated", "cpu").matches(pattern) is matched


@pytest.mark.parametrize("candidate", ["a[b]", "a*", "[!x]", "a]b[", "?"])
def test_each_cell_is_matched_by_its_own_name(candidate: str) -> None:
    key = CellKey(candidate, "agreement", "single", "float32", "gloo", "cuda")
    assert key.matches(str(key))


def test_the_story_of_a_cell_has_all_that_is_known(folder: Path, lossgate: Lossgate) -> None:
    write(folder / "old.jsonl", whole_run([inconclusive()]))
    failing = disagreeing(
        time=LATER,
        causes=("cause: it forgets a factor",),
        resources={"memory": {"peak": 3.0}},
        coverage={"masked token": 1},
        killed=5,
        not_distinguished=("mode a and b",),
    )
    write(folder / "new.jsonl", whole_run([failing, cell(candidate="other")], run="run-2"))
    done = lossgate("report", "old.jsonl", "new.jsonl", "--cell", "nll[agreement-single-float32]")
    assert done.returncode == 1
    for line in (
        "DISAGREE  nll[agreement-single-float32]",
        "  loss: 1.01 times the reference",
        "  on: 1 token",
        "  replay: lossgate replay failure.json",
        "  cause: it forgets a factor",
        "  what: nll from logits, declared as kernels.py:nll",
        "  before: 2 runs, from 2026-11-20 12:00:30 UTC to 2026-11-21 12:00:30 UTC; the last: INCONCLUSIVE, DISAGREE",
        "  seen: 1 problem, 1 comparison, detects 1%",
        "  not distinguished: mode a and b",
        "  planted errors rejected in loss: zero 100%",
        "  goal trained token: 0 problems",
        "  goal masked token: 1 problem  (not required)",
        "  option mutants: 5 killed",
        "  memory: 3 peak",
    ):
        assert f"{line}\n" in done.stdout
    assert re.search(r"^  loss +0\.01 \+- 1e-06 +1% +1e\+04 scale +1$", done.stdout, re.MULTILINE)
    assert "other" not in done.stdout


def test_choices_that_were_not_distinguished_stand_once_below_the_table(report: Callable[..., Done]) -> None:
    alike = [cell(dtype=dtype, not_distinguished=("mode a and b",)) for dtype in ("float32", "bfloat16")]
    assert f"\n{NOT_DISTINGUISHED}\n  mode a and b: 2 cells of nll\n\n" in report(alike).stdout


def test_properties_to_which_candidates_are_not_held_stand_once_below_the_table(report: Callable[..., Done]) -> None:
    held = (PropertyRecord(name="no-grad", problems=0, exempt="it is for training"),)
    exempt = [cell(dtype=dtype, properties=held) for dtype in ("float32", "bfloat16")]
    assert f"\n{EXEMPT}\n  no-grad: it is for training: 2 cells of nll\n\n" in report(exempt).stdout


def test_the_exit_code_of_a_story_is_that_of_its_cells(report: Callable[..., Done]) -> None:
    cells = [cell(), disagreeing(candidate="other")]
    assert report(cells, "--cell", "nll").returncode == 0
    assert report(cells, "--cell", "nll", "--cell", "oth*").returncode == 1


def test_an_output_that_was_never_compared_is_reported(report: Callable[..., Done]) -> None:
    unseen = output(name="entropy", metric=True, cases=(), scale=(), limit=(), sd=(), mean=(), shares={}, pooled=None)
    text = report([cell(outputs=(output(), unseen))], "--cell", "nll").stdout
    assert re.search(r"^  entropy +never compared +nothing ", text, re.MULTILINE)


HOSTILE = "[red]loss[/]\n\x1b[31m\u202e"
AS_SHOWN = r"[red]loss[/]\n\x1b[31m\u202e"


@pytest.mark.parametrize("arguments", [[], ["--cell", "*"]])
def test_names_are_shown_literally(report: Callable[..., Done], arguments: list[str]) -> None:
    text = report([disagreeing(candidate=HOSTILE, reasons=(HOSTILE,), source=HOSTILE)], *arguments).stdout
    assert AS_SHOWN in text
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal(folder: Path, width: int) -> None:
    """The replay command excepted, which is copied."""
    long = "a reason of many words " * 12
    failing = [disagreeing(candidate="a_kernel_with_a_long_name", layout=f"tp={tp}", reasons=(long,)) for tp in (2, 3)]
    text = shown([write(folder / "out.jsonl", cut(whole_run(failing)))], width, terminal=True)
    assert max(len(line) for line in text.splitlines() if "replay" not in line) <= width
    assert "…" not in text


def test_a_file_has_each_reason_in_one_line(folder: Path) -> None:
    long = "word " * 100 + "end"
    assert f"  {long}\n" in shown([write(folder / "out.jsonl", whole_run([disagreeing(reasons=(long,))]))], 80)


@pytest.mark.parametrize("arguments", [[], ["--cell", "*"]])
def test_no_line_of_a_file_ends_in_blanks(report: Callable[..., Done], arguments: list[str]) -> None:
    text = report([cell(), disagreeing(candidate="a_long_name_of_a_kernel")], *arguments).stdout
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize(("number", "words"), [(0, "0 cells"), (1, "1 cell"), (2, "2 cells")])
def test_numbers_have_the_right_plural(number: int, words: str) -> None:
    assert counted(number, "cell") == words


def test_report_as_a_process_without_torch(folder: Path) -> None:
    write(folder / "out.jsonl", whole_run([cell()]))
    (folder / "torch.py").write_text("raise ImportError('a report needs no torch')")
    done = in_a_process(folder, "report", "out.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("1 cell: 1 AGREE\n")
