# SPDX-License-Identifier: Apache-2.0
"""The same seed draws the same problems, whatever the process has imported or drawn before."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lossgate import Precision
from lossgate.base.names import DTYPES
from lossgate.cases.drawing import Draws
from lossgate.cases.option_strategies import ForcedOption
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.problems.problem import Problem

_DTYPES: Any = {"dtypes": DTYPES, "precision": dict.fromkeys(DTYPES, Precision())}
NLL = replace(dense_candidate(SPECS["nll"], "hidden"), **_DTYPES)
DPO = replace(dense_candidate(SPECS["dpo"], "logprobs"), **_DTYPES)

SCRIPT = """
import json, sys
if "many_numbers" in sys.argv:
    import many_numbers
import hypothesis
from hypothesis import strategies as st
from lossgate.adequacy.deck import Deck
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS

deck = Deck(dense_candidate(SPECS["nll"], "logprobs"), "float32", 0)
numbers = []

@hypothesis.seed(0)
@hypothesis.settings(max_examples=100, database=None)
@hypothesis.given(st.integers(0, 2**16 - 1))
def draw(number):
    numbers.append(number)

draw()
print(json.dumps({"deck": [entry.drawn.to_json() for entry in deck.entries], "by hypothesis": numbers}))
"""


def drawn_in_a_fresh_process(folder: Path, *imported: str) -> dict[str, list[Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *imported],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_imported_modules_do_not_change_what_is_drawn(tmp_path: Path) -> None:
    """They would with Hypothesis's own provider, which collects the constants in their source."""
    numbers = "\n".join(f"C{n} = {n * 211}" for n in range(2, 300))
    (tmp_path / "many_numbers.py").write_text(numbers)
    plain, other = (drawn_in_a_fresh_process(tmp_path, *imported) for imported in ((), ("many_numbers",)))
    assert plain["deck"] == other["deck"]
    assert len(plain["deck"]) >= 12
    assert plain["by hypothesis"] != other["by hypothesis"]


def test_draws_do_not_hang_on_what_was_drawn_before() -> None:
    def check(problem: Problem) -> None:
        raise AssertionError("too large")

    alone = Draws(NLL, "float32", "a seed", 12).all()
    Draws(DPO, "bfloat16", "a seed", 5, rich=True).all()
    with pytest.raises(AssertionError, match="too large"):
        Draws(NLL, "float32", "another", 3).each(check, shrink=True)
    assert Draws(NLL, "float32", "a seed", 12).all() == alone


@pytest.mark.parametrize(
    "other",
    [
        Draws(NLL, "float32", "b", 12),
        Draws(NLL, "bfloat16", "a", 12),
        Draws(NLL, "float32", "a", 12, rich=True),
        Draws(NLL, "float32", "a", 12, (ForcedOption("reduction", ("sequence_mean",)),)),
        Draws(DPO, "float32", "a", 12),
    ],
    ids=("seed", "dtype", "rich", "target", "candidate"),
)
def test_what_is_asked_for_changes_what_is_drawn(other: Draws) -> None:
    assert other.all() != Draws(NLL, "float32", "a", 12).all()


def test_as_many_are_drawn_as_are_asked_for_and_hardly_any_twice() -> None:
    drawn = Draws(NLL, "float32", "a seed", 60).all()
    assert len(drawn) == 60
    assert len({problem.to_json() for problem in drawn}) > 55


def test_rich_problems_have_tokens_to_train() -> None:
    for problem in Draws(NLL, "float32", "a seed", 30, rich=True).all():
        assert problem.tokens >= 13
        assert "none" not in problem.masks


def test_a_target_is_what_every_problem_has() -> None:
    target = ForcedOption("reduction", ("sequence_mean",))
    drawn = Draws(NLL, "float32", "a seed", 20, (target,)).all()
    assert [problem.options.get("reduction") for problem in drawn] == ["sequence_mean"] * 20


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_a_failing_problem_is_made_small(seed: str, rich: bool) -> None:
    """Fails for more than four tokens, a bias and a vocabulary of more than ten rows."""
    seen: list[Problem] = []

    def check(problem: Problem) -> None:
        if problem.tokens > 4 and problem.bias and problem.vocab > 10:
            seen.append(problem)
            raise AssertionError("too large")

    with pytest.raises(AssertionError, match="too large"):
        Draws(NLL, "float32", seed, 200, rich=rich).each(check, shrink=True)
    smallest = seen[-1]
    assert (smallest.tokens, smallest.vocab, smallest.hidden, len(smallest.lengths)) == (5, 13, 1, 1)
    assert not smallest.options
    assert not smallest.forced_labels
    assert not smallest.outliers


def test_what_always_fails_is_made_as_simple_as_can_be() -> None:
    seen: list[Problem] = []

    def check(problem: Problem) -> None:
        seen.append(problem)
        raise AssertionError("always")

    with pytest.raises(AssertionError, match="always"):
        Draws(NLL, "float32", "a seed", 20, rich=True).each(check, shrink=True)
    smallest = seen[-1]
    assert (smallest.tokens, smallest.masks, smallest.seed) == (1, ("all",), 0)
    assert not smallest.options
    assert not smallest.forced_labels
    assert not smallest.outliers


def test_seeds_are_hardly_ever_the_same() -> None:
    """Ids and masks depend on the seed alone."""
    assert len({problem.seed for problem in Draws(NLL, "float32", "a seed", 60).all()}) == 60


def test_without_shrinking_the_first_failure_ends_the_draws() -> None:
    draws, seen = Draws(NLL, "float32", "a seed", 12), list[Problem]()
    first = draws.all()[:3]

    def check(problem: Problem) -> None:
        seen.append(problem)
        if problem == first[2]:
            raise AssertionError("the third")

    with pytest.raises(AssertionError, match="the third"):
        draws.each(check)
    assert seen[:3] == first
    assert set(map(Problem.to_json, seen[3:])) <= {first[2].to_json()}  # it is tried again


def test_a_bias_has_two_rows_at_least() -> None:
    """The gradient of one row is 0, and what a right kernel gives is all rounding."""
    biased = replace(dense_candidate(SPECS["nll"], "hidden"), supports={"bias": True})
    plain = dense_candidate(SPECS["nll"], "hidden")
    rows = [problem.vocab for problem in Draws(biased, "float32", "bias", 200).all()]
    assert min(rows) == 2
    assert 1 in [problem.vocab for problem in Draws(plain, "float32", "bias", 200).all() if not problem.bias]
