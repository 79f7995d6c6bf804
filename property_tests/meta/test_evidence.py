# SPDX-License-Identifier: Apache-2.0
"""Tests of evidence: what a gate reads of a cell, and how its lines are written."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernel_bank.bugs import cross_entropy_with
from kernel_bank.cross_entropy import STYLES, make
from lossgate import Layout, candidate
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun, Verdict
from lossgate.engine.cell_record import SCHEMA, CellKey, CellRecord, PropertyRecord
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import conclude, pooled_outputs
from lossgate.evidence.reader import DamagedLine, GoodLine, Line, read_lines
from lossgate.evidence.records import SCHEMA_FILE, json_schema
from lossgate.evidence.redo import redo
from lossgate.evidence.sealed import is_intact, seal
from lossgate.evidence.writer import AppendedLines, EvidenceError, written
from lossgate.judge.statistics import NOISE, SCALE
from lossgate.problems.problem import Problem
from lossgate.properties import PROPERTIES
from lossgate.properties.registry import Said
from property_tests.meta import made_evidence as made

pytestmark = pytest.mark.xdist_group("evidence")  # one worker makes what its tests share


def verdict_of(record: CellRecord) -> str:
    """Returns the verdict that the numbers of a record give."""
    (redone,) = redo([record])
    return redone.verdict


def contradictions(records: list[CellRecord]) -> list[str]:
    """Returns how each record contradicts its own numbers."""
    return [redone.contradiction for redone in redo(records)]


# What a record says of a cell

KERNEL = candidate("nll", head="logits", name="a")(lambda inputs, options, mesh: inputs.logits.sum())
CELL = Cell(KERNEL, Layout(tp=2), "float32")


def test_a_record_names_the_cell_and_its_verdict() -> None:
    record = conclude(CellRun(cell=CELL, cases=())).record
    assert record.key == CellKey("a", "agreement", "tp=2", "float32", "simulated", "cpu")
    assert str(record.key) == "a[agreement-tp=2-float32]"
    assert (record.spec, record.head, record.verdict) == ("nll", "logits", "INCONCLUSIVE")
    assert record.reasons[1] == "0 problems are too few for AGREE; raise --examples to 8 at least"
    assert record.known_failure is record.failure is None


@pytest.fixture(scope="module")
def agreed() -> CellResult:
    return run_cell(Cell(make(STYLES["bfloat16"][0]), Layout(), "bfloat16"), Settings(examples=12))


@pytest.fixture(scope="module")
def disagreed() -> CellResult:
    wrong = cross_entropy_with(STYLES["bfloat16"][0], "dX x1.01")
    return run_cell(Cell(wrong, Layout(), "bfloat16"), Settings(examples=12, shrink_calls=5))


def concluded(result: CellResult, cases: tuple[CaseResult, ...], **more: Any) -> CellResult:
    return conclude(CellRun(cell=result.cell, cases=cases, **more))


def with_scale(cases: tuple[CaseResult, ...], scale: float) -> tuple[CaseResult, ...]:
    return tuple(
        replace(
            case,
            comparisons=tuple(replace(c, values=c.values and {**c.values, SCALE: scale}) for c in case.comparisons),
        )
        for case in cases
    )


def noisy(cases: tuple[CaseResult, ...]) -> int:
    """Returns the index of the last problem with noise: there is none where no token is trained."""
    return max(index for index, case in enumerate(cases) if NOISE in case.comparisons[-1].limits)


def at_the_limit(cases: tuple[CaseResult, ...], share: float) -> tuple[CaseResult, ...]:
    """Sets the noise of the last comparison that has any to a share of its limit."""
    index = noisy(cases)
    *others, last = cases[index].comparisons
    at = replace(last, values={**last.values, NOISE: last.limits[NOISE] * share})
    findings = () if at.agrees else ("over its limit",)
    changed = replace(cases[index], comparisons=(*others, at), findings=findings)
    return (*cases[:index], changed, *cases[index + 1 :])


def blinded(cases: tuple[CaseResult, ...]) -> tuple[CaseResult, ...]:
    """Lets no comparison of the last problem with noise see an error of 1%."""
    index = noisy(cases)
    blind = tuple(replace(one, blind=("x1.01",)) for one in cases[index].comparisons)
    return (*cases[:index], replace(cases[index], comparisons=blind), *cases[index + 1 :])


RESULTS: dict[str, Callable[[CellResult], CellResult]] = {
    "as it is": lambda result: result,
    "two problems": lambda result: concluded(result, result.cases[:2]),
    "no problem": lambda result: concluded(result, ()),
    "biased": lambda result: concluded(result, with_scale(result.cases, 0.003)),
    "a goal is missing": lambda result: concluded(
        result, tuple(replace(case, covered=case.covered - {"masked token"}) for case in result.cases)
    ),
    "a size was not tried": lambda result: concluded(result, result.cases, untried={"8x8x8": "it is odd"}),
    "blind": lambda result: concluded(result, blinded(result.cases)),
    "just within its limit": lambda result: concluded(result, at_the_limit(result.cases, 1 - 1e-12)),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_the_numbers_of_a_record_redo_its_verdict(kind: str, agreed: CellResult) -> None:
    result = RESULTS[kind](agreed)
    record = written(result.record, "run-1")
    assert verdict_of(record) == record.verdict == result.verdict
    assert contradictions([record]) == [""]
    read = msgspec.json.decode(msgspec.json.encode(record), type=CellRecord)
    assert contradictions([read]) == [""]


def test_results_give_every_verdict(agreed: CellResult) -> None:
    assert {RESULTS[kind](agreed).verdict for kind in RESULTS} == set(Verdict)


def test_a_statistic_just_over_its_limit_is_over_it_in_the_record(agreed: CellResult) -> None:
    cases = at_the_limit(agreed.cases, 1 + 1e-12)
    result = concluded(agreed, cases, failure=replace(cases[noisy(cases)], findings=("noisy",)))
    assert result.verdict is Verdict.DISAGREE
    record = written(result.record, "run-1")
    assert max(share or 2 for output in record.outputs for share in output.shares.get("noise", ())) > 1
    assert contradictions([record]) == [""]


def test_a_disagreement_keeps_what_is_needed_to_see_it_again(disagreed: CellResult) -> None:
    record = written(disagreed.record, "run-1", "lossgate replay f.json")
    assert disagreed.failure is not None
    assert record.failure is not None
    assert record.failure.problem == json.loads(disagreed.failure.problem.to_json())
    assert (record.failure.symptoms, record.replay) == (("grad of hidden",), "lossgate replay f.json")
    assert contradictions([record]) == [""]
    worst = record.worst[0]
    assert abs(worst.value) > worst.limit
    assert worst.problem["spec"] == "nll"


def test_the_numbers_are_those_of_the_comparisons(agreed: CellResult) -> None:
    record = written(agreed.record, "run-1")
    for output in record.outputs:
        compared = [c for case in agreed.cases for c in case.comparisons if str(c.output) == output.name and c.values]
        assert list(output.scale) == [c.values[SCALE] for c in compared]
        assert list(output.limit) == [c.limits[SCALE] for c in compared]
        for name, shares in output.shares.items():
            exact = [c.shares.get(name, 0.0) for c in compared]
            assert all(
                kept is not None and share <= kept <= 1.01 * share for share, kept in zip(exact, shares, strict=True)
            )
    assert record.tokens_in_all == sum(case.problem.tokens for case in agreed.cases)
    assert record.coverage["trained token"] == sum("trained token" in case.covered for case in agreed.cases)
    assert record.killed == len(frozenset[str]().union(*(case.killed for case in agreed.cases)))
    assert record.mde == max(one.mde for one in pooled_outputs(agreed.cases))


# A record that contradicts its own numbers

SILENCE = "the silent comparisons of loss are not those that its limits give"
GAP = "a kernel that scales twice would have passed"
WITH_GAP = PropertyRecord(name="no-grad", problems=1, gaps=(GAP,))
LIES: dict[str, tuple[CellRecord, str]] = {
    "verdict": (made.disagreeing(verdict="AGREE", reasons=()), "its verdict is AGREE, but its numbers give DISAGREE"),
    "verdict, the other way": (
        made.cell(verdict="DISAGREE", reasons=("wrong",)),
        "its verdict is DISAGREE, but its numbers give AGREE",
    ),
    "inconclusive": (
        made.inconclusive(verdict="AGREE", reasons=()),
        "its verdict is AGREE, but its numbers give INCONCLUSIVE",
    ),
    "no failure": (made.disagreeing(verdict="AGREE", reasons=(), failure=None), "numbers give DISAGREE"),
    "scale": (made.cell(outputs=(made.output(scale=(1e-8, 3e-7, 0.5e-8)),)), "loss has a pooled scale of -1.66667e-09"),
    "known mistake": (
        made.cell(mistakes_surviving=("the mask is ignored",)),
        "its verdict is AGREE, but its numbers give INCONCLUSIVE",
    ),
    "sd": (made.cell(outputs=(made.output(sd=(1e-9, 1e-9, 1e-9)),)), "but its numbers give"),
    "single limit": (made.cell(outputs=(made.output(limit=(1e-6, 1e-9, 1e-6)),)), "its numbers give DISAGREE"),
    "share": (made.cell(outputs=(made.output(shares={"noise": (0.25, 1.01, 0.1)}),)), "its numbers give DISAGREE"),
    "infinite share": (made.cell(outputs=(made.output(shares={"noise": (0.25, None, 0.1)}),)), "give DISAGREE"),
    "fault": (made.cell(faults=("the ranks hang",)), "its numbers give DISAGREE"),
    "fault of an output": (made.cell(outputs=(made.output(faults=("not finite",)),)), "its numbers give DISAGREE"),
    "goal": (made.cell(coverage={}), "its numbers give INCONCLUSIVE"),
    "no pool": (made.cell(outputs=(made.output(pooled=None),)), "loss is not pooled, but 3 problems say something"),
    "pool of nothing": (
        made.cell(outputs=(made.output(vacuous=(0, 1, 2)),)),
        "no problem says anything about its scale",
    ),
    "problems": (
        made.cell(outputs=(made.output(vacuous=(1,)),)),
        "loss is pooled over 3 problems, but has the numbers of 2",
    ),
    "silent for no reason": (made.cell(outputs=(made.output(silent=(0, 1, 2), pooled=None),)), SILENCE),
    "silent and vacuous": (
        made.cell(outputs=(made.output(limit=(2.0,) * 3, vacuous=(0, 1, 2), silent=(1,), pooled=None),)),
        SILENCE,
    ),
    "not silent": (made.cell(outputs=(made.output(limit=(1e-6, 2.0, 1e-6)),)), SILENCE),
    "a list too short": (made.cell(outputs=(made.output(sd=(1e-7,)),)), "the lists of loss do not have one entry"),
    "no comparisons": (made.cell(comparisons=2), "it says 2 comparisons, but has 8"),
    "no such problem": (made.cell(problems=2), "it says 2 problems, but has the numbers of problem 7, counted from 0"),
    "problems that nothing compares": (
        msgspec.structs.replace(made.cell(), problems=500),
        "it says 500 problems, but has comparisons of 8",
    ),
    "more goals than problems": (
        made.cell(coverage={"trained token": 99}),
        "it says that 99 of 8 problems reach a goal",
    ),
    "an output twice": (made.cell(outputs=(made.output(), made.output()), comparisons=16), "it has an output twice"),
    "too few problems": (made.cell(problems=7), "its verdict is AGREE, but its numbers give INCONCLUSIVE"),
    "metrics alone": (made.cell(outputs=(made.output(name="kl", metric=True),)), "its numbers give INCONCLUSIVE"),
    "a loss that is a metric": (made.cell(outputs=(made.output(metric=True),)), "it says that loss is a metric"),
    "no coverage needed": (made.cell(needs_adequacy=False), "it says that agreement needs no coverage, but it does"),
    "a reason against AGREE": (
        made.cell(reasons=("odd",)),
        "its verdict is AGREE, but it gives a reason against AGREE",
    ),
    "no reason": (made.inconclusive(reasons=()), "its verdict is INCONCLUSIVE, but it gives no reason against AGREE"),
    "mde": (made.cell(mde=1e-9), "its mde is 1e-09, but its numbers give 2.3"),
    "own gaps": (made.cell(gaps=(GAP,)), "its verdict is AGREE, but its numbers give INCONCLUSIVE"),
    "gaps of a property": (
        made.cell(properties=(WITH_GAP,)),
        "its verdict is AGREE, but its numbers give INCONCLUSIVE",
    ),
    "margin": (made.cell(margin=0.1), "its margin is 0.1, but its numbers give 0.5"),
    "symptoms": (made.cell(symptoms=("loss",)), "it says that loss disagrees, but by its numbers nothing disagrees"),
    "no number": (
        made.cell(outputs=(made.output(unit=0.0, kernels=0, sd=(0.0, 0.0, 0.0)),)),
        "but its numbers give nan",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_contradicts_itself_is_found(lie: str) -> None:
    record, message = LIES[lie]
    (found,) = contradictions([record])
    assert message in found


def test_honest_records_contradict_nothing() -> None:
    assert contradictions([made.cell(), made.disagreeing(), made.inconclusive(), made.cell()]) == [""] * 4


@pytest.mark.parametrize("gaps", [{"gaps": (GAP,)}, {"properties": (WITH_GAP,)}], ids=["own", "of a property"])
def test_what_a_property_could_not_have_shown_is_a_gap(gaps: dict[str, Any]) -> None:
    honest = made.cell(verdict="INCONCLUSIVE", reasons=(GAP,), **gaps)
    assert contradictions([honest]) == [""]


def test_a_record_has_the_gaps_of_its_own_property() -> None:
    problem = Problem(
        spec="nll", head="logits", dtype="float32", lengths=(6,), masks=("all",), hidden=8, vocab=33, seed=0
    )
    case = CaseResult(problem=problem, said={"each microbatch is divided by its own count": Said.HIDDEN})
    cell = replace(CELL, property=PROPERTIES["microbatches"])
    record = conclude(CellRun(cell=cell, cases=(case,))).record
    (gap,) = record.gaps
    assert gap.startswith("property microbatches: no problem would have shown a kernel in which each microbatch is")
    assert gap in record.reasons
    assert record.verdict == "INCONCLUSIVE"
    assert contradictions([record]) == [""]


# Lines


def lines_of(file: Path, *lines: bytes) -> list[Line]:
    file.write_bytes(b"".join(lines))
    return list(read_lines(file))


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = made.disagreeing()
    (line,) = lines_of(tmp_path / "out.jsonl", seal(record) + b"\n")
    assert isinstance(line, GoodLine)
    assert line.record == record
    assert json.loads(seal(record))["digest"] == line.digest
    assert b"\n" not in seal(record)


def edited(line: bytes) -> bytes:
    return line.replace(b'"problems":3', b'"problems":9')


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in half": (lambda line: line[: len(line) // 2], "it is cut"),
    "cut at its end": (lambda line: line[:-1], "it is cut"),
    "edited": (edited, "its digest is not that of its text"),
    "another digest": (lambda line: line[:-66] + b"0" * 64 + line[-2:], "its digest is not that"),
    "glued": (lambda line: line[:50] + line, "its digest is not that of its text"),
    "two glued": (lambda line: line + line, "its digest is not that of its text"),
    "no digest": (
        lambda line: b'{"candidate": "nll"}',
        "it has no digest: an earlier version of lossgate or another program wrote it",
    ),
    "no JSON": (lambda line: b"\xff\x00", "it is cut"),
    "too deep": (lambda line: b"[" * 100_000, "it is cut"),
    "an earlier schema": (lambda line: seal(made.cell(schema="1.4")), "it has schema '1.4'"),
    "a later schema": (lambda line: seal(made.cell(schema="3.0")), "it has schema '3.0'"),
    "no schema": (lambda line: seal_of({"kind": "cell"}), "it is no record of evidence: Object missing required field"),
    "wrong type": (lambda line: seal_of(as_json(made.cell()) | {"problems": "x"}), "Expected `int`, got `str`"),
    "a negative limit": (
        lambda line: seal(made.cell(outputs=(made.output(limit=(1e-6, 1e-6, -1.0)),))),
        "`float`",
    ),
    "a negative share": (
        lambda line: seal(made.cell(outputs=(made.output(shares={"noise": (-1.0,)}),))),
        "`float`",
    ),
    "a huge count": (lambda line: seal_of(as_json(made.cell()) | {"problems": 2**60}), "`int` <= 9007199254740992"),
    "a time elsewhere": (lambda line: seal(made.cell(time="2026-11-20T12:00:30+01:00")), "matching regex"),
    "out of range": (lambda line: seal_of(as_json(made.cell()) | {"problems": -1}), "Expected `int` >= 0"),
}


def as_json(record: CellRecord) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(record))


def seal_of(values: dict[str, Any]) -> bytes:
    """Seals what is no record."""
    return seal(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_reported(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    good = seal(made.cell())
    first, second, third = lines_of(tmp_path / "out.jsonl", good + b"\n", change(good) + b"\n", good)
    assert isinstance(first, GoodLine)
    assert isinstance(third, GoodLine)
    assert isinstance(second, DamagedLine)
    assert str(second.where) == f"{tmp_path / 'out.jsonl'}:2"
    assert message in second.message


def test_what_a_later_version_adds_does_no_harm(tmp_path: Path) -> None:
    later = as_json(made.cell(schema="2.7")) | {"traffic": {"all_reduce": 3}, "causes": ["a factor of tp"]}
    kind = {"kind": "weather", "schema": "2.7"}
    (line,) = lines_of(tmp_path / "out.jsonl", seal_of(kind) + b"\n\n", seal_of(later) + b"\r\n")
    assert isinstance(line, GoodLine)
    assert line.record == made.cell(schema="2.7", causes=("a factor of tp",))
    assert is_intact(seal_of(later))


# Adding to files


def test_a_half_written_line_is_never_glued_to_the_next(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(seal(made.cell())[:100])
    for _ in range(2):
        AppendedLines(file).add(seal(made.cell()))
    cut, *good = read_lines(file)
    assert isinstance(cut, DamagedLine)
    assert [type(line) for line in good] == [GoodLine, GoodLine]


def test_many_writers_add_whole_lines(tmp_path: Path) -> None:
    """Lines of 100,000 bytes are longer than what systems write at once."""
    file, line = tmp_path / "out.jsonl", seal(made.cell(reasons=("x" * 100_000,)))

    def add(_: int) -> None:
        lines = AppendedLines(file)
        for _ in range(10):
            lines.add(line)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(4)))
    assert [type(read) for read in read_lines(file)] == [GoodLine] * 40


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"^--evidence .*: can't be written: Is a directory$"):
        AppendedLines(tmp_path).add(b"{}")


# The schema


def test_the_published_schema_is_that_of_the_records() -> None:
    """If it fails, write ``json_schema()`` to the file, and raise ``SCHEMA``'s second number."""
    assert SCHEMA_FILE.read_text() == json_schema()
    assert json.loads(json_schema())["$id"].endswith(f"evidence-{SCHEMA}.json")
