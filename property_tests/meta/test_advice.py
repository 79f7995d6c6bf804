# SPDX-License-Identifier: Apache-2.0
"""What a verdict advises mends it: so many problems as it says are enough, or none are."""

import re
from dataclasses import replace
from math import inf

import pytest

from kernel_bank.right import KERNELS
from lossgate import ANY, Layout
from lossgate.adequacy.deck import Deck
from lossgate.adequacy.option_mutants import option_mutants
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.advice import to_compare, to_detect, to_kill, to_reach
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, Tried, Verdict, tried_on
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.judge.pooled_output import Pooled
from lossgate.judge.pooling import LARGEST_MDE, sigmas
from lossgate.losses import SPECS
from lossgate.specs.outputs import LOSS, gradient_output, metric_output

KERNEL = KERNELS["preference_rewards_by_softplus_low"]


def verified(examples: int) -> CellResult:
    return run_cell(Cell(KERNEL, Layout(), "bfloat16"), Settings(examples=examples, rounds=1))


def test_so_many_problems_as_are_advised_are_enough() -> None:
    found = (re.search(r"raise --examples to about (\d+)", reason) for reason in verified(8).reasons)
    advised = [int(number[1]) for number in found if number]
    assert advised
    assert 8 < max(advised) < 60
    assert not any("would not have been detected" in reason for reason in verified(max(advised)).reasons)


def pooled(scale: float = 0.0, sd: float = 1e-3, rest: float = 0.0, problems: int = 20) -> Pooled:
    return Pooled(LOSS, problems, scale, sd, rest + float(sigmas(problems)) * sd)


def test_the_noise_falls_with_the_root_of_the_number_of_problems() -> None:
    assert to_detect(pooled(sd=4e-3), 20) == "raise --examples to about 110"
    assert to_detect(pooled(sd=4e-3), 40) == "raise --examples to about 220"
    assert to_detect(pooled(sd=4e-3, rest=LARGEST_MDE / 2), 20) == "raise --examples to about 430"


@pytest.mark.parametrize("rest", [LARGEST_MDE, 0.9 * LARGEST_MDE])
def test_what_does_not_fall_is_told(rest: float) -> None:
    """The rounding of each result is left however many problems there are."""
    said = to_detect(pooled(sd=4e-3, rest=rest), 20)
    assert said.startswith("more problems hardly help, because of the rounding that Precision declares: compute or")
    assert "return loss in a finer dtype, and declare so" in said
    of_gradient = replace(pooled(sd=4e-3, rest=rest), output=gradient_output("hidden", ("token", "hidden")))
    assert "compute gradients in a finer dtype" in to_detect(of_gradient, 20)


def test_few_problems_tell_no_number() -> None:
    few = replace(pooled(problems=2), output=metric_output("clipped"))
    assert to_detect(few, 20) == "only 2 of 20 problems say something about it; raise --examples"


# Option mutants that survive


@pytest.mark.slow
def test_problems_that_are_advised_kill_mutants() -> None:
    """Whoever follows the advice gets there: each time it is for more problems, until they are
    enough.
    """
    given = [1]
    while (tried := run_cell(temperatures(1.05), Settings(examples=given[-1], rounds=1))).verdict is not Verdict.AGREE:
        said = [reason for reason in tried.reasons if reason.startswith("a kernel that computes")]
        found = [re.search(r"raise --examples to about (\d+), or drop", reason) for reason in said]
        advised = [int(one[1]) for one in found if one]
        assert len(advised) == len(said) > 0
        assert max(advised) > given[-1]
        given.append(max(advised))
    assert 1 < len(given) <= 5, given


def temperatures(other: float, dtype: str = "bfloat16", loss: str = "low_loss") -> Cell:
    """Returns a cell of a kernel of two temperatures, of which one is 1."""
    kernel = KERNELS[f"nll_logits_log_softmax_{loss}"]
    return Cell(replace(kernel, supports={**kernel.supports, "temperature": (1.0, other)}), Layout(), dtype)


