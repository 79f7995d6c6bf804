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

# family, head: all goals, required on dp=3,cp=2,tp=3, required on a single rank, option mutants
COUNTS = {  # at head logprobs, options of logits have no mutants
    ("clipped_pg", "hidden"): (53, 53, 41, 152),
    ("clipped_pg", "logits"): (53, 51, 39, 152),
    ("clipped_pg", "logprobs"): (53, 40, 35, 132),
    ("distill", "hidden"): (26, 26, 12, 32),
    ("distill", "logits"): (26, 24, 10, 32),
    ("divergence", "hidden"): (24, 24, 12, 20),
    ("divergence", "logits"): (24, 22, 10, 20),
    ("dpo", "hidden"): (28, 28, 16, 44),
    ("dpo", "logits"): (28, 26, 14, 44),
    ("dpo", "logprobs"): (28, 17, 12, 40),
    ("grpo", "hidden"): (47, 47, 35, 112),
    ("grpo", "logits"): (47, 45, 33, 112),
    ("grpo", "logprobs"): (47, 34, 29, 92),
    ("label_smoothing", "hidden"): (19, 19, 7, 12),
    ("label_smoothing", "logits"): (19, 17, 5, 12),
    ("nll", "hidden"): (19, 19, 7, 16),
    ("nll", "logits"): (19, 17, 5, 16),
    ("nll", "logprobs"): (19, 8, 3, 8),
    ("preference", "rewards"): (19, 8, 6, 4),
    ("softcap", "hidden"): (19, 19, 7, 4),
    ("softcap", "logits"): (19, 17, 5, 4),
    ("token_logprobs", "hidden"): (21, 21, 9, 36),
    ("token_logprobs", "logits"): (21, 19, 7, 36),
    ("value", "values"): (24, 13, 8, 12),
    ("z_loss", "hidden"): (19, 19, 7, 8),
    ("z_loss", "logits"): (19, 17, 5, 8),
}

_OF_VOCABULARY = {name for name, goal in SHARDING_GOALS.items() if goal.axes == ("tp",)}
_OF_TOKENS = {"rank with nothing trained", "fewer trained than dp ranks", "trained on several cp ranks"}
_OF_ONE_RANK = {name for name, goal in SHARDING_GOALS.items() if not goal.axes}


def counts(candidate: Candidate) -> tuple[int, int, int, int]:
    return (
        len(candidate.spec.all_goals),
        len(required_goals(candidate, Layout(dp=3, cp=2, tp=3), "float32")),
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
    added = set(required_goals(dense, Layout(dp=3, cp=2, tp=3), "float32")) - set(
        required_goals(dense, Layout(), "float32")
    )
    assert added == set(SHARDING_GOALS) - _OF_ONE_RANK - without | beside


def test_a_lost_goal_or_mutant_is_noticed() -> None:
    """A candidate that supports less has fewer of both; this is what a loss would look like."""
    narrow = replace(dense_candidate(SPECS["dpo"], "hidden"), supports={})
    spec = replace(narrow.spec, goals=dict(list(narrow.spec.goals.items())[1:]))
    found = counts(replace(narrow, spec=spec))
    assert all(less < full for less, full in zip(found, COUNTS["dpo", "hidden"], strict=True))
