# SPDX-License-Identifier: Apache-2.0
"""Wrong numbers are told apart from right numbers with broken promises, wherever that is told."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from lossgate import Layout
from lossgate.cli.app import Exit
from lossgate.cli.verify import exit_code
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.cell_record import CellRecord, KnownFailureRecord, Outcome, PropertyRecord, Verdict
from lossgate.engine.events import RunFinished, RunStarted
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import conclude
from lossgate.evidence.redo import redo
from lossgate.gate.gate_verdict import GateCode, GateReason
from lossgate.losses import SPECS
from lossgate.problems.problem import Problem
from lossgate.reports.describe import heading
from lossgate.reports.gate_files.findings import GateFindings
from lossgate.reports.gate_files.junit import junit_xml
from lossgate.reports.gate_files.markdown import markdown
from lossgate.reports.gate_files.sarif import sarif
from lossgate.reports.gate_files.statement import statement
from lossgate.reports.verdict_table import summary, verdict_table
from lossgate.reports.verified import Verified
from property_tests.meta.command_line import Lossgate
from property_tests.meta.evidence_lines import cells_in
from property_tests.meta.gate_decisions.decided import RULES, Gate, only, reported
from property_tests.meta.gate_files.verdicts import breaking as gated_breaking
from property_tests.meta.gate_files.verdicts import key, verdict
from property_tests.meta.made_evidence import breaking, cell, disagreeing, inconclusive, whole_run, write
from property_tests.meta.made_results import made_result

pytest_plugins = ["pytester"]

CELL = Cell(dense_candidate(SPECS["nll"], "logprobs"), Layout(), "float32")
PROBLEM = Problem(spec="nll", head="logprobs", dtype="float32", lengths=(3,), masks=("all",), hidden=1, vocab=2, seed=0)
BROKEN = PropertyRecord(name="no-grad", problems=1, findings=("loss: 2 times",), on="3 tokens")
OF_PROPERTY = CaseResult(problem=PROBLEM, findings=("loss: 2 times",), held_to="no-grad")
OF_NUMBERS = CaseResult(problem=PROBLEM, findings=("loss: 3 times",), faults=("loss: 3 times",))
KNOWN = KnownFailureRecord(name="torch-1", example="e" * 64, expected=True)
FEW = inconclusive(
    verdict="DISAGREE",
    numbers="INCONCLUSIVE",
    reasons=breaking().reasons,
    properties=breaking().properties,
    failure=breaking().failure,
)
"""Its numbers are inconclusive, and it breaks a promise."""


def found(**of_run: Any) -> CellRecord:
    return conclude(CellRun(cell=CELL, **of_run)).record


def test_a_promise_is_broken_if_only_other_properties_than_agreement_are() -> None:
    record = found(cases=(), properties=(BROKEN,), failure=OF_PROPERTY)
    assert (record.verdict, record.numbers) == ("DISAGREE", "INCONCLUSIVE")
    assert (record.outcome, record.broken) == ("PROMISE BROKEN", ("no-grad",))
    assert record.reasons[0] == "property no-grad: loss: 2 times"
    assert any("too few for AGREE" in reason for reason in record.reasons), "that not enough was seen is told, too"


def test_numbers_that_disagree_are_told_before_broken_promises() -> None:
    """They may be found on a problem that is run for a property."""
    record = found(cases=(OF_NUMBERS,), properties=(BROKEN,), failure=OF_NUMBERS)
    assert (record.verdict, record.numbers, record.outcome) == ("DISAGREE", "DISAGREE", "DISAGREE")
    assert record.reasons == ("loss: 3 times", "property no-grad: loss: 2 times")


def test_nothing_is_said_of_numbers_if_the_kernel_crashed_in_another_property() -> None:
    crash = replace(OF_PROPERTY, failure="Crash", findings=("property no-grad: CRASH: it was ended",))
    record = found(cases=(crash,), failure=crash)
    assert (record.verdict, record.numbers, record.outcome) == ("DISAGREE", None, "DISAGREE")


@pytest.mark.parametrize(
    ("record", "outcome", "counts_as", "of_numbers"),
    [
        (cell(numbers="AGREE"), "AGREE", "AGREE", "AGREE"),
        (inconclusive(numbers="INCONCLUSIVE"), "INCONCLUSIVE", "INCONCLUSIVE", "INCONCLUSIVE"),
        (inconclusive(numbers="AGREE"), "INCONCLUSIVE", "INCONCLUSIVE", "AGREE"),
        (disagreeing(numbers="DISAGREE"), "DISAGREE", "DISAGREE", "DISAGREE"),
        (breaking(), "PROMISE BROKEN", "DISAGREE", "AGREE"),
        (FEW, "PROMISE BROKEN", "DISAGREE", "INCONCLUSIVE"),
        (breaking(known_failure=KNOWN), "PROMISE BROKEN", "AGREE", "AGREE"),
        # Evidence of earlier versions does not say.
        (breaking(numbers=None), "DISAGREE", "DISAGREE", "DISAGREE"),
        (disagreeing(property="no-grad"), "PROMISE BROKEN", "DISAGREE", "DISAGREE"),
    ],
)
def test_the_outcome_and_what_counts(
    record: CellRecord, outcome: Outcome, counts_as: Verdict, of_numbers: Verdict
) -> None:
    assert record.outcome == outcome
    assert record.counts_as(numbers_only=False) == counts_as
    assert record.counts_as(numbers_only=True) == of_numbers


@pytest.mark.parametrize("record", [breaking(), FEW, disagreeing(numbers="DISAGREE"), cell(numbers="AGREE")])
def test_evidence_of_numbers_is_redone(record: CellRecord) -> None:
    assert redo([record])[0].contradiction == ""


@pytest.mark.parametrize(
    ("record", "given"),
    [
        (disagreeing(numbers="AGREE"), "its verdict on the numbers alone is AGREE, but they give DISAGREE"),
        (breaking(numbers="DISAGREE"), "its verdict on the numbers alone is DISAGREE, but they give AGREE"),
        (msgspec.structs.replace(FEW, numbers="AGREE"), "numbers alone is AGREE, but they give INCONCLUSIVE"),
    ],
)
def test_a_lie_about_numbers_is_found(record: CellRecord, given: str) -> None:
    assert given in redo([record])[0].contradiction


def printed(width: int, *cells: CellRecord) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(verdict_table(cells))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_names_the_promises(width: int) -> None:
    cells = breaking("masked-nan", "frozen-inputs"), breaking("frozen-inputs", layout="cp=2"), cell(layout="dp=2")
    lines = printed(width, *cells).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "2 x PROMISE BROKEN" in text
    assert "masked-nan," in text
    assert "frozen-inputs)" in text
    assert "1 x AGREE" in text
    assert "DISAGREE" not in text.split("'worst / limit'")[0]


def test_headings_and_the_last_line_tell_three_things_apart() -> None:
    cells = [cell(), disagreeing(layout="dp=2"), breaking("masked-nan", "no-grad", layout="cp=2"), FEW]
    assert heading(cells[2]).endswith("  cp=2: numbers agree, 2 promises broken: masked-nan, no-grad")
    assert heading(FEW).endswith("  single: numbers agree so far, 1 promise broken: masked-nan")
    broken = "numbers agree so far, 2 promises broken: masked-nan, no-grad"
    assert summary(cells) == f"4 cells: 1 AGREE, 1 DISAGREE, 2 PROMISE BROKEN ({broken})"
    one = "1 cell: 1 PROMISE BROKEN (numbers agree, 1 promise broken: masked-nan; only numbers count)"
    assert summary([breaking()], numbers_only=True) == one
    many = breaking(*"abcdef")
    assert summary([many]) == "1 cell: 1 PROMISE BROKEN (numbers agree, 6 promises broken: a, b, c, d and 2 more)"


def result(record: CellRecord) -> CellResult:
    made = made_result(CELL, Verdict(record.verdict))
    return replace(made, record=record)


@pytest.mark.parametrize(
    ("records", "code", "of_numbers"),
    [
        ([breaking()], Exit.DISAGREE, Exit.AGREE),
        ([FEW], Exit.DISAGREE, Exit.INCONCLUSIVE),
        ([breaking(), disagreeing(numbers="DISAGREE")], Exit.DISAGREE, Exit.DISAGREE),
    ],
)
def test_the_exit_code_is_1_unless_only_numbers_count(records: list[CellRecord], code: Exit, of_numbers: Exit) -> None:
    results = tuple(map(result, records))
    assert exit_code(results) == code
    assert exit_code(results, numbers_only=True) == of_numbers
    for numbers_only, expected in ((False, code), (True, of_numbers)):
        events = RunStarted((), Settings(numbers_only=numbers_only)), RunFinished(results)
        assert Exit[Verified(results, events).verdict.value] == expected


BY_MASK = """
import lossgate

