# SPDX-License-Identifier: Apache-2.0
"""Tests of what people see of a run."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from math import isinf
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lossgate import Candidate, Layout, candidate
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.cell_record import KnownFailureRecord
from lossgate.engine.events import CellAgrees, CellFinished, CellSkipped, CellStarted, RunFinished, RunStarted
from lossgate.engine.settings import Settings
from lossgate.judge.comparison import Comparison
from lossgate.problems.problem import Problem
from lossgate.reports.console import make_console
from lossgate.reports.failures import FailureFiles
from lossgate.reports.terminal import Terminal, Volume
from lossgate.reports.verdict_table import VerdictTable, summary, verdict_table
from lossgate.specs.outputs import LOSS
from property_tests.meta.made_results import made_result

WIDTHS = pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
LONG = "fused_linear_cross_entropy_of_the_third_party"
LAYOUTS = [Layout(dp=dp, cp=cp, tp=tp) for dp in (1, 2) for cp in (1, 2) for tp in (1, 2)]

PROBLEM = Problem(
    spec="nll", head="hidden", dtype="float32", lengths=(1234,), masks=("all",), hidden=1, vocab=2345, seed=0
)


def kernel(name: str, good_for: str = "") -> Candidate:
    made = candidate("nll", head="logits", name="kernel", good_for=good_for)(
        lambda inputs, options, mesh: inputs.logits.sum()
    )
    return replace(made, name=name)  # which may be a name that a declaration does not take


def made_up(
    cell: Cell,
    verdict: Verdict,
    *,
    margin: float = 0.24,
    mde: float = 3.5e-7,
    problems: int = 20,
    comparisons: int = 2,
    reasons: tuple[str, ...] = (),
    expected: bool = False,
) -> CellResult:
    """A result of ``problems`` problems with ``comparisons`` comparisons each."""
    comparison = Comparison(output=LOSS, values={"scale": margin}, limits={"scale": 1.0})
    known = KnownFailureRecord(name="torch-1", example="e" * 64, expected=True) if expected else None
    return made_result(
        cell,
        verdict,
        reasons,
        (CaseResult(problem=PROBLEM, comparisons=(comparison,) * comparisons),) * problems,
        margin=None if isinf(margin) else margin,
        mde=None if isinf(mde) else mde,
        known_failure=known,
    )


def over_layouts(kernel: Candidate, dtype: str, verdicts: Iterable[Verdict], **numbers: Any) -> list[CellResult]:
    cells = (Cell(kernel, layout, dtype) for layout in LAYOUTS)
    return [made_up(cell, verdict, **numbers) for cell, verdict in zip(cells, verdicts, strict=True)]


def one(name: str, verdict: Verdict, layout: Layout = LAYOUTS[-1], **numbers: Any) -> CellResult:
    return made_up(Cell(kernel(name), layout, "float32"), verdict, **numbers)


def table_of(results: Iterable[CellResult]) -> VerdictTable:
    return verdict_table(result.record for result in results)


A, D, I = Verdict  # noqa: E741
ROWS = [
    *over_layouts(kernel("right", good_for="whole logits, and no more than those of one rank"), "float32", [A] * 8),
    *over_layouts(
        kernel(LONG, good_for="hidden states"),
        "bfloat16",
        [A, A, D, A, A, D, A, A],
        margin=7.5e10,
        mde=7.5e10,
        problems=101,
        comparisons=12,
    ),
    *over_layouts(kernel("unsure"), "float16", [A, I, D, A, I, D, A, I], margin=1.2e300, mde=0.999),
    made_up(Cell(kernel("known"), Layout(), "float32"), D, margin=8.25, expected=True),
    one("infinite", D, margin=float("inf"), mde=float("inf")),
]
TABLE = table_of(ROWS)
SHOWN = [row.record for row in ROWS]
NAMES = ["right", LONG, "unsure", "known", "infinite"]
VERDICTS = {
    "AGREE": 1,
    "2 x DISAGREE <--": 2,
    "6 x AGREE": 1,
    "3 x INCONCLUSIVE": 1,
    "3 x AGREE": 1,
    "DISAGREE <--": 1,
}
FIGURES = {"0.24": 1, "3.5e-07": 2, "nothing": 1, "100%": 1, "8.25": 1}
NOISE = ("7.5e+10", "1.2e+300", "inf")
"""Statistics that are many times their limits, which the table does not repeat."""
PROBLEMS = {"160": 2, "808": 1, "20": 2}
COMPARISONS = {"320": 2, "9696": 1, "40": 2}
GIVE_WAY = ("good for", "comparisons", "problems")
"""The columns that give way, in order."""


def render(table: VerdictTable, width: int, **console: Any) -> str:
    text = StringIO()
    Console(file=text, width=width, highlight=False, **console).print(table)
    return text.getvalue()


def parts(text: str) -> tuple[list[str], list[str], str]:
    """The lines of the heading, those of the rows, and the caption."""
    above, below = re.split(r"^─+\n", text, flags=re.MULTILINE)
    rows, _, caption = below.partition(" \n\n") if " \n\n" in below else below.partition("\n\n")
    return above.splitlines()[2:], rows.splitlines(), caption


def cells(lines: Iterable[str]) -> Counter[str]:
    """What stands in the cells, line by line: two spaces or more are between columns."""
    return Counter(cell for line in lines for cell in re.split(r"\s{2,}", line) if cell)


def shown(text: str) -> list[str]:
    """Those of ``GIVE_WAY`` that are there."""
    headings, _, _ = parts(text)
    return [heading for heading in GIVE_WAY if heading in headings[-1]]


@WIDTHS
def test_each_verdict_is_whole_and_stands_second(width: int) -> None:
    headings, rows, _ = parts(render(TABLE, width))
    start = headings[-1].index("verdict")
    found = cells(line[start:] for line in rows)
    assert {verdict: found[verdict] for verdict in VERDICTS} == VERDICTS
    assert found["DISAGREE (known: torch-1)"] == 1 or found["DISAGREE"] == found["(known: torch-1)"] == 1
    assert re.split(r"\s{2,}", headings[-1])[:2] == ["candidate", "verdict"]
    for verdict in ("AGREE", "2 x DISAGREE <--", "3 x INCONCLUSIVE"):
        assert any(re.match(re.escape(verdict) + r"(\s\s|$)", line[start:]) for line in rows)


@WIDTHS
def test_every_number_is_whole(width: int) -> None:
    text = render(TABLE, width)
    found = cells(parts(text)[1])
    numbers = FIGURES | (PROBLEMS if "problems" in shown(text) else {})
    numbers |= COMPARISONS if "comparisons" in shown(text) else {}
    assert {number: found[number] for number in numbers} == numbers
    assert [found["> 10"], found["-"]] == [3, 1]
    assert not any(found[noise] for noise in NOISE)
    assert "…" not in text


@WIDTHS
def test_names_may_be_folded_but_are_never_lost(width: int) -> None:
    headings, rows, _ = parts(render(TABLE, width))
    start = headings[-1].index("verdict")
    assert "".join(line[:start].strip() for line in rows) == "".join(NAMES)


@pytest.mark.parametrize("width", [40, 50])
def test_on_a_narrow_console_names_stay_readable(width: int) -> None:
    text = render(TABLE, width)
    headings, rows, _ = parts(text)
    start = headings[-1].index("verdict")
    assert start >= 8
    assert "".join(line[:start].strip() for line in rows) == "".join(NAMES)
    assert {verdict: cells(line[start:] for line in rows)[verdict] for verdict in VERDICTS} == VERDICTS
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80])
def test_names_are_folded_between_words(width: int) -> None:
    headings, rows, _ = parts(render(TABLE, width))
    pieces = [piece for line in rows if (piece := line[: headings[-1].index("verdict")].strip())]
    assert len(pieces) > len(NAMES)
    assert all(piece.endswith("_") or any(f"_{name}".endswith(f"_{piece}") for name in NAMES) for piece in pieces)


def test_a_name_of_one_long_word_is_folded_anywhere() -> None:
    name = "x" * 70
    headings, rows, _ = parts(render(table_of([one(name, D, margin=7.5e10)]), 60))
    assert "".join(line[: headings[-1].index("verdict")].strip() for line in rows) == name
    assert {"DISAGREE <--", "> 10"} <= set(cells(rows))


@WIDTHS
def test_layouts_and_dtypes_are_never_lost(width: int) -> None:
    found = cells(parts(render(TABLE, width))[1])
    assert [found[word] for word in ("float32", "bfloat16", "float16", "single")] == [3, 1, 1, 1]
    assert found["8, up to 8 ranks"] == 3 or found["8, up to"] == found["8 ranks"] == 3
    assert "".join(cell for cell in found if re.fullmatch(r"(\wp=2,?)+", cell)) == "dp=2,cp=2,tp=2"


def test_good_for_gives_way_first_then_comparisons_then_problems() -> None:
    """Each is there at some widths, and none comes back as the console narrows."""
    steps = [shown(render(TABLE, width)) for width in range(220, 59, -1)]
    distinct = [step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1]]
    assert distinct == [list(GIVE_WAY), ["comparisons", "problems"], ["problems"], []]


def test_names_are_folded_only_when_the_counts_are_gone() -> None:
    """They keep a readable width until dtype and layouts share a column."""
    folded = 0
    for width in range(220, 59, -1):
        text = render(TABLE, width)
        if LONG not in text:
            folded += 1
            headings, _, _ = parts(text)
            assert shown(text) == []
            assert "dtype," in headings[0] or headings[-1].index("verdict") >= 24 + 2
    assert folded > 0


def test_what_gives_way_is_decided_by_what_is_in_the_table() -> None:
    """Short names leave room for counts where long ones don't."""
    short, long = (table_of(over_layouts(kernel(name, good_for="x"), "float32", [A] * 8)) for name in ("right", LONG))
    assert shown(render(short, 100)) == list(GIVE_WAY)
    assert shown(render(long, 100)) == []


