# SPDX-License-Identifier: Apache-2.0
"""Tests of the rules of a policy: which cells do they ask for?"""

from fnmatch import fnmatchcase
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from lossgate.engine.cell_record import CellKey
from lossgate.gate.policy_patterns import Demand, KnownCells, escape, fits, literal
from lossgate.gate.rules import Rule


def key(candidate: str = "nll", layout: str = "single", dtype: str = "float32", **others: str) -> CellKey:
    parts = {"property": "agreement", "world": "simulated", "device": "cpu"} | others
    return CellKey(candidate=candidate, layout=layout, dtype=dtype, **parts)


def rule(*candidates: str, **changes: Any) -> Rule:
    return Rule(candidates=candidates, **changes)


def demands_of(rule: Rule, *keys: CellKey) -> list[Demand]:
    return list(rule.demands(KnownCells(keys)))


def unmet(rule: Rule, *keys: CellKey) -> list[str]:
    return [str(demand) for demand in demands_of(rule, *keys) if not demand.is_met]


NLL, NLL_TP, GRPO = key("nll"), key("nll", "tp=2"), key("grpo")


@pytest.mark.parametrize(
    ("rule", "matching"),
    [
        (rule("nll"), {NLL, NLL_TP}),
        (rule("NLL"), set[CellKey]()),
        (rule("n*"), {NLL, NLL_TP}),
        (rule("?r[a-p]o", "x"), {GRPO}),
        (rule("*", layouts=("tp=*",)), {NLL_TP}),
        (rule("*", dtypes=("bfloat16",)), set[CellKey]()),
        (rule("*", worlds=("gloo", "nccl")), set[CellKey]()),
        (rule("*", devices=("cuda",)), set[CellKey]()),
        (rule("*", properties=("agree*",)), {NLL, NLL_TP, GRPO}),
    ],
)
def test_a_rule_matches_cells(rule: Rule, matching: set[CellKey]) -> None:
    assert {cell for cell in (NLL, NLL_TP, GRPO) if rule.matches(cell)} == matching
    asked = {cell for demand in demands_of(rule, NLL, NLL_TP, GRPO) for cell in demand.cells}
    assert asked == matching


@pytest.mark.parametrize(
    ("rule", "missing"),
    [
        (rule("nll", "grpo"), []),
        (rule("*"), []),
        (rule("dpo_*"), ["no candidate matches dpo_*"]),
        (rule("dpo"), ["dpo: no cell with world simulated, device cpu"]),
        (rule("dpo", properties=("agreement",)), ["dpo: no cell with property agreement"]),
        (rule("nll", layouts=("single", "tp=2")), []),
        (rule("*", layouts=("single", "tp=2")), ["grpo: no cell with layout tp=2"]),
        (rule("*", layouts=("single", "tp=*")), ["grpo: no cell with layout tp=*"]),
        (
            rule("nll", layouts=("single", "tp=2"), dtypes=("float32", "bfloat16")),
            ["nll: no cell with layout single, dtype bfloat16", "nll: no cell with layout tp=2, dtype bfloat16"],
        ),
        (rule("nll", worlds=("gloo",)), ["nll: no cell with world gloo"]),
        (rule("nll", worlds=("*",), devices=("cuda",)), ["nll: no cell with device cuda"]),
        (
            rule("*", "dpo", "grp?", "x[!y]"),
            ["dpo: no cell with world simulated, device cpu", "no candidate matches x[!y]"],
        ),
    ],
)
def test_what_is_missing_is_reported_in_words(rule: Rule, missing: list[str]) -> None:
    assert unmet(rule, NLL, NLL_TP, GRPO) == missing


def test_without_evidence_everything_is_missing() -> None:
    assert unmet(rule("*", "nll*", "nll"))[:2] == ["no candidate matches *", "no candidate matches nll*"]


FULL = {"properties": ("agreement",), "layouts": ("tp=2",), "dtypes": ("float32",)}


