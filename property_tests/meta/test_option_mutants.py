# SPDX-License-Identifier: Apache-2.0
"""An option mutant takes one choice of an option for another. Problems must kill it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from lossgate import ANY, Layout
from lossgate.adequacy.deck import Deck
from lossgate.adequacy.option_mutants import option_mutants
from lossgate.dense_candidates import dense_candidate
from lossgate.engine import search
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS

SEEN = ", seen in its value"


def mutants(spec: str, **supports: Any) -> set[str]:
    """Returns the mutants that must be killed by a value, without the words that say so."""
    found = option_mutants(replace(dense_candidate(SPECS[spec], "logits"), supports=supports))
    return {name.removesuffix(SEEN) for name in found if name.endswith(SEEN)}


def test_there_is_a_mutant_for_each_choice_and_each_other_one() -> None:
    assert {name for name in mutants("clipped_pg", reference_policy_kl_type=ANY) if "kl_type" in name} == {
        f"reference_policy_kl_type={a} computed as {b}"
        for a in ("k1", "k2", "k3")
        for b in ("k1", "k2", "k3")
        if a != b
    }


def test_numbers_are_mutated_to_the_default_to_zero_and_to_none() -> None:
    found = mutants("clipped_pg", kl_input_clamp_value=ANY, reference_policy_kl_penalty=ANY)
    values = ("20.0", "None", "5.0")
    assert {name for name in found if "input_clamp" in name} == {
        f"kl_input_clamp_value={a} computed as {b}" for a in values for b in values if a != b
    }
    assert "reference_policy_kl_penalty=0.5 computed as 0.0" in found


def test_a_choice_that_is_not_supported_is_still_one_to_mutate_to() -> None:
    assert {name for name in mutants("grpo") if "loss_fn" in name} == {"loss_fn=dapo computed as cispo"}


def test_numbers_that_are_too_near_have_no_mutant() -> None:
    assert not {name for name in mutants("nll", epsilon=(0.0, 1e-8)) if name.startswith("epsilon=1e-08")}
    assert "epsilon=0.5 computed as 0.0" in mutants("nll", epsilon=ANY)
    assert "epsilon=1e-08" not in " ".join(mutants("nll", epsilon=ANY))


@pytest.mark.slow
def test_surviving_mutants_are_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "choose", lambda placed, *_: placed[:2])
    cell = Cell(dense_candidate(SPECS["clipped_pg"], "logprobs"), Layout(), "float32")
    result = run_cell(cell, Settings(examples=2, rounds=1))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.record.surviving
    said = "a kernel that computes use_cispo=True as False (in a value), False (in a gradient) would have passed every "
    advised = r"problem; \d of 4 problems have this choice; raise --examples to about \d+, or drop use_cispo from "
    assert any(re.fullmatch(re.escape(said) + advised + "supports", reason) for reason in result.reasons)


def test_a_mutant_that_no_valid_options_have_need_not_be_killed() -> None:
    """A dual clip is not valid with CISPO."""
    supports = {"ratio_clip_c": 3.0, "use_cispo": False}
    found = Deck(replace(dense_candidate(SPECS["clipped_pg"], "logprobs"), supports=supports), "float32", 0)
    assert "use_cispo=False computed as True, seen in its value" in found.equivalent
    assert "ratio_clip_c=3.0 computed as None, seen in its value" not in found.equivalent


@pytest.mark.slow
def test_a_choice_that_no_valid_options_have_must_be_shown() -> None:
    """The candidate says that it supports it, and nothing can show that."""
    supports = {"ratio_clip_c": (None, 3.0), "use_cispo": True}
    found = Deck(replace(dense_candidate(SPECS["clipped_pg"], "logprobs"), supports=supports), "float32", 0)
    assert "ratio_clip_c=3.0 computed as None, seen in its value" not in found.equivalent


@pytest.mark.slow
def test_an_equivalent_mutant_need_not_be_killed() -> None:
    """Without a KL penalty its kind makes no difference."""
    supports = {"reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": ANY}
    no_penalty = replace(dense_candidate(SPECS["clipped_pg"], "logprobs"), supports=supports)
    result = run_cell(Cell(no_penalty, Layout(), "float32"), Settings())
    assert result.verdict is Verdict.AGREE, result.reasons
    assert "reference_policy_kl_type=k1 computed as k2, seen in its value" in result.record.equivalent
