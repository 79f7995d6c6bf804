# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate diff``: what changed between two runs."""

import inspect
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import docstring_parser
import msgspec
import pytest
from rich.console import Console

from lossgate.cli import diff as diff_command
from lossgate.cli import report as report_command
from lossgate.engine.cell_record import CellRecord, KnownFailureRecord
from lossgate.engine.output_record import PooledRecord
from lossgate.evidence.differences import changes, read_side
from lossgate.evidence.sight import FACTOR, losses, sight_of
from lossgate.reports.changed_cells import print_diff
from property_tests.meta.command_line import Done, Lossgate, in_a_process
from property_tests.meta.made_evidence import breaking, cell, disagreeing, inconclusive, output, whole_run, write

Diff = Callable[..., Done]
KNOWN = disagreeing(known_failure=KnownFailureRecord(name="torch-1", example="e" * 64, expected=True))
GONE = disagreeing(known_failure=KnownFailureRecord(name="torch-1", example="e" * 64, expected=False))
NAME = "nll[agreement-single-float32]"


@pytest.fixture
def diff(folder: Path, lossgate: Lossgate) -> Diff:
    """Returns ``diff(before, after, **changed)``, which compares two whole runs.

    The changes are those of the record of the second.
    """

    def run(before: Sequence[CellRecord], after: Sequence[CellRecord], **changed: Any) -> Done:
        write(folder / "a.jsonl", whole_run(before))
        write(folder / "b.jsonl", whole_run(after, **{"run": "run-2", **changed}))
        return lossgate("diff", "a.jsonl", "b.jsonl")

    return run


@pytest.mark.parametrize("one", [cell(), disagreeing(), inconclusive(), KNOWN, GONE], ids=lambda one: one.verdict)
def test_what_did_not_change_is_not_reported(diff: Diff, one: CellRecord) -> None:
    done = diff([one], [one])
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 unchanged\n", "")


@pytest.mark.parametrize(
    ("before", "after", "code", "line"),
    [
        ([cell()], [disagreeing()], 1, f"disagree now (1)\n  {NAME}: was AGREE; loss: 1.01 times the reference"),
        ([inconclusive()], [disagreeing()], 1, f"disagree now (1)\n  {NAME}: was INCONCLUSIVE; loss: 1.01"),
        ([KNOWN], [GONE], 1, f"disagree now (1)\n  {NAME}: was known failure; "),
        ([], [disagreeing()], 1, f"disagree now (1)\n  {NAME}: was not there; loss: 1.01"),
        ([cell()], [breaking()], 1, f"break promises now (1)\n  {NAME}: was AGREE; property masked-nan: loss: NaN"),
        ([], [breaking()], 1, f"break promises now (1)\n  {NAME}: was not there; property masked-nan: loss: NaN"),
        (
            [disagreeing()],
            [breaking()],
            0,
            f"better (1)\n  {NAME}: was DISAGREE, is PROMISE BROKEN: property masked-nan",
        ),
        ([breaking()], [disagreeing()], 1, f"disagree now (1)\n  {NAME}: was PROMISE BROKEN; loss: 1.01"),
        (
            [breaking()],
            [breaking("no-grad")],
            0,
            f"are wrong in another way (1)\n  {NAME}: was in masked-nan, is in no-grad",
        ),
        ([cell()], [], 3, f"vanished (1)\n  {NAME}: was AGREE"),
        ([disagreeing()], [], 3, f"vanished (1)\n  {NAME}: was DISAGREE"),
        ([cell()], [inconclusive()], 3, f"inconclusive now (1)\n  {NAME}: was AGREE; a kernel that computes"),
        ([disagreeing()], [inconclusive()], 3, f"inconclusive now (1)\n  {NAME}: was DISAGREE; a kernel that"),
        ([cell()], [KNOWN], 3, f"only a frozen example is judged (1)\n  {NAME}: was AGREE, is a known failure"),
        ([disagreeing()], [KNOWN], 3, f"only a frozen example is judged (1)\n  {NAME}: was DISAGREE, is a known"),
        ([disagreeing()], [cell()], 0, f"better (1)\n  {NAME}: was DISAGREE, is AGREE"),
        ([inconclusive()], [cell()], 0, f"better (1)\n  {NAME}: was INCONCLUSIVE, is AGREE"),
        ([KNOWN], [cell()], 0, f"better (1)\n  {NAME}: was known failure, is AGREE"),
        ([], [cell()], 0, f"appeared (1)\n  {NAME}: is AGREE"),
        ([], [inconclusive()], 0, f"appeared (1)\n  {NAME}: is INCONCLUSIVE"),
    ],
)
def test_a_change_of_verdict(
    diff: Diff, before: list[CellRecord], after: list[CellRecord], code: int, line: str
) -> None:
    same = cell(candidate="same")
    done = diff([same, *before], [same, *after])
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(line) or f" {line}" in done.stdout
    assert done.stdout.count(NAME) == 1
    assert done.stdout.endswith(", 1 unchanged\n")


