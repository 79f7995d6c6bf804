# SPDX-License-Identifier: Apache-2.0
"""What a verdict advises mends it: so many problems as it says are enough, or none are."""

import re
from dataclasses import replace

import pytest

from lossgate import Layout
from lossgate.bank.right import KERNELS
from lossgate.engine.advice import to_detect
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.judge.pooled_scale import LARGEST_MDE, sigmas
from lossgate.judge.pooling import Pooled
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
    told = to_detect(pooled(sd=4e-3, rest=rest), 20)
    assert told.startswith("more problems hardly help, because of the rounding that Precision declares: compute or")
    assert "return loss in a finer dtype, and declare so" in told
    of_gradient = replace(pooled(sd=4e-3, rest=rest), output=gradient_output("hidden", ("token", "hidden")))
    assert "compute gradients in a finer dtype" in to_detect(of_gradient, 20)


def test_few_problems_tell_no_number() -> None:
    few = replace(pooled(problems=2), output=metric_output("clipped"))
    assert to_detect(few, 20) == "only 2 of 20 problems say something about it; raise --examples"