def close(examples: int, dtype: str = "bfloat16", loss: str = "low_loss") -> list[str]:
    """Returns what is said of a kernel of two temperatures that are close."""
    reasons = run_cell(temperatures(1.01, dtype, loss), Settings(examples=examples)).reasons
    return [reason for reason in reasons if reason.startswith("a kernel that computes temperature=1.01 as 1.0")]


@pytest.mark.slow
def test_choices_that_rounding_hides_are_told() -> None:
    """Twice as many problems do not help, and a finer dtype does."""
    (said,) = close(40)
    assert re.search(
        r"; of \d\d problems with this choice, the one that came closest to showing the difference has a difference of "
        r"0.\d+, and rounding explains 0.\d+. More problems hardly help: compute in a finer dtype and declare so, or "
        r"drop temperature from supports$",
        said,
    )
    assert close(80)
    assert close(40, "float32", "float32") == []


def test_how_many_problems_are_enough_for_a_mutant() -> None:
    assert to_kill([Tried(5, 0.1, 0.2)], 20, "beta") == (
        "5 of 20 problems have this choice; raise --examples to about 80, or drop beta from supports"
    )
    assert to_kill([Tried(20, 0.2, 0.1)], 50, "beta") == (
        "20 of 50 problems have this choice; raise --examples to about 200, or drop beta from supports"
    )
    assert to_kill([Tried(1, 0.1, 0.2)], 200, "beta").startswith("none of 200 problems showed the difference, and")
    assert to_kill([Tried(30, 0.0, 0.2)], 50, "beta") == (
        "the two give the same results in all 30 problems with this choice; support values of other options with which "
        "they differ, or drop beta from supports"
    )


def test_what_a_mutant_changes_is_told_if_no_problem_tells_its_scale() -> None:
    """It does not look as if both choices gave the same."""
    kernel = dense_candidate(SPECS["nll"], "logprobs")
    mutants = [one for one in option_mutants(kernel).values() if one.option == "reduction" and one.side == "value"]
    bounds = [entry.bound for entry in Deck(kernel, "float32", 0).entries]
    found = tried_on(mutants, [(bound, CaseResult(problem=bound.problem)) for bound in bounds])
    assert [(one.closest, one.change > 0) for one in found.values()] == [(0.0, True)] * len(mutants)
    assert to_kill([Tried(20, 0.5, inf)], 20, "reduction") == (
        "of 20 problems with this choice, the one that came closest to showing the difference has a difference of 0.5, "
        "and rounding explains any difference. More problems hardly help: compute in a finer dtype and declare so, or "
        "drop reduction from supports"
    )


# Outputs that are zero, and goals


@pytest.mark.slow
def test_an_output_that_is_always_zero_needs_another_choice() -> None:
    """The label's log-probability is 0 if only the largest is kept."""
    kernel = dense_candidate(SPECS["token_logprobs"], "logits")
    alone = run_cell(Cell(replace(kernel, supports={"top_k": 1}), Layout(), "float32"), Settings(rounds=1))
    assert (
        "logprobs: it was zero in every problem, so its scale was never compared; more problems "
        f"than these {len(alone.cases)} hardly help: support a choice with which it is not zero"
    ) in alone.reasons
    both = run_cell(Cell(replace(kernel, supports={"top_k": ANY}), Layout(), "float32"), Settings())
    assert both.verdict is Verdict.AGREE, both.reasons
    assert to_compare(19) == "raise --examples to 20"


@pytest.mark.slow
def test_rounds_draw_what_reaches_a_goal() -> None:
    kernel = dense_candidate(SPECS["nll"], "logits")
    one, four = (
        run_cell(Cell(kernel, Layout(tp=3), "float32"), Settings(examples=8, rounds=rounds)) for rounds in (1, 4)
    )
    advice = "no problem was drawn for it; set rounds to 4 or more"
    assert [reason.partition("; ")[2] for reason in one.reasons if "goal 'shard" in reason] == [advice, advice]
    assert four.verdict is Verdict.AGREE, four.reasons


def test_a_goal_that_no_problem_drawn_for_it_reaches_needs_something_else() -> None:
    assert to_reach(1280) == "none of 1,280 problems that were drawn for it reaches it, and more hardly help"
