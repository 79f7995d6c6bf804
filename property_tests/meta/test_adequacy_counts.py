# SPDX-License-Identifier: Apache-2.0
"""Each family keeps the number of its coverage goals and of its option mutants.

A goal or a mutant that is lost makes every verdict weaker, and no other test would fail. A family
that gains one changes its row on purpose.
"""

from dataclasses import replace

import pytest

from lossgate import Candidate, Layout
from lossgate.adequacy.coverage import required_goals
from lossgate.adequacy.option_mutants import option_mutants
from lossgate.bank.dense_candidates import dense_candidate
from lossgate.losses import SPECS

# family, head: all goals, required on dp=2,cp=2,tp=2, required on a single rank, option mutants
COUNTS = {
    ("nll", "hidden"): (5, 5, 4, 12),
    ("nll", "logits"): (5, 5, 4, 12),
    ("nll", "logprobs"): (5, 3, 2, 12),
    ("dpo", "hidden"): (14, 14, 13, 44),
    ("dpo", "logits"): (14, 14, 13, 44),
    ("dpo", "logprobs"): (14, 12, 11, 44),
    ("preference", "rewards"): (6, 6, 6, 4),
    ("clipped_pg", "hidden"): (36, 36, 35, 136),
    ("clipped_pg", "logits"): (36, 36, 35, 136),
    ("clipped_pg", "logprobs"): (36, 34, 33, 136),
    ("grpo", "hidden"): (30, 30, 29, 96),
    ("grpo", "logits"): (30, 30, 29, 96),
    ("grpo", "logprobs"): (30, 28, 27, 96),
    ("value", "values"): (10, 8, 7, 12),
    ("distill", "hidden"): (11, 11, 10, 32),
    ("distill", "logits"): (11, 11, 10, 32),
    ("token_logprobs", "hidden"): (7, 7, 6, 32),
    ("token_logprobs", "logits"): (7, 7, 6, 32),
}


def counts(candidate: Candidate) -> tuple[int, int, int, int]:
    return (
        len(candidate.spec.all_goals),
        len(required_goals(candidate, Layout(dp=2, cp=2, tp=2))),
        len(required_goals(candidate, Layout())),
        len(option_mutants(candidate)),
    )


def test_every_family_and_head_is_counted() -> None:
    assert list(COUNTS) == [(name, head) for name, spec in SPECS.items() for head in spec.inputs]


@pytest.mark.parametrize(("family", "head"), COUNTS)
def test_as_many_goals_and_mutants_as_written_down(family: str, head: str) -> None:
    """The dense candidate supports every option, so nothing is out of its reach."""
    assert counts(dense_candidate(SPECS[family], head)) == COUNTS[family, head]


def test_a_lost_goal_or_mutant_is_noticed() -> None:
    """A candidate that supports less has fewer of both; this is what a loss would look like."""
    narrow = replace(dense_candidate(SPECS["dpo"], "hidden"), supports={})
    spec = replace(narrow.spec, goals=dict(list(narrow.spec.goals.items())[1:]))
    found = counts(replace(narrow, spec=spec))
    assert all(less < full for less, full in zip(found, COUNTS["dpo", "hidden"], strict=True))
