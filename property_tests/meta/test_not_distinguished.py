# SPDX-License-Identifier: Apache-2.0
"""A verdict names the choices of options that no problem distinguished."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kernel_bank.bugs import ignores
from lossgate import ANY, Candidate, Layout, Precision
from lossgate.adequacy.option_mutants import OptionMutant, near_mutants, not_distinguished
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.reports.describe import NOT_DISTINGUISHED, print_remarks, remark_lines
from lossgate.specs.option import Option

EPSILON = "epsilon 0.0 and 1e-08"


def supporting(spec: str = "nll", **supports: Any) -> Candidate:
    return replace(dense_candidate(SPECS[spec], "logprobs"), supports=supports)


def ignoring_epsilon(kernel: Candidate) -> Candidate:
    return ignores(kernel.spec.supported_options["epsilon"], kernel.spec).put_into(kernel)


def verified(kernel: Candidate, dtype: str = "float32") -> CellResult:
    return run_cell(Cell(kernel, Layout(), dtype), Settings())


@pytest.mark.parametrize("values", [(0.0, 1e-8), (1e-8, 0.0), 1e-8])
def test_a_kernel_that_ignores_an_epsilon_agrees_and_the_verdict_says_so(values: Any) -> None:
    result = verified(ignoring_epsilon(supporting(epsilon=values)))
    assert result.verdict is Verdict.AGREE, result.reasons
    assert [set(line.removeprefix("epsilon ").split(" and ")) for line in result.record.not_distinguished] == [
        {"0.0", "1e-08"}
    ]


@pytest.mark.slow
def test_choices_that_problems_distinguished_are_not_named() -> None:
    """They are nearer than need be distinguished, and float32 tells them apart nevertheless."""
    right = supporting(epsilon=(0.0, 5e-4))
    assert near_mutants(right)
    assert verified(right).record.not_distinguished == ()
    assert verified(ignoring_epsilon(right)).verdict is Verdict.DISAGREE
    rounding = Precision(loss="bfloat16", returned="float32")
    coarse = replace(right, dtypes=("bfloat16",), precision={"bfloat16": rounding})
    assert verified(coarse, "bfloat16").record.not_distinguished == ("epsilon 0.0 and 0.0005",)


def test_a_disagreement_names_none() -> None:
    """It ends the search before all choices could be distinguished."""
    assert verified(ignoring_epsilon(supporting(epsilon=(0.0, 1e-8, 0.5)))).record.not_distinguished == ()


def test_options_that_a_kernel_does_not_name_are_left_out() -> None:
    assert verified(supporting()).record.not_distinguished == ()


@pytest.mark.slow
def test_choices_that_give_the_same_are_named() -> None:
    """Without a KL penalty its kind makes no difference."""
    no_penalty = supporting("clipped_pg", reference_policy_kl_penalty=0.0, reference_policy_kl_type=("k1", "k2", "k3"))
    result = verified(no_penalty)
    assert result.verdict is Verdict.AGREE, result.reasons
    assert result.record.not_distinguished == ("reference_policy_kl_type k1, k2 and k3",)


@pytest.mark.slow
def test_choices_that_are_never_valid_together_with_the_others_are_left_out() -> None:
    """No kernel can compute a dual clip with CISPO, so no kernel takes one for the other."""
    result = verified(supporting("clipped_pg", ratio_clip_c=3.0, use_cispo=False))
    assert "use_cispo=False computed as True, seen in its value" in result.record.equivalent
    assert result.record.not_distinguished == ()


@pytest.mark.slow
def test_near_choices_of_which_one_is_never_valid_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compared them, and no kernel can take one for the other."""
    right = supporting(epsilon=(0.0, 1e-8))
    assert verified(right).record.not_distinguished
    monkeypatch.setattr(OptionMutant, "mutate", lambda mutant, bound: None)
    assert verified(right).record.not_distinguished == ()


def numbers(**interval: Any) -> Candidate:
    """Returns a kernel of a spec with one option whose numbers are drawn between two."""
    spec = replace(SPECS["nll"], options=(Option(name="epsilon", meaning="m", default=0.0, **interval),))
    return replace(supporting(epsilon=ANY), spec=spec)


def test_numbers_of_an_interval_are_near_if_the_farthest_is() -> None:
    assert near_mutants(numbers(interval=(0.0, 1e-4)))
    assert not near_mutants(numbers(interval=(0.0, 1e-2)))


def test_only_choices_of_which_each_two_are_alike_stand_together() -> None:
    found = near_mutants(supporting(epsilon=(0.0, 8e-4, 16e-4)))
    pairs = not_distinguished(supporting(epsilon=(0.0, 8e-4, 16e-4)), found.values(), found)
    assert pairs == ("epsilon 0.0 and 0.0008", "epsilon 0.0008 and 0.0016")


def test_the_same_choices_of_many_cells_are_told_once() -> None:
    cells = [(name, (EPSILON, "mode a and b")[: 1 + (name == "two")]) for name in ("one", "two", "two", "three")]
    assert remark_lines(NOT_DISTINGUISHED, cells) == [
        NOT_DISTINGUISHED,
        f"  {EPSILON}: 4 cells of one, two and three",
        "  mode a and b: 2 cells of two",
    ]
    assert (
        remark_lines(NOT_DISTINGUISHED, [*cells, ("four", (EPSILON,))])[1]
        == f"  {EPSILON}: 5 cells of one, two, three and 1 more"
    )
    assert remark_lines(NOT_DISTINGUISHED, [("one", ())]) == []


def test_they_stand_below_the_table() -> None:
    result = verified(supporting(epsilon=(0.0, 1e-8)))
    text = StringIO()
    print_remarks(Console(file=text, width=200, highlight=False), [result.record])
    assert text.getvalue() == f"{NOT_DISTINGUISHED}\n  {EPSILON}: 1 cell of {result.cell.candidate.name}\n\n"
