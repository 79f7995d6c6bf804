# SPDX-License-Identifier: Apache-2.0
"""Tests of what the page shows of a cell when it is opened."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from lossgate.engine.cell_record import CellRecord, PropertyRecord, WorstExample
from lossgate.engine.output_record import OutputRecord, PooledRecord
from lossgate.evidence.gather import Gathered
from lossgate.evidence.reader import Where
from lossgate.evidence.summary import summarize
from lossgate.gate.cells import CellJudge, Need
from lossgate.gate.gate_verdict import GatedCell, GateReason
from lossgate.gate.policy import Policy
from lossgate.gate.rules import EvidenceRules
from lossgate.reports.page.details import (
    BINS_PER_DECADE,
    HIGHEST,
    LONGEST_TREND,
    LOWEST,
    Details,
    Histogram,
    histograms_of,
    records_of_trend,
)
from lossgate.reports.page.entries import Page, entries_of
from property_tests.meta.page.made import DIGEST, RUN, blocker, failure, gate, gated, known, page, record


def output(*shares: float | None, **changes: Any) -> OutputRecord:
    """Returns an output, the noise of which had these shares of its limit."""
    return OutputRecord(name="loss", metric=False, shares={"noise": shares} if shares else {}, **changes)


@pytest.mark.parametrize(
    ("share", "first"),
    [
        (0.0, LOWEST),
        (1e-9, LOWEST),
        (0.1, -BINS_PER_DECADE),
        (0.11, -BINS_PER_DECADE + 1),
        (0.999, 0),
        (1.0, 0),  # at the limit is not over it
        (1.01, 1),
        (10.0, BINS_PER_DECADE),
        (1e9, HIGHEST),
        (None, HIGHEST),
    ],
)
def test_the_bin_of_a_share(share: float | None, first: int) -> None:
    (histogram,) = histograms_of(output(share))
    assert (histogram.first, histogram.counts) == (first, (1,))
    assert histogram.over == (share is None or share > 1)


def test_a_histogram_counts_every_problem_and_keeps_the_largest_share() -> None:
    (histogram,) = histograms_of(output(0.5, 0.5, 3.456, 0.0))
    assert histogram == Histogram("noise", 4, 3.46, 1, LOWEST, (1, *[0] * 10, 2, 0, 0, 0, 1))
    assert sum(histogram.counts) == histogram.problems


def test_an_infinite_share_has_no_number() -> None:
    (histogram,) = histograms_of(output(0.5, None))
    assert histogram.largest is None


@pytest.mark.parametrize(
    ("scale", "limit", "vacuous", "problems", "over"),
    [
        ((1e-7, -2e-6), (1e-6, 1e-6), (), 2, 1),
        ((1e-7, 0.0), (1e-6, 1e-6), (1,), 1, 0),  # it says nothing about the scale
        ((1e-7, 5.0), (1e-6, 1e-6), (1,), 2, 1),  # it should not be there at all
        ((0.0, 1e-9), (0.0, 0.0), (), 2, 1),
    ],
)
def test_the_scale_is_a_share_of_its_limit_too(
    scale: tuple[float, ...], limit: tuple[float, ...], vacuous: tuple[int, ...], problems: int, over: int
) -> None:
    (histogram,) = histograms_of(output(scale=scale, limit=limit, vacuous=vacuous))
    assert (histogram.statistic, histogram.problems, histogram.over) == ("scale", problems, over)


def opened(shown: Page) -> tuple[dict[str, Any], Details]:
    """Returns what the page shows of its first cell, and where its texts are."""
    details = Details({run.run: run for run in shown.runs})
    (entry, *_) = entries_of(shown)
    return details.of(entry, shown.history.get(entry.key, ())), details


def test_all_that_a_record_says_is_shown() -> None:
    cell = record(
        verdict="DISAGREE",
        reasons=("too large",),
        faults=("rank 1 failed",),
        causes=("cause: a sum is missing", "to do: add it"),
        cause="a sum is missing",
        explains="this explains all",
        failure=failure("small"),
        outputs=(output(0.5, pooled=PooledRecord(problems=3, scale=0.01, limit=1.23456e-6), planted={"zero": 0.5}),),
        coverage={"masked token": 2, "extra": 1},
        required=("masked token", "trained token"),
        surviving=("epsilon", "beta"),
        equivalent=("beta",),
        not_distinguished=("beta 0 and 1",),
        excluded={"ratios extreme": "they are clamped"},
        mistakes_surviving=("the mask is ignored",),
        mistakes_too_small=("epsilon is 0",),
        worst=(WorstExample(output="loss", statistic="noise", value=2.0, limit=4.0, problem={"seed": 1}),),
        properties=(
            PropertyRecord(name="no-grad", problems=2, comparisons=3, margin=0.5, seconds=0.25),
            PropertyRecord(name="masked-nan", problems=1, findings=("wrong",)),
            PropertyRecord(name="int32-ids", problems=0, exempt="it has none"),
        ),
        resources={"rank 0": {"peak bytes": 5.0}},
        known_failure=known(expected=True),
    )
    shown, kept = opened(page(cell, runs=[RUN]))

    def texts(numbers: list[int]) -> list[str]:
        return [kept.texts.values[number] for number in numbers]

    assert texts(shown["reasons"]) == ["cause: a sum is missing", "to do: add it", "too large"]
    assert texts(shown["faults"]) == ["rank 1 failed"]
    assert texts([shown["explains"]]) == ["this explains all"]
    assert texts(shown["surviving"]) == ["epsilon"]
    assert texts(shown["equivalent"]) == ["beta"]
    assert texts(shown["alike"]) == ["beta 0 and 1"]
    assert texts(shown["excluded"]) == ["ratios extreme: they are clamped"]
    assert shown["shown"] == 12
    assert texts(shown["unseen"]) == ["the mask is ignored"]
    assert texts(shown["small"]) == ["epsilon is 0"]
    assert [(*texts([goal]), n, required) for goal, n, required in shown["coverage"]] == [
        ("masked token", 2, 1),
        ("trained token", 0, 1),
        ("extra", 1, 0),
    ]
    assert shown["outputs"][0][1] == [3, 0.01, 1.235e-6]
    assert [(*texts([name]), share) for name, share in shown["outputs"][0][4]] == [("zero", 0.5)]
    assert [(*texts([name]), *numbers, *texts([exempt])) for name, *numbers, exempt in shown["properties"]] == [
        ("no-grad", 2, 3, 0.5, 0.25, 0, ""),
        ("masked-nan", 1, 0, 0.0, 0.0, 1, ""),
        ("int32-ids", 0, 0, 0.0, 0.0, 0, "it has none"),
    ]
    assert shown["resources"] == {"rank 0": {"peak bytes": 5.0}}
    assert texts([shown["known"][0]]) == ["torch-2"]
    assert kept.problems.values[shown["worst"][0][-1]] == {"seed": 1}
    assert kept.problems.values[shown["failure"][0]] == failure("small").problem
    assert kept.runs.values[shown["run"]]["commit"] == RUN.commit


def test_what_is_empty_is_left_out() -> None:
    shown, _ = opened(page(record()))
    assert not {"reasons", "faults", "failure", "trend", "blockers", "worst", "properties", "resources"} & shown.keys()


def test_a_cell_of_which_only_a_summary_is_left_has_reasons_and_failure() -> None:
    cell = record(verdict="DISAGREE", reasons=("too large",), failure=failure("small"))
    shown, kept = opened(page(gate=gate(gated(cell, blocker(GateReason.DISAGREE, "kernel")))))
    assert [kept.texts.values[number] for number in shown["reasons"]] == ["too large"]
    assert kept.problems.values[shown["failure"][0]] == failure("small").problem
    assert (shown["line"], shown["required"], len(shown["blockers"])) == ("a.jsonl:3", 1, 1)


def test_a_missing_cell_has_what_the_gate_says() -> None:
    shown, kept = opened(page(gate=gate(gated("gone", blocker(GateReason.MISSING, "gone")))))
    assert shown.keys() == {"blockers", "required"}
    assert [kept.texts.values[number] for number in shown["blockers"][0]] == ["missing", "Mend it.", "a.jsonl:3"]


def moment(day: int, scale: float | None, run: str = "") -> CellRecord:
    pooled = None if scale is None else PooledRecord(problems=1, scale=scale, limit=1e-6)
    time = f"2026-01-{day:02d}T12:00:00+00:00"
    return record(outputs=(output(pooled=pooled),), time=time, run=run or f"run {day}")


def test_the_trend_goes_from_the_oldest_run_to_the_newest() -> None:
    now = moment(3, 3e-7)
    shown, kept = opened(page(now, history={now.key: [moment(2, None), moment(1, 1e-7, RUN.run)]}, runs=[RUN]))
    trend = shown["trend"]
    assert [kept.texts.values[time][:10] for time in trend["times"]] == ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert [kept.texts.values[commit] for commit in trend["commits"]] == ["4f" * 6, "", ""]
    assert trend["outputs"][0][1:] == [[1e-7, None, 3e-7], [1e-6, None, 1e-6]]


def test_a_long_trend_keeps_its_newest_runs_and_says_how_many_there_are() -> None:
    now = moment(31, 0.5)
    shown, _ = opened(page(now, history={now.key: [moment(1, 0.0, f"{i}") for i in range(100)]}))
    assert len(shown["trend"]["times"]) == LONGEST_TREND
    assert shown["trend"]["outputs"][0][1][-1] == 0.5
    assert shown["moments"] == 101


def test_the_same_text_is_kept_once() -> None:
    _, kept = opened(page(record(reasons=("same", "same"), faults=("same",))))
    assert kept.texts.values.count("same") == 1


def times(shown: dict[str, Any], kept: Details) -> list[str]:
    return [kept.texts.values[time][:10] for time in shown["trend"]["times"]]


def test_history_that_holds_the_current_run_and_copies_counts_each_run_once() -> None:
    now, old = moment(3, 0.3), moment(1, 0.1)
    again = moment(3, 0.3, now.run)
    shown, kept = opened(page(now, history={now.key: [again, old, moment(1, 0.1), now]}))
    assert (times(shown, kept), shown["moments"]) == (["2026-01-01", "2026-01-03"], 2)


def test_a_cell_without_other_runs_has_no_trend() -> None:
    now = moment(3, 0.3)
    assert "trend" not in opened(page(now, history={now.key: [now]}))[0]


@pytest.mark.parametrize(
    ("times", "order"),
    [
        (["2026-01-02T00:00:00+00:00", "2026-01-01T00:00:00+00:00"], [1, 0]),
        (["2026-01-02T01:00:00+02:00", "2026-01-01T23:30:00+00:00"], [0, 1]),  # as text it is the other way round
        (["2026-01-01T12:00:00+00:00", "never"], [1, 0]),
    ],
)
def test_the_trend_is_sorted_by_time_and_not_by_text(times: list[str], order: list[int]) -> None:
    older = [record(run=f"{i}", time=time) for i, time in enumerate(times)]
    now = record(run="now", time="2026-01-31T12:00:00+00:00")
    assert [one.run for one in records_of_trend(now, older)] == [*map(str, order), "now"]


@pytest.mark.parametrize(
    ("verdict", "message", "shown"),
    [
        ("DISAGREE", "it disagrees: too large; too noisy", "it disagrees"),
        ("INCONCLUSIVE", "it is inconclusive: too large; too noisy", "it is inconclusive"),
    ],
)
def test_reasons_and_command_are_not_repeated_in_what_the_gate_says(verdict: Any, message: str, shown: str) -> None:
    cell = record(verdict=verdict, reasons=("too large", "too noisy"), failure=failure("lossgate replay f.json"))
    said = judged(cell)
    assert said.blockers[0].sentence == message
    opening, kept = opened(page(cell, gate=gate(said)))
    assert kept.texts.values[opening["blockers"][0][1]] == shown


def judged(cell: CellRecord) -> GatedCell:
    """Returns what the real gate says of a cell that its policy asks for."""
    summary = summarize(cell, Where("a.jsonl", 3), DIGEST)
    nothing: dict[Any, Any] = {}
    evidence = Gathered(
        files=(),
        runs={},
        starts={},
        ends={},
        cells={cell.key: (summary,)},
        damaged=(),
        contradictory=nothing,
        repeated=(),
    )
    rules = EvidenceRules(max_age=None, same_commit=False, unmodified=False, same_versions=())
    policy = Policy(file=Path("gate.toml"), sha256=DIGEST, evidence=rules, require=(), known_failures=())
    return CellJudge(evidence, policy, {cell.key: Need(1, 1.0)}, date(2026, 1, 31)).judge(cell.key)
