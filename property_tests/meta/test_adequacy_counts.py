# SPDX-License-Identifier: Apache-2.0
"""Each family keeps the number of its coverage goals and of its option mutants.

A goal or a mutant that is lost makes every verdict weaker, and no other test would fail. A family
that gains one changes its row on purpose.
"""

from dataclasses import replace

import pytest

from lossgate import Candidate, Layout
from lossgate.adequacy.option_mutants import option_mutants
from lossgate.adequacy.set_cover import required_goals
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS

# family, head: all goals, required on dp=2,cp=2,tp=3, required on a single rank, option mutants
COUNTS = {  # at head logprobs, options of logits have no mutants
    ("clipped_pg", "hidden"): (52, 52, 41, 152),
    ("clipped_pg", "logits"): (52, 50, 39, 152),
    ("clipped_pg", "logprobs"): (52, 39, 35, 132),
    ("distill", "hidden"): (25, 25, 12, 32),
    ("distill", "logits"): (25, 23, 10, 32),
    ("divergence", "hidden"): (23, 23, 12, 20),
    ("divergence", "logits"): (23, 21, 10, 20),
    ("dpo", "hidden"): (27, 27, 16, 44),
    ("dpo", "logits"): (27, 25, 14, 44),
    ("dpo", "logprobs"): (27, 16, 12, 40),
    ("grpo", "hidden"): (46, 46, 35, 112),
    ("grpo", "logits"): (46, 44, 33, 112),
    ("grpo", "logprobs"): (46, 33, 29, 92),
    ("label_smoothing", "hidden"): (18, 18, 7, 12),
    ("label_smoothing", "logits"): (18, 16, 5, 12),
    ("nll", "hidden"): (18, 18, 7, 16),
    ("nll", "logits"): (18, 16, 5, 16),
    ("nll", "logprobs"): (18, 7, 3, 8),
    ("preference", "rewards"): (18, 8, 6, 4),
    ("softcap", "hidden"): (18, 18, 7, 4),
    ("softcap", "logits"): (18, 16, 5, 4),
    ("token_logprobs", "hidden"): (20, 20, 9, 36),
    ("token_logprobs", "logits"): (20, 18, 7, 36),
    ("value", "values"): (23, 12, 8, 12),
    ("z_loss", "hidden"): (18, 18, 7, 8),
    ("z_loss", "logits"): (18, 16, 5, 8),
}

_OF_VOCABULARY = {name for name, goal in SHARDING_GOALS.items() if goal.axes == ("tp",)}
_OF_TOKENS = {"rank with nothing trained", "trained on several cp ranks"}
_OF_ONE_RANK = {name for name, goal in SHARDING_GOALS.items() if not goal.axes}


def counts(candidate: Candidate) -> tuple[int, int, int, int]:
    return (
        len(candidate.spec.all_goals),
        len(required_goals(candidate, Layout(dp=2, cp=2, tp=3), "float32")),
        len(required_goals(candidate, Layout(), "float32")),
        len(option_mutants(candidate)),
    )


def test_every_family_and_head_is_counted() -> None:
    assert list(COUNTS) == [(name, head) for name, spec in SPECS.items() for head in spec.inputs]


@pytest.mark.parametrize(("family", "head"), COUNTS)
def test_as_many_goals_and_mutants_as_written_down(family: str, head: str) -> None:
    """The dense candidate supports every option, so nothing is out of its reach."""
    assert counts(dense_candidate(SPECS[family], head)) == COUNTS[family, head]


@pytest.mark.parametrize(
    ("family", "head", "without", "beside"),
    [
        ("nll", "hidden", set(), set()),
        ("distill", "logits", set(), set(IDS_GOALS)),
        ("value", "values", _OF_VOCABULARY, set()),
        ("dpo", "logprobs", _OF_VOCABULARY, set()),
        ("preference", "rewards", {*_OF_VOCABULARY, *_OF_TOKENS}, set()),
    ],
)
def test_several_ranks_add_the_goals_of_layouts(family: str, head: str, without: set[str], beside: set[str]) -> None:
    """Heads without a vocabulary have none of tp, and a loss of whole sequences none of cp."""
    dense = dense_candidate(SPECS[family], head)
    added = set(required_goals(dense, Layout(dp=2, cp=2, tp=3), "float32")) - set(
        required_goals(dense, Layout(), "float32")
    )
    assert added == set(SHARDING_GOALS) - _OF_ONE_RANK - without | beside


def test_a_lost_goal_or_mutant_is_noticed() -> None:
    """A candidate that supports less has fewer of both; this is what a loss would look like."""
    narrow = replace(dense_candidate(SPECS["dpo"], "hidden"), supports={})
    spec = replace(narrow.spec, goals=dict(list(narrow.spec.goals.items())[1:]))
    found = counts(replace(narrow, spec=spec))
    assert all(less < full for less, full in zip(found, COUNTS["dpo", "hidden"], strict=True))
