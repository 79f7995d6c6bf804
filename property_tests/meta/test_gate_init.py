# SPDX-License-Identifier: Apache-2.0
"""Tests of the first policy, which is written from evidence at hand."""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, astuple

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import SCHEMA, CellKey, KnownFailureRecord
from lossgate.evidence.reader import Where
from lossgate.evidence.records import RunRecord
from lossgate.evidence.summary import CellSummary
from lossgate.gate.init_policy import boxes, first_policy
from lossgate.gate.policy import Policy, load_policy
from lossgate.gate.policy_patterns import KnownCells, literal
from lossgate.gate.rules import EvidenceRules, Rule

KNOWN = KnownFailureRecord(name="Rounds twice", example="e" * 64, expected=True)


def summary(candidate: str = "nll", layout: str = "single", dtype: str = "float32", **changes: Any) -> CellSummary:
    values: dict[str, Any] = {
        "schema": SCHEMA,
        **asdict(CellKey(candidate, "agreement", layout, dtype, "simulated", "cpu")),
        "needs_adequacy": True,
        "where": Where("out.jsonl", 2),
        "digest": "d" * 64,
        "run": "run-1",
        "spec": "nll",
        "head": "logits",
        "source": f"kernels.py:{candidate}",
        "source_digest": None,
        "verdict": "AGREE",
        "reasons": (),
        "problems": 12,
        "comparisons": 24,
        "margin": 0.5,
        "mde": 0.001,
        "failure": None,
        "known_failure": None,
        "seconds": 1.0,
        "time": "2026-11-20T12:00:30+00:00",
    }
    return CellSummary(**values | changes)


def run(
    commit: str | None = "c" * 40, torch: str = "2.13.0", name: str = "run-1", examples: int | None = None
) -> RunRecord:
    return RunRecord(
        schema="1.0",
        run=name,
        started="2026-11-20T12:00:00+00:00",
        commit=commit,
        modified=False,
        host="host",
        versions={"lossgate": "0.1.0", "torch": torch, "python": "3.11.7", "machine": "x86_64"},
        settings={} if examples is None else {"examples": examples},
    )


def loaded(text: str, folder: Path) -> Policy:
    file = folder / "gate.toml"
    file.write_bytes(text.encode())
    return load_policy(file)


def asked_for(rules: Iterable[Rule]) -> list[CellKey]:
    """Returns each cell that rules name, as often as they do."""
    found: list[CellKey] = []
    for rule in rules:
        names = [[literal(pattern) or "" for pattern in patterns] for patterns in (rule.candidates, *rule.others)]
        found += [CellKey(*parts) for parts in product(*names)]
    return found


def test_a_full_matrix_is_one_rule_that_people_can_read() -> None:
    matrix = product(("nll", "grpo"), ("tp=2", "single"), ("float32", "bfloat16"))
    cells = [summary(*names, problems=12 + i) for i, names in enumerate(matrix)]
    assert (
        first_policy(cells, [run()])
        == """\
# What a release needs. The gate is closed unless evidence shows all of it:
#   lossgate gate EVIDENCE --policy THIS_FILE
schema = 1

[evidence]
# Older evidence is refused.
max_age = "3 days"
# All evidence must be of one commit.
same_commit = true
# true refuses evidence of files that differ from their commit, or are not in it.
unmodified = true
# These versions must be the same in all evidence.
same_versions = ["lossgate", "torch"]

# Each [[require]] asks for every combination of its lists. Shell patterns stand for what evidence
# has: "nll_*" for all candidates with such a name, of which there must be at least one. A name
# without *, ? or [ must be there, so that no cell can vanish unseen.

[[require]]
candidates = ["grpo", "nll"]
properties = ["agreement"]
layouts = ["single", "tp=2"]
dtypes = ["bfloat16", "float32"]
# The least problems of each of these cells, and the greatest error that could have stayed hidden.
min_problems = 12
max_mde = 0.01
"""
    )


def test_the_first_policy_allows_evidence_of_three_days(tmp_path: Path) -> None:
    policy = loaded(first_policy([summary()], [run()]), tmp_path)
    assert policy.evidence == EvidenceRules(max_age="3 days", unmodified=True)