def test_a_disagreement_of_another_kind_is_reported_and_is_not_worse(diff: Diff) -> None:
    assert disagreeing().failure is not None
    elsewhere = disagreeing(failure=msgspec.structs.replace(disagreeing().failure, symptoms=("grad of logits",)))
    done = diff([disagreeing()], [elsewhere])
    assert done.returncode == 0
    assert f"are wrong in another way (1)\n  {NAME}: was in loss, is in grad of logits\n" in done.stdout


LIMIT = PooledRecord(problems=3, scale=0.0, limit=1e-6)
MANY = cell(
    outputs=(output(pooled=LIMIT, planted={"zero": 1.0, "x1.01": 0.5}), output(name="logprobs")),
    problems=20,
    coverage={"trained token": 3, "masked token": 1},
    killed=8,
)


def with_loss(**changed: Any) -> CellRecord:
    return msgspec.structs.replace(MANY, outputs=(msgspec.structs.replace(MANY.outputs[0], **changed), MANY.outputs[1]))


def with_limit(factor: float) -> CellRecord:
    return with_loss(pooled=msgspec.structs.replace(LIMIT, limit=1e-6 * factor))


def replaced(**changed: Any) -> CellRecord:
    return msgspec.structs.replace(MANY, **changed)


UNCOMPARED = output(name="logprobs", cases=(), scale=(), limit=(), sd=(), mean=(), shares={}, pooled=None, planted={})


@pytest.mark.parametrize(
    ("after", "lost"),
    [
        (with_limit(1.01 * FACTOR), ["loss detected errors from 1e-06, now only from 1.5e-06"]),
        (with_limit(0.99 * FACTOR), []),
        (with_limit(0.1), []),
        (with_loss(pooled=None), ["the scale of loss is not compared any more"]),
        (replaced(problems=19), ["20 problems, now 19"]),
        (replaced(problems=21), []),
        (replaced(coverage={"trained token": 1, "masked token": 0}), ["goals not reached any more: masked token"]),
        (replaced(coverage={"trained token": 1, "masked token": 1, "another": 1}), []),
        (replaced(surviving=("a as b",), killed=7), ["option mutants that survive now: a as b"]),
        (
            replaced(surviving=("a as b",), equivalent=("a as b",), killed=8),
            ["option mutants that survive now: a as b"],
        ),
        (replaced(killed=6), ["8 option mutants were killed, now 6"]),
        (replaced(killed=9), []),
        (replaced(outputs=MANY.outputs[:1]), ["no longer compared: logprobs"]),
        (replaced(outputs=(MANY.outputs[0], UNCOMPARED)), ["no longer compared: logprobs"]),
        (replaced(outputs=(*MANY.outputs, output(name="entropy"))), []),
        (
            with_loss(planted={"zero": 0.6, "x1.01": 0.5}),
            ["planted error zero in loss: rejected in 100% of the problems, now in 60%"],
        ),
        (with_loss(planted={"zero": 1.0}), ["planted error x1.01 in loss: rejected in 50% of the problems, now in 0%"]),
        (with_loss(planted={"zero": 0.9, "x1.01": 0.4}), []),
        (with_loss(planted={"zero": 1.0, "x1.01": 1.0}), []),
        (replaced(needs_adequacy=False), ["goals and option mutants are not asked for any more"]),
    ],
)
def test_what_a_cell_sees_less_of(after: CellRecord, lost: list[str]) -> None:
    assert [loss.message for loss in losses(sight_of(MANY), sight_of(after))] == lost


