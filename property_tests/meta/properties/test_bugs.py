# SPDX-License-Identifier: Apache-2.0
"""Each property has a kernel that breaks it, and nothing but what is named beside it."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kernel_bank.cross_entropy import STYLES, make
from kernel_bank.property_bugs import PROPERTY_BUGS, right
from lossgate import Layout
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.engine.case_result import run_case
from lossgate.problems.problem import Problem
from lossgate.properties import PROPERTIES
from lossgate.worlds.base import World

PROBLEMS = 6
MakeWorld = Callable[[str], World]


@cache
def problems(head: str, layout: Layout, dtype: str) -> list[Problem]:
    """Returns problems of some tokens, the same for all kernels of a head."""
    found = sample_problems(right(head), layout, dtype, 60, 3)
    return [p for p in found if 8 < p.tokens < 100 and p.vocab > 2 and "none" not in p.masks][:PROBLEMS]


def broken(
    candidate: Candidate, layout: str, make_world: MakeWorld, *, dtype: str = "float32", agrees: bool = True
) -> dict[str, tuple[str, ...]]:
    """Returns the findings of each property that a kernel breaks on some problem.

    Args:
        candidate: the kernel.
        layout: its ranks.
        make_world: makes a world of them.
        dtype: of the problems.
        agrees: only problems count on which it agrees with the reference.
    """
    found: dict[str, tuple[str, ...]] = {}
    counted, world = 0, make_world(layout)
    for problem in problems(candidate.head, Layout.parse(layout), dtype):
        case = Case(candidate, problem, world)
        if agrees and not run_case(case, PROPERTIES["agreement"]).agrees:
            continue
        counted += 1
        for held_to in PROPERTIES.values():
            if held_to.applies(candidate) and held_to.name not in found:
                result = run_case(case, held_to)
                if not result.agrees:
                    found[held_to.name] = result.findings
    assert counted, "it agrees on no problem"
    return found


FINDINGS = Path(__file__).with_name("findings.txt")
SECTIONS = (section.partition("\n") for section in f"\n{FINDINGS.read_text()}".split("\n## ")[1:])
EXPECTED = {name: lines.rstrip() for name, _, lines in SECTIONS}
"""What is said of each bug, by the property that it breaks. In findings ``#`` stands for a number,
and ``[...]`` for the place.
"""
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(,\d{3})*(\.\d+)?(e[+-]?\d+)?(?![\w.])")
PLACE = re.compile(r"  \[[^\]]*(:\d+|unknown)[^\]]*\]$")


def in_words(name: str, findings: tuple[str, ...]) -> str:
    """Returns what is said of a bug: what it is, the findings, and what to do."""
    found = (NUMBER.sub("#", PLACE.sub("  [...]", line)).strip() for text in findings for line in text.splitlines())
    return "\n".join([PROPERTY_BUGS[name].bug.sentence, *found, f"to do: {PROPERTIES[name].remedy}"])


def test_the_findings_of_every_bug_are_written_down() -> None:
    assert set(EXPECTED) == set(PROPERTY_BUGS)


def test_every_property_has_a_bug() -> None:
    assert {"agreement", *PROPERTY_BUGS} == set(PROPERTIES)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["single", "dp=2"])
@pytest.mark.parametrize("head", ["logits", "hidden", "logprobs"])
def test_the_right_kernel_breaks_none(head: str, layout: str, dtype: str, make_world: MakeWorld) -> None:
    assert broken(right(head), layout, make_world, dtype=dtype) == {}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", PROPERTY_BUGS)
def test_a_bug_breaks_its_property_and_those_that_it_names(name: str, make_world: MakeWorld) -> None:
    bug = PROPERTY_BUGS[name]
    agrees = "agreement" not in bug.also
    found = broken(bug.candidate, bug.layout, make_world, dtype=bug.dtype, agrees=agrees)
    assert in_words(name, found[name]) == EXPECTED[name]
    if agrees:
        assert set(found) == {name, *bug.also}, found
    else:  # then it breaks whatever compares with the reference
        assert {name, "agreement"} <= set(found)


@pytest.mark.parametrize("name", ["same-call-twice", "after-another-shape"])
def test_calls_that_add_up_in_another_order_are_judged(name: str, make_world: MakeWorld) -> None:
    """Each collective has another order, so that the same call has other bits after another one."""
    kernel, world = make(STYLES["float32"][0]), make_world("tp=4")
    found = [replace(p, reduction_order="permuted") for p in sample_problems(kernel, world.layout, "float32", 12, 0)]
    results = [run_case(Case(kernel, problem, world), PROPERTIES[name]) for problem in found]
    assert [result.findings for result in results] == [()] * len(found)
    assert any(result.comparisons for result in results)