@pytest.mark.parametrize(
    ("rule", "cells"),
    [
        (rule("nll", **FULL), [NLL_TP]),
        (rule("n[*]", **FULL), [key("n*", "tp=2")]),
        (rule("n*", **FULL), [None]),
        (rule("nll", **FULL | {"dtypes": ("float*",)}), [None]),
        (rule("nll", **FULL | {"dtypes": ("float32", "float16")}), [NLL_TP, key("nll", "tp=2", "float16")]),
    ],
)
def test_a_missing_cell_has_a_key_if_the_rule_names_each_part(rule: Rule, cells: list[CellKey | None]) -> None:
    assert [demand.key for demand in demands_of(rule)] == cells


def test_a_candidate_that_two_patterns_match_is_asked_for_once() -> None:
    assert [demand.candidate for demand in demands_of(rule("nll", "n*", "*"), NLL, GRPO, key("dpo"))] == [
        "nll",
        "dpo",
        "grpo",
    ]


def test_a_cell_can_meet_two_demands() -> None:
    found = demands_of(rule("nll", layouts=("*", "tp=2")), NLL, NLL_TP)
    assert [demand.cells for demand in found] == [(NLL, NLL_TP), (NLL_TP,)]


NAMES = st.text(st.sampled_from("ab*?[]!-"), min_size=1, max_size=5)


@given(NAMES, NAMES)
def test_patterns_are_those_of_the_shell(pattern: str, name: str) -> None:
    assert fits(pattern, name) == fnmatchcase(name, pattern)
    own = literal(pattern)
    assert own is None or fits(pattern, name) == (name == own)


@given(NAMES, NAMES)
def test_an_escaped_name_stands_for_itself_alone(name: str, other: str) -> None:
    assert literal(escape(name)) == name
    assert fits(escape(name), other) == (name == other)


PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "[ab]", "c*"]), min_size=1, max_size=3, unique=True).map(tuple)
CELLS = st.builds(key, *[st.sampled_from(["a", "b", "cc"])] * 3)


@given(PATTERNS, PATTERNS, PATTERNS, st.lists(CELLS, max_size=8, unique=True))
def test_demands_are_what_their_definition_says(
    candidates: tuple[str, ...], layouts: tuple[str, ...], dtypes: tuple[str, ...], keys: list[CellKey]
) -> None:
    """Against a slow and plain reading of the definition."""
    asked = rule(*candidates, layouts=layouts, dtypes=dtypes)
    names = dict.fromkeys(name for p in candidates for name in ["a", "b", "cc"] if is_chosen(name, p, keys))
    expected = {
        (name, layout, dtype): tuple(
            k for k in keys if k.candidate == name and fnmatchcase(k.layout, layout) and fnmatchcase(k.dtype, dtype)
        )
        for name, layout, dtype in product(names, layouts, dtypes)
    }
    found = {(d.candidate, *d.wanted[1:3]): d.cells for d in demands_of(asked, *keys) if d.candidate}
    assert found == expected
    nowhere = {d.pattern for d in demands_of(asked, *keys) if d.candidate is None}
    assert nowhere == {p for p in candidates if literal(p) is None and not any(fits(p, k.candidate) for k in keys)}
    assert {k for k in keys if asked.matches(k)} == {k for cells in expected.values() for k in cells}


def is_chosen(name: str, pattern: str, keys: list[CellKey]) -> bool:
    return name == pattern or (fnmatchcase(name, pattern) and any(k.candidate == name for k in keys))


def test_rules_for_100_000_cells_are_quick_enough_for_a_test() -> None:
    """A loop over all cells for each demand would take hours: there are 400,000 demands."""
    parts = (
        [f"nll_{i}" for i in range(100)],
        [f"property_{i}" for i in range(50)],
        ["single", "tp=2", "cp=2", "dp=2", "dp=4"],
    )
    keys = [key(c, layout, dtype, property=p) for c, p, layout in product(*parts) for dtype in ("a", "b", "c", "d")]
    assert len(keys) == 100_000
    Random(0).shuffle(keys)
    known, lists = (
        KnownCells(keys),
        dict(zip(("properties", "layouts", "dtypes"), map(tuple, [*parts[1:], "abcd"]), strict=True)),
    )
    for i in range(8):
        every = rule("nll_*", **lists) if i % 2 else rule("*")
        assert sum(len(demand.cells) for demand in every.demands(known)) == len(keys)
    assert astuple(keys[0])[4:] == ("simulated", "cpu")