def test_the_gravest_loss_stands_first() -> None:
    after = msgspec.structs.replace(with_limit(50.0), problems=10, coverage={"trained token": 1})
    lost = [loss.message for loss in losses(sight_of(MANY), sight_of(after))]
    assert [line.split()[0] for line in lost] == ["goals", "loss", "20"]


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (cell(problems=20), cell(problems=9), 3),
        (inconclusive(problems=20), inconclusive(problems=9), 3),
        (disagreeing(problems=20), cell(problems=9), 0),
        (disagreeing(problems=20), disagreeing(problems=9), 0),
        (cell(problems=9), cell(problems=20), 0),
    ],
)
def test_lost_power_is_reported_of_cells_that_do_not_disagree(
    diff: Diff, before: CellRecord, after: CellRecord, code: int
) -> None:
    """A disagreement stops a cell early: that it has seen little is no loss."""
    done = diff([before], [after])
    assert done.returncode == code
    assert (f"lost power (1)\n  {NAME}: 20 problems, now 9\n" in done.stdout) is (code == 3)


def test_a_cell_that_agrees_now_because_it_sees_less_is_reported_twice(diff: Diff) -> None:
    done = diff([inconclusive(problems=20)], [cell(problems=9)])
    assert done.returncode == 3
    assert "lost power (1)" in done.stdout
    assert "better (1)" in done.stdout


def test_the_newest_of_each_side_counts(folder: Path, lossgate: Lossgate) -> None:
    for name, cells in {"a": [cell()], "b": [disagreeing(), cell(time="2026-11-21T12:00:30+00:00")]}.items():
        (folder / name).mkdir()
        for number, one in enumerate(cells):
            write(folder / name / f"{number}.jsonl", whole_run([one], run=f"run-{number}"))
    assert lossgate("diff", "a", "b").returncode == 0


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"commit": "d" * 40}, f"commit: {'c' * 40}, now {'d' * 40}"),
        ({"modified": True}, f"commit: {'c' * 40}, now {'c' * 40} with changes"),
        ({"versions": {"lossgate": "0.1.0", "torch": "2.14.0"}}, "torch: 2.13.0, now 2.14.0"),
        ({"versions": {"lossgate": "0.1.0"}}, "torch: 2.13.0, now none"),
        ({"settings": {"examples": 5, "seed": 0}}, "setting examples: 3, now 5"),
        ({"host": "elsewhere"}, "host: host, now elsewhere"),
    ],
)
def test_what_changed_around_cells_is_reported_and_is_not_worse(diff: Diff, changed: dict[str, Any], line: str) -> None:
    done = diff([cell()], [cell()], **changed)
    assert (done.returncode, done.stdout) == (0, f"what else changed\n  {line}\n\n1 unchanged\n")


def test_another_device_and_another_source_are_reported(diff: Diff) -> None:
    text = diff([cell()], [cell(device="cuda", source_digest="b" * 64)]).stdout
    assert "  device: cpu, now cuda\n" in text
    assert f"  source kernels.py: sha256 {'a' * 12}, now sha256 {'b' * 12}\n" in text


