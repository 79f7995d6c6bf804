# SPDX-License-Identifier: Apache-2.0
"""Each cell tries a few large problems, and kernels that fail on nothing else disagree."""

import pytest

from kernel_bank.bugs import cross_entropy_with
from kernel_bank.cross_entropy import STYLES, make
from kernel_bank.large_bugs import LARGE_BUGS, without_maximum
from lossgate import Layout
from lossgate.adequacy.deck import Deck
from lossgate.cases.large import LARGE_VOCABULARY, MANY_SEQUENCES, MANY_TOKENS
from lossgate.declaration.candidate import Candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS

FUSED = STYLES["float32"][1]


def verified(candidate: Candidate, layout: str = "single", dtype: str = "float32", **settings: int) -> CellResult:
    return run_cell(Cell(candidate, Layout.parse(layout), dtype), Settings(**settings))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layout", ["single", "dp=2", "tp=2"])
def test_every_cell_tries_a_large_problem_of_each_shape(layout: str) -> None:
    found = verified(make(FUSED), layout)
    assert found.verdict is Verdict.AGREE, found.reasons
    problems = [case.problem for case in found.cases]
    assert max(problem.tokens for problem in problems) == MANY_TOKENS.tokens
    assert max(len(problem.lengths) for problem in problems) == MANY_SEQUENCES.sequences
    assert max(problem.vocab for problem in problems) == LARGE_VOCABULARY.vocab
    assert (found.record.tokens, found.record.vocab) == (2085, 33023)


def test_they_are_no_problems_more() -> None:
    assert len(verified(make(FUSED), examples=30).cases) == 30


@pytest.mark.parametrize(
    ("family", "head", "shapes"),
    [("nll", "logits", 3), ("value", "values", 2), ("dpo", "logprobs", 2), ("preference", "rewards", 1)],
)
def test_candidates_get_the_shapes_that_mean_something_to_them(family: str, head: str, shapes: int) -> None:
    large = Deck(dense_candidate(SPECS[family], head), "float32", 0).large
    assert len(large) == shapes
    assert all(bool(len(entry.bound.trained.sequence)) for entry in large)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("bug", LARGE_BUGS)
def test_bugs_of_large_problems_disagree(bug: str, seed: int) -> None:
    found = verified(LARGE_BUGS[bug].put_into(make(FUSED)), shrink_calls=0, seed=seed)
    assert found.verdict is Verdict.DISAGREE


@pytest.mark.parametrize("seed", range(2))
def test_an_exp_without_a_maximum_disagrees(seed: int) -> None:
    assert verified(without_maximum(FUSED), shrink_calls=0, seed=seed).verdict is Verdict.DISAGREE


def test_sums_over_many_chunks_in_bfloat16_disagree() -> None:
    wrong = cross_entropy_with(STYLES["bfloat16"][0], "bf16 accumulation of dW")
    assert verified(wrong, dtype="bfloat16", shrink_calls=0).verdict is Verdict.DISAGREE


def test_what_only_large_problems_show_is_made_smaller_as_far_as_it_goes() -> None:
    """A small one does not lose the tail of a block of 1,024."""
    failure = verified(LARGE_BUGS["tail of a block of 1,024 lost"].put_into(make(FUSED)), shrink_calls=60).failure
    assert failure is not None
    assert failure.problem.tokens == MANY_TOKENS.tokens
    assert failure.problem.hidden == 1


@pytest.mark.slow
def test_what_small_problems_show_is_small() -> None:
    failure = verified(LARGE_BUGS["seventh sequence dropped"].put_into(make(FUSED))).failure
    assert failure is not None
    assert failure.problem.tokens < 100


@pytest.mark.slow
def test_what_a_large_vocabulary_shows_keeps_its_logits() -> None:
    """With smaller ones a right product in float32 loses thousands of tiny probabilities."""
    failure = verified(LARGE_BUGS["labels through float16"].put_into(make(FUSED)), shrink_calls=60).failure
    assert failure is not None
    assert (failure.problem.vocab, failure.problem.logit_std) == (LARGE_VOCABULARY.vocab, LARGE_VOCABULARY.logit_std)
    assert failure.problem.tokens == 3