NAMES = st.one_of(st.sampled_from(["nll", "nll_hidden", "grpo", "n*", "[x]", "a#\n\"'\\"]), st.text(min_size=1))
KEYS = st.builds(
    CellKey,
    candidate=NAMES,
    property=st.sampled_from(["agreement", "metamorphic"]) | NAMES,
    layout=st.sampled_from(["single", "tp=2", "cp=2", "dp=2,tp=2"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    world=st.sampled_from(["simulated", "gloo"]),
    device=st.sampled_from(["cpu", "cuda"]),
)


@given(st.lists(KEYS, min_size=1, max_size=12, unique=True), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.slow
def test_the_first_policy_asks_for_exactly_the_cells_of_the_evidence(
    tmp_path: Path, keys: list[CellKey], data: st.DataObject
) -> None:
    verdicts = data.draw(st.lists(st.sampled_from(["AGREE", "DISAGREE", "INCONCLUSIVE"]), min_size=12))
    cells = [summary(**asdict(key), verdict=verdict) for key, verdict in zip(keys, verdicts, strict=False)]
    policy = loaded(first_policy(cells, [run()]), tmp_path)
    assert sorted(asked_for(policy.require)) == sorted(keys)
    known = KnownCells(keys)
    assert all(demand.cells == (demand.key,) for rule in policy.require for demand in rule.demands(known))
    for left_out in keys:
        fewer = KnownCells(key for key in keys if key != left_out)
        missing = [d.key for rule in policy.require for d in rule.demands(fewer) if not d.is_met]
        assert missing == [left_out]


@given(st.sets(st.tuples(*[st.sampled_from("ab")] * 4)))
def test_boxes_have_each_cell_once(cells: set[tuple[str, ...]]) -> None:
    found = [cell for box in boxes(cells) for cell in product(*box)]
    assert sorted(found) == sorted(cells)


def test_what_is_no_full_matrix_is_split() -> None:
    cells = [summary("a"), summary("a", "tp=2"), summary("b"), summary("b", "tp=2"), summary("c", "tp=2")]
    assert boxes([astuple(cell.key)[::2] for cell in cells]) == [
        (("a", "b"), ("single", "tp=2"), ("simulated",)),
        (("c",), ("tp=2",), ("simulated",)),
    ]


@pytest.mark.parametrize(
    ("cells", "least"),
    [
        ([summary(problems=12), summary("b", problems=9)], 9),
        ([summary(problems=12), summary("b", problems=1, verdict="DISAGREE")], 12),
        ([summary(problems=3, verdict="DISAGREE")], 3),
        ([summary(problems=0, verdict="INCONCLUSIVE")], 1),
    ],
)
def test_the_least_problems_are_those_of_cells_that_passed(
    cells: list[CellSummary], least: int, tmp_path: Path
) -> None:
    (rule,) = loaded(first_policy(cells, [run()]), tmp_path).require
    assert rule.min_problems == least


@pytest.mark.parametrize(
    ("problems", "examples", "least"),
    [
        ((14, 16), (12, 12), 12),  # another seed may end with 13
        ((14, 110), (12, 100), 12),
        ((110, 104), (100, 100), 100),
        ((9, 14), (12, 12), 9),
        ((14, 16), (None, None), 14),
    ],
)
def test_the_least_problems_are_those_that_every_seed_tries(
    problems: tuple[int, int], examples: tuple[int | None, int | None], least: int, tmp_path: Path
) -> None:
    cells = [summary(name, problems=count, run=name) for name, count in zip("ab", problems, strict=True)]
    runs = [run(name=name, examples=tried) for name, tried in zip("ab", examples, strict=True)]
    (rule,) = loaded(first_policy(cells, runs), tmp_path).require
    assert rule.min_problems == least


def test_cells_that_did_not_pass_are_required_and_named(tmp_path: Path) -> None:
    cells = [summary(f"nll_{i}", verdict="DISAGREE" if i else "AGREE") for i in range(8)]
    text = first_policy(cells, [run()])
    assert "\n# 7 of these 8 cells did not pass, and keep the gate closed:\n" in text
    assert "\n#   nll_1[agreement-single-float32] DISAGREE\n" in text
    assert "\n#   and 2 more\n[[require]]\n" in text
    assert len(asked_for(loaded(text, tmp_path).require)) == 8


def test_a_long_list_has_a_line_for_each_name(tmp_path: Path) -> None:
    cells = [summary(f"clipped_pg_number_{i}") for i in range(9)]
    text = first_policy(cells, [run()])
    assert '\ncandidates = [\n    "clipped_pg_number_0",\n' in text
    assert max(map(len, text.splitlines())) <= 100
    assert len(asked_for(loaded(text, tmp_path).require)) == 9


@pytest.mark.parametrize(
    ("runs", "comment"),
    [
        ([run()], "All evidence must be of one commit.\n"),
        ([run(commit=None)], "All evidence must be of one commit. The evidence at hand names none.\n"),
        (
            [run("a"), run("b", name="run-2")],
            "All evidence must be of one commit. The evidence at hand is of 2 commits.\n",
        ),
        (
            [run(), run(torch="2.14.0", name="run-2")],
            "the same in all evidence. The evidence at hand has several of torch.\n",
        ),
    ],
)
def test_a_comment_says_what_the_evidence_at_hand_lacks(runs: list[RunRecord], comment: str) -> None:
    assert comment in first_policy([summary()], runs)


def test_a_known_failure_can_be_loaded_once_people_have_filled_it_in(tmp_path: Path) -> None:
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures/a.json").write_text('{"examples": [{"symptoms": []}]}')
    cells = [summary("a"), summary("b", verdict="DISAGREE", problems=1, known_failure=KNOWN)]
    text = first_policy(cells, [run()], {KNOWN.example: Path("failures/a.json")})
    for key in ("issue", "owner", "expires"):
        with pytest.raises(UsageError, match=rf"gate.toml: \[\[known_failure\]\] number 1: {key} is missing; "):
            loaded(text, tmp_path)
        text = text.replace(f"# {key} = ", f"{key} = ")
    policy = loaded(text, tmp_path)
    (known,) = policy.known_failures
    assert known.key == cells[1].key
    assert (known.name, known.example) == ("Rounds twice", "failures/a.json")
    assert [(rule.candidates, rule.min_problems) for rule in policy.require] == [(("a",), 12), (("b",), 1)]


def test_a_known_failure_without_a_file_says_which_is_needed(tmp_path: Path) -> None:
    text = first_policy([summary(known_failure=KNOWN, verdict="DISAGREE")], [run()])
    assert f"# No file at hand has the SHA-256 {KNOWN.example}.\n# example = " in text
    with pytest.raises(UsageError, match="example is missing"):
        loaded(text, tmp_path)


def test_evidence_without_cells_makes_no_policy() -> None:
    with pytest.raises(UsageError, match=r"^no first policy: the evidence has no cell\. Verify first:"):
        first_policy([], [run()])


@pytest.mark.parametrize(
    ("checkout", "source", "unmodified", "comment"),
    [
        (False, False, True, ""),
        (True, False, False, "# The evidence at hand is of such files: commit them, "),
        (False, True, False, "# The evidence at hand is of such files: commit them, "),  # git does not know the file
        (None, None, False, "# For the evidence at hand, git could not say.\n"),
        (False, None, False, "# For the evidence at hand, git could not say.\n"),
    ],
)
def test_unmodified_is_what_the_evidence_shows(
    checkout: bool | None, source: bool | None, unmodified: bool, comment: str, tmp_path: Path
) -> None:
    own = summary("b", source_digest="a" * 64, source_modified=source)
    text = first_policy([summary(), own], [msgspec.structs.replace(run(), modified=checkout)])
    assert comment in text
    assert ("at hand" in text) is bool(comment)
    assert loaded(text, tmp_path).evidence.unmodified is unmodified


def test_an_older_result_of_a_cell_counts_for_unmodified(tmp_path: Path) -> None:
    older, newer = (summary(source_digest="a" * 64, source_modified=modified) for modified in (True, False))
    assert loaded(first_policy([older, newer], [run()]), tmp_path).evidence.unmodified is False