@pytest.mark.parametrize("side", ["a.jsonl", "b.jsonl"])
@pytest.mark.parametrize("lines", [0, 2], ids=["empty", "unfinished"])
def test_evidence_that_is_not_whole_is_reported_and_is_no_pass(
    folder: Path, lossgate: Lossgate, side: str, lines: int
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(folder / name, whole_run([cell()])[: lines if name == side else None])
    done = lossgate("diff", "a.jsonl", "b.jsonl")
    assert done.returncode == 3
    assert f"the evidence is not whole\n  {side}: " in done.stdout


def test_a_trouble_names_its_side_once(folder: Path, lossgate: Lossgate) -> None:
    """A line of evidence has the name of its file, and other troubles get that of their side."""
    for name in ("a.jsonl", "b.jsonl"):
        write(folder / name, whole_run([cell()]))
    damaged = folder / "b.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    lines = lossgate("diff", "a.jsonl", "b.jsonl").stdout.partition("the evidence is not whole\n")[2].splitlines()
    assert lines[0].startswith("  b.jsonl:3: it is cut")
    assert lines[1].startswith("  b.jsonl: run run-1: ")


def test_nothing_to_compare_is_reported(folder: Path, lossgate: Lossgate) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(folder / name, [])
    assert lossgate("diff", "a.jsonl", "b.jsonl").stdout.endswith("\nno cells to compare\n")


def test_a_line_that_contradicts_itself_is_no_disagreement(diff: Diff) -> None:
    done = diff([cell()], [cell(verdict="DISAGREE")])
    assert done.returncode == 3
    assert "disagree now" not in done.stdout
    assert "contradicts its own numbers" in done.stdout
    assert "vanished" not in done.stdout


def test_the_first_cells_of_a_candidate_are_reported_the_worst_first(diff: Diff) -> None:
    numbers = {f"tp={tp}": 100 - tp for tp in range(2, 9)}
    before = [cell(layout=layout, problems=100) for layout in numbers] + [cell(candidate="other", problems=100)]
    after = [cell(layout=layout, problems=number) for layout, number in numbers.items()]
    text = diff(before, [*after, cell(candidate="other", problems=50)]).stdout
    lines = text.splitlines()
    assert lines[:2] == ["lost power (8)", "  other[agreement-single-float32]: 100 problems, now 50"]
    assert lines[2] == "  nll[agreement-tp=8-float32]: 100 problems, now 92"
    assert lines[5:7] == ["  and 4 more like these of nll", ""]
    assert lines[-1] == "8 lost power"


def test_a_kind_of_change_fits_on_a_screen(diff: Diff) -> None:
    lines = diff([cell()], [cell(), *(cell(candidate=f"kernel_{i}") for i in range(40))]).stdout.splitlines()
    assert lines[13] == "  and 28 more cells of 28 other candidates"
    assert len(lines) == 16


HOSTILE = "[red]loss[/]\n\x1b[31m"
AS_SHOWN = r"[red]loss[/]\n\x1b[31m"


def test_names_are_shown_literally(diff: Diff) -> None:
    text = diff([cell(candidate=HOSTILE)], [disagreeing(candidate=HOSTILE)], host=HOSTILE).stdout
    assert f"{AS_SHOWN}[agreement-single-float32]: was AGREE" in text
    assert f"host: host, now {AS_SHOWN}" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_lines_are_wrapped_with_an_indent_on_a_terminal(folder: Path, width: int) -> None:
    before = read_side(write(folder / "a.jsonl", whole_run([cell()])))
    after = read_side(write(folder / "b.jsonl", whole_run([disagreeing(reasons=("many words " * 30,))])))
    text = StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None, highlight=False)
    print_diff(console, changes(before, after), [], [], 0)
    _, first, *rest = text.getvalue().rstrip().splitlines()
    assert first.startswith(f"  {NAME}: was")
    assert all(line.startswith("      ") for line in rest[:-2])
    assert max(map(len, text.getvalue().splitlines())) <= width
    assert text.getvalue().count("many") == text.getvalue().count("words") == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jsonl"], 'Command "diff" parameter AFTER requires an argument.'),
        (["a.jsonl", "nowhere.jsonl"], "can't read nowhere.jsonl: No such file or directory"),
    ],
)
def test_bad_use_is_one_clear_line(folder: Path, lossgate: Lossgate, arguments: list[str], message: str) -> None:
    write(folder / "a.jsonl", whole_run([cell()]))
    done = lossgate("diff", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [diff_command, report_command])
def test_help_gives_the_meaning_of_each_parameter(command: Callable[..., int]) -> None:
    parsed = docstring_parser.parse(command.__doc__ or "")
    assert {one.arg_name for one in parsed.params if one.description} == set(inspect.signature(command).parameters)
    assert parsed.long_description is None


def test_diff_as_a_process_without_torch(folder: Path) -> None:
    write(folder / "a.jsonl", whole_run([cell()]))
    write(folder / "b.jsonl", whole_run([disagreeing()]))
    (folder / "torch.py").write_text("raise ImportError('a diff needs no torch')")
    done = in_a_process(folder, "diff", "a.jsonl", "b.jsonl")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("disagree now (1)\n")


@pytest.mark.slow
def test_less_examples_of_a_real_kernel_are_seen(folder: Path, lossgate: Lossgate) -> None:
    few = ("verify", "kernels.py:right", "--layout", "single", "--dtype", "float32", "--evidence")
    lossgate(*few, "a.jsonl", "--examples", "20")
    lossgate(*few, "b.jsonl", "--examples", "5")
    done = lossgate("diff", "a.jsonl", "b.jsonl")
    assert done.returncode == 3
    assert "right[agreement-single-float32]: " in done.stdout
    assert "problems, now " in done.stdout
    assert "  setting examples: 20, now 5\n" in done.stdout
    assert lossgate("diff", "b.jsonl", "a.jsonl").returncode == 0