def test_a_column_fits_to_the_last_character() -> None:
    """The widths are measured: a column gives way one character before it would not fit."""
    table = table_of(over_layouts(kernel("right"), "float32", [A] * 8))
    width = len(parts(render(table, 200))[1][0])
    assert "comparisons" in shown(render(table, width))
    assert "comparisons" not in shown(render(table, width - 1))


def test_good_for_has_a_column_only_if_a_candidate_says_something() -> None:
    assert "good for" not in shown(render(table_of([one("right", A)]), 200))


@pytest.mark.parametrize("width", range(60, 221, 8))
def test_no_line_is_wider_than_the_console(width: int) -> None:
    assert max(map(len, render(TABLE, width).splitlines())) <= width


@WIDTHS
def test_the_glossary_is_wrapped_and_whole_and_only_shown_if_it_is_asked_for(width: int) -> None:
    _, _, caption = parts(render(verdict_table(SHOWN, glossary=True), width))
    words = " ".join(caption.split())
    assert words.startswith("'worst / limit': the largest statistic of any comparison, divided by its limit.")
    assert words.endswith("'nothing': an error of 100% could have stayed hidden.")
    assert not parts(render(TABLE, width))[2].strip()


def test_a_disagreement_is_marked_and_stands_first_in_its_row() -> None:
    """Without colours too. A known failure is not marked."""
    rows = parts(render(TABLE, 200))[1]
    marked = [line.split()[0] for line in rows if "<--" in line]
    assert marked == [LONG, "unsure", "infinite"]
    assert all("DISAGREE <--" in line for line in rows if "<--" in line)