@lossgate.candidate("nll", head="logprobs", dtypes=("float32",))
def product(inputs, options, mesh):
    return -(inputs.logprobs * inputs.mask).sum() / inputs.valid_tokens.clamp(min=1)
"""


def test_a_run_tells_it_and_may_let_it_pass(folder: Path, lossgate: Lossgate) -> None:
    (folder / "by_mask.py").write_text(BY_MASK)
    few = ("verify", "by_mask.py", "--property", "agreement", "--property", "masked-nan", "--evidence", "out.jsonl")
    told = "1 PROMISE BROKEN (numbers agree, 1 promise broken: masked-nan"
    done = lossgate(*few)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(f"1 cell: {told}); ")
    (record,) = cells_in(folder / "out.jsonl")
    assert (record.verdict, record.numbers, record.mistakes_shown > 0) == ("DISAGREE", "AGREE", True)
    shown = lossgate("report", "out.jsonl")
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (1, f"1 cell: {told})")
    story = lossgate("report", "out.jsonl", "--cell", "*").stdout
    told_first = "PROMISE BROKEN  product[agreement-single-float32]: numbers agree, 1 promise broken: masked-nan"
    assert story.splitlines()[0] == told_first

    (file,) = (folder / ".lossgate").iterdir()
    again = lossgate("replay", str(file), str(file))
    assert again.stdout.splitlines()[0].startswith("PROMISE BROKEN  product  masked-nan  float32  single  ")
    assert (again.returncode, again.stdout.splitlines()[-1]) == (1, "2 failure files: 2 PROMISE BROKEN")

    done = lossgate(*few, "--numbers-only")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith(f"1 cell: {told}; only numbers count); ")
    assert "PROMISE BROKEN  product  float32  single: numbers agree, 1 promise broken: masked-nan" in done.stdout
    assert lossgate("report", "out.jsonl").returncode == 0, "the newest run asks for numbers only"
    (folder / "pyproject.toml").write_text("[tool.lossgate]\nnumbers_only = true\n")
    assert lossgate(*few).returncode == 0


def test_pytest_tells_it_and_may_let_it_pass(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # pytest cuts its summary to the terminal
    suite = 'test_product = lossgate.suite(product, layouts=["single"])\n'
    pytester.makepyfile(test_by_mask=f"{BY_MASK}\n{suite}")
    properties = 'properties = ["agreement", "masked-nan"]\n'
    pytester.makepyprojecttoml(f"[tool.lossgate]\n{properties}")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    done.assert_outcomes(failed=1)
    told = "numbers agree, 1 promise broken: masked-nan"
    done.stdout.fnmatch_lines(
        [
            f"PROMISE BROKEN  product  float32  single: {told}",
            f"lossgate: 1 cell: 1 PROMISE BROKEN ({told}); * comparisons",
            "FAILED test_by_mask.py::test_product* - Failed: PROMISE BROKEN: property masked-nan: loss, *",
        ]
    )
    pytester.makepyprojecttoml(f"[tool.lossgate]\nnumbers_only = true\n{properties}")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(
        [
            f"lossgate: product[[]agreement-single-float32[]]: PROMISE BROKEN: {told}",
            f"lossgate: 1 cell: 1 PROMISE BROKEN ({told}; only numbers count); * comparisons",
        ]
    )


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


NUMBERS_ONLY = f"{RULES}numbers_only = true\n"
ALSO_PROMISES = f'{NUMBERS_ONLY}[[require]]\ncandidates = ["nll"]\nlayouts = ["tp=2"]\n'


def test_the_gate_may_ask_for_numbers_only(gate: Gate) -> None:
    cells = cell(), breaking(layout="tp=2")
    kind, why = only(gate.decide(whole_run(cells)))
    assert (kind, why.partition(":")[0]) == (GateReason.PROMISE_BROKEN, "its numbers agree, but it breaks masked-nan")
    assert gate.decide(whole_run(cells)).code is GateCode.DISAGREE
    opened = gate.decide(whole_run(cells), rules=NUMBERS_ONLY)
    assert (opened.code, [one.verdict for one in opened.cells]) == (GateCode.OPEN, ["AGREE", "PROMISE BROKEN"])
    allowed = "Promises that are broken, which the policy lets pass because the numbers agree:"
    assert dict(GateFindings(opened).remarks) == {allowed: ["  masked-nan: 1 cell of nll"]}


@pytest.mark.parametrize(
    ("record", "rules", "reason", "why"),
    [
        (
            breaking(layout="tp=2"),
            ALSO_PROMISES,
            GateReason.PROMISE_BROKEN,
            "its numbers agree, but it breaks masked-nan",
        ),
        (
            breaking(layout="tp=2"),
            f'{NUMBERS_ONLY}keeps = ["masked-nan"]\n',
            GateReason.PROMISE_BROKEN,
            "its numbers agree, but it breaks masked-nan, which keeps of the policy names",
        ),
        (
            msgspec.structs.replace(FEW, layout="tp=2"),
            RULES,
            GateReason.PROMISE_BROKEN,
            "its numbers agree so far, but it breaks masked-nan",
        ),
        (msgspec.structs.replace(FEW, layout="tp=2"), NUMBERS_ONLY, GateReason.INCONCLUSIVE, "it is inconclusive"),
        (disagreeing(layout="tp=2", numbers="DISAGREE"), NUMBERS_ONLY, GateReason.DISAGREE, "it disagrees"),
    ],
)
def test_what_closes_the_gate_although_a_rule_asks_for_numbers_only(
    gate: Gate, record: CellRecord, rules: str, reason: GateReason, why: str
) -> None:
    kept = cell(properties=(PropertyRecord(name="masked-nan", problems=1),))
    decided = gate.decide(whole_run([kept, record]), rules=rules)
    assert [(kind, said.partition(":")[0]) for kind, said in reported(decided)] == [(reason, why)]


def test_a_broken_promise_that_no_rule_asks_for_closes_the_gate(gate: Gate) -> None:
    decided = gate.decide(whole_run([cell(), cell(layout="tp=2"), breaking(layout="dp=2")]), rules=NUMBERS_ONLY)
    assert only(decided)[0] is GateReason.PROMISE_BROKEN


ALLOWED = "the policy asks only for the numbers"


@pytest.mark.parametrize(
    ("write_file", "told"),
    [
        (markdown, "| PROMISE BROKEN | 1 | 0 | 0 |"),
        (
            markdown,
            "<summary>Promises that are broken, which the policy lets pass because the numbers agree:</summary>",
        ),
        (junit_xml, f"PROMISE BROKEN, but {ALLOWED}: numbers agree, 1 promise broken: masked-nan"),
        (sarif, f"single-float32]: numbers agree, 1 promise broken: masked-nan; {ALLOWED}"),
        (statement, '"result":"PASSED"'),
    ],
)
def test_files_tell_of_broken_promises_that_pass(write_file: Callable[..., str], told: str) -> None:
    passed = verdict([gated_breaking(key())])
    assert told.replace("PASSED", "WARNED") in write_file(passed)


def test_the_gate_on_the_command_line(folder: Path, lossgate: Lossgate) -> None:
    write(folder / "out.jsonl", whole_run([breaking()]))
    done = lossgate("gate", "out.jsonl", "--policy", "gate.toml", "--init")
    assert done.returncode == 0
    assert "#   nll[agreement-single-float32] PROMISE BROKEN\n" in (folder / "gate.toml").read_text()
    decide = ("gate", "out.jsonl", "--policy", "gate.toml", "--now", "2026-11-20T18:00:00Z")
    done = lossgate(*decide)
    assert done.returncode == 1
    assert "1 cell: 1 PROMISE BROKEN" in done.stdout
    assert (
        "promise broken (1)\n  nll[agreement-single-float32]: its numbers agree, but it breaks masked-nan"
        in done.stdout
    )
    with (folder / "gate.toml").open("a") as rules:
        rules.write("numbers_only = true\n")
    done = lossgate(*decide)
    assert done.returncode == 0, done.stdout
    assert "  masked-nan: 1 cell of nll" in done.stdout