def test_a_disagreement_is_red_on_a_terminal() -> None:
    text = render(TABLE, 200, force_terminal=True, color_system="standard")
    for name in (LONG, "unsure", "infinite"):
        assert f"\x1b[1;31m{name}" in text
    assert "\x1b[1;31mDISAGREE <--" in text
    assert "\x1b[32mAGREE" in text
    assert "\x1b[36mDISAGREE (known: torch-1)" in text
    assert "\x1b[1;31mknown" not in text


def test_a_file_gets_a_fixed_width_and_no_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    make_console().print(TABLE)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert shown(text) == list(GIVE_WAY)
    assert text == render(TABLE, 180)


def test_no_color_is_honoured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def colours() -> set[str]:
        make_console().print(TABLE)
        codes = re.findall(r"\x1b\[([\d;]*)m", capsys.readouterr().out)
        return {number for code in codes for number in code.split(";")} & {"31", "32", "33", "36"}

    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours() == {"31", "32", "33", "36"}
    monkeypatch.setenv("NO_COLOR", "1")
    assert colours() == set()


def test_names_are_not_taken_for_markup(tmp_path: Path) -> None:
    result = one("loss[red]", D)
    assert "loss[red]" in render(table_of([result]), 100)
    text = StringIO()
    Terminal(FailureFiles(tmp_path), Console(file=text, width=100))(CellFinished(result))
    assert text.getvalue().count("loss[red]") == 2  # the line of the cell, and of its large problems


@WIDTHS
def test_the_summary_stands_last(width: int, tmp_path: Path) -> None:
    text = StringIO()
    Terminal(FailureFiles(tmp_path), Console(file=text, width=width))(RunFinished(tuple(ROWS)))
    last = text.getvalue().rstrip("\n").rpartition("\n\n")[2]
    counts = "26 cells: 17 AGREE, 5 DISAGREE, 3 INCONCLUSIVE, 1 known failure"
    assert " ".join(last.split()) == summary(SHOWN, 0.0) == f"{counts}; 0 s"
    assert summary(SHOWN) == counts


@WIDTHS
def test_the_counts_of_the_progress_bar_are_never_cut(width: int, tmp_path: Path) -> None:
    """The name of the cell gives way."""
    text = StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    results = over_layouts(kernel(LONG), "bfloat16", [A] * 8)
    terminal = Terminal(FailureFiles(tmp_path), console)
    terminal(RunStarted(tuple(result.cell for result in results), Settings()))
    for result in results:
        terminal(CellStarted(result.cell))
        terminal(CellFinished(result))
    terminal.close()
    assert re.search(rf" 0/8 0:00:0\d {LONG[:10]}", text.getvalue())
    assert re.search(r" 7/8 0:00:0\d, about 0:00:0\d left", text.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_that_a_cell_agrees_so_far_is_shown_while_its_properties_are_checked(terminal: bool, tmp_path: Path) -> None:
    """A log has no such line: the verdict may be another in the end."""
    text, result = StringIO(), one("wrong", D)
    console = Console(file=text, width=100, force_terminal=terminal, color_system=None)
    shown = Terminal(FailureFiles(tmp_path), console)
    shown(RunStarted((result.cell,), Settings()))
    shown(CellStarted(result.cell))
    before = text.getvalue()
    shown(CellAgrees(result.cell))
    assert ("agrees so far" in text.getvalue().replace("\N{NO-BREAK SPACE}", " ")) is terminal
    assert terminal or text.getvalue() == before
    shown(CellFinished(result))
    shown(RunFinished((result,)))
    assert "agrees so far" not in text.getvalue().rpartition("DISAGREE")[2]


def test_reasons_are_wrapped_at_words_on_a_terminal_only(tmp_path: Path) -> None:
    """A terminal would break words. Each line of a file stays whole, to be searched."""
    reason = "loss: 2 times the reference; rounding explains 1 +- 7.7e-07, and so it goes on for a while"
    result = one("wrong", D, reasons=(reason,))
    for terminal in (True, False):
        text = StringIO()
        console = Console(file=text, width=60, force_terminal=terminal, color_system=None)
        Terminal(FailureFiles(tmp_path), console)(CellFinished(result))
        lines = text.getvalue().splitlines()
        assert (f"  {reason}" in lines) is not terminal
        if terminal:
            wrapped = lines[-2:]
            assert all(line.startswith("  ") and len(line) <= 60 for line in wrapped)
            assert " ".join(" ".join(wrapped).split()) == reason


def test_the_replay_command_is_one_line_on_a_terminal(tmp_path: Path) -> None:
    """A line break in the middle of a command would be copied with it."""

    class Failures(FailureFiles):
        def of(self, cell: Cell) -> Path | None:
            return Path(f".lossgate/failure-{cell.candidate.name}-float32-cp=2-ac077844.json")

    text = StringIO()
    console = Console(file=text, width=60, force_terminal=True, color_system=None)
    Terminal(Failures(tmp_path), console)(CellFinished(one(LONG, D)))
    command = f"  replay: lossgate replay .lossgate/failure-{LONG}-float32-cp=2-ac077844.json"
    assert text.getvalue().splitlines()[-1] == command


def shown_of(results: Iterable[CellResult], folder: Path, volume: Volume = Volume.NORMAL, **console: Any) -> list[str]:
    """Returns the lines that a run with these results shows."""
    text = StringIO()
    terminal = Terminal(FailureFiles(folder), Console(file=text, width=200, **console), volume)
    found = list(results)
    for result in found:
        terminal(CellFinished(result))
    terminal(RunFinished(tuple(found)))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def failing(name: str, reasons: Iterable[str]) -> list[CellResult]:
    """One result for each reason, on more and more ranks."""
    own = kernel(name)
    cells = (Cell(own, Layout(tp=tp), "float32") for tp in range(2, 9))
    return [made_result(cell, D, (reason,)) for cell, reason in zip(cells, reasons, strict=False)]


ALIKE = [*failing("one", [f"loss: {tp}.5 times the reference" for tp in range(2, 8)]), *failing("other", ["loss: 2"])]


def test_of_cells_that_fail_alike_the_first_is_described(tmp_path: Path) -> None:
    """A log has a line for each all the same."""
    lines = shown_of(ALIKE, tmp_path)
    assert [line for line in lines if line.startswith("  loss")] == ["  loss: 2.5 times the reference", "  loss: 2"]
    assert [f"DISAGREE  one  float32  tp={tp}  like float32  tp=2" in lines for tp in range(2, 8)] == [False] + [
        True
    ] * 5


def test_a_terminal_lists_cells_that_fail_like_others(tmp_path: Path) -> None:
    lines = shown_of(ALIKE, tmp_path, force_terminal=True, color_system=None)
    alike = "  alike: 6 cells, float32 on every layout that was tried: tp=2; tp=3; tp=4; tp=5; tp=6; tp=7"
    assert lines.index(alike) == lines.index("DISAGREE  other  float32  tp=2") - 1
    assert not any("like float32" in line for line in lines)


def test_three_cells_of_a_candidate_that_fail_otherwise_are_described(tmp_path: Path) -> None:
    reasons = ["loss", "grad of hidden", "grad of weight", "logprobs", "loss", "entropy"]
    lines = shown_of(failing("one", reasons), tmp_path)
    assert [line.strip() for line in lines if line.strip() in reasons] == reasons[:3]
    assert "DISAGREE  one  float32  tp=5  logprobs" in lines
    assert "  and 2 more cells of one with other reasons; -v describes them" in lines


def test_verbose_describes_every_cell(tmp_path: Path) -> None:
    lines = shown_of(ALIKE, tmp_path, Volume.VERBOSE)
    assert sum(line.startswith("  loss") for line in lines) == len(ALIKE)


def test_quiet_shows_what_does_not_pass_and_the_summary(tmp_path: Path) -> None:
    right = made_up(Cell(kernel("right"), Layout(), "float32"), A)
    lines = shown_of([right, *ALIKE], tmp_path, Volume.QUIET)
    assert lines[0] == "DISAGREE  one  float32  tp=2"
    assert not any("Verdicts" in line or line.startswith("AGREE") for line in lines)
    assert lines[-1] == "8 cells: 1 AGREE, 7 DISAGREE; 0 s"
    assert shown_of([right], tmp_path, Volume.QUIET) == ["1 cell: 1 AGREE; 0 s"]


def test_a_known_failure_has_a_line_without_statistics(tmp_path: Path) -> None:
    known = made_up(Cell(kernel("known"), Layout(), "float32"), D, margin=1e25, expected=True)
    lines = shown_of([known], tmp_path)
    assert lines[0] == "DISAGREE (known: torch-1)  known  float32  single:  as expected  (0.0 s)"


def test_cells_that_were_not_tried_are_counted_with_the_reason(tmp_path: Path) -> None:
    text = StringIO()
    terminal = Terminal(FailureFiles(tmp_path), Console(file=text, width=200))
    own = kernel("raises[red]")
    for tp in (3, 4):
        terminal(CellSkipped(Cell(own, Layout(tp=tp), "float32"), "rank 0 raised ValueError: no [bold]  [k.py:3]"))
    terminal(RunFinished(tuple(failing("raises[red]", ["a", "a"]))))
    expected = (
        "raises[red]: 2 more cells not tried, since all before ended alike: rank 0 raised ValueError: no [bold]  "
    )
    assert f"{expected}[k.py:3]" in text.getvalue().splitlines()


def test_what_kernels_print_is_shown_once(tmp_path: Path) -> None:
    noisy = replace(made_up(Cell(kernel("right"), Layout(), "float32"), A), printed="one[red]\n\ntwo\n" * 100)
    other = replace(made_up(Cell(kernel("right"), Layout(tp=2), "float32"), A), printed="two\nthree\x1b[2J\n")
    lines = shown_of([noisy, other], tmp_path)
    at = lines.index("  right printed 200 lines; each is shown once:")
    assert lines[at + 1 : at + 3] == ["    one[red]", "    two"]
    at = lines.index("  right printed 2 lines; each is shown once:")
    assert lines[at + 1] == "    three\\x1b[2J"
    assert sum(line == "    two" for line in lines) == 1


def test_ten_lines_that_a_kernel_prints_are_shown_and_more_with_verbose(tmp_path: Path) -> None:
    text = "\n".join(f"line {i}" for i in range(25))
    noisy = replace(made_up(Cell(kernel("right"), Layout(), "float32"), A), printed=text)
    lines = shown_of([noisy], tmp_path)
    assert "    line 9" in lines
    assert "    line 10" not in lines
    assert "    and 15 other lines; -v shows all" in lines
    assert "    line 24" in shown_of([noisy], tmp_path, Volume.VERBOSE)
    assert not any("printed" in line for line in shown_of([noisy], tmp_path, Volume.QUIET))
