# SPDX-License-Identifier: Apache-2.0
"""Pooling: over many problems the judge sees a bias that is too small for a single comparison.

Rounding that hits a whole result alike is no bias.
"""

import random
from dataclasses import replace

import pytest

from lossgate.judge.comparison import Comparison
from lossgate.judge.explain import explain_pooled
from lossgate.judge.pooled_output import Pooled, pool
from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import gradient_output

OUTPUT = gradient_output("weight", ("vocab", "hidden"))
BFLOAT16 = 2.0**-8


def comparisons(
    bias: float, sd: float, alike: float = 0.0, count: int = 100, seed: int = 0, unit: float = BFLOAT16
) -> list[Comparison]:
    """Returns comparisons of which only the SCALE matters.

    Args:
        bias: what all SCALEs are off by.
        sd: standard deviation of the noise that the ensemble knows.
        alike: largest rounding of a whole result, which the ensemble does not know.
        count: the number of problems.
        seed: of the noise.
        unit: unit roundoff of the output.
    """
    random_ = random.Random(seed)
    scales = [bias + random_.gauss(0, sd) + random_.uniform(-alike, alike) for _ in range(count)]
    return [Comparison(output=OUTPUT, values={SCALE: scale}, limits={SCALE: 0.5}, sd=sd, unit=unit) for scale in scales]


def pooled(given: list[Comparison]) -> Pooled:
    return pool(OUTPUT, given)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alike", [0.0, 2e-3])
def test_without_a_bias_the_pool_agrees(seed: int, alike: float) -> None:
    assert pooled(comparisons(0.0, 2e-4, alike, seed=seed)).agrees


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sign", [1, -1])
def test_a_tenth_of_a_percent_is_seen_over_a_hundred_problems(seed: int, sign: int) -> None:
    found = pooled(comparisons(sign * 1e-3, 2e-4, seed=seed))
    assert not found.agrees
    assert found.limit < 1e-3


def test_the_minimum_detectable_effect_is_what_it_says() -> None:
    clean = pooled(comparisons(0.0, 1e-3))
    assert not pooled(comparisons(1.01 * clean.mde, 1e-3)).agrees
    assert not pooled(comparisons(-1.01 * clean.mde, 1e-3)).agrees


def test_more_problems_see_smaller_biases() -> None:
    few, many = (pooled(comparisons(0.0, 2e-3, count=count)) for count in (10, 400))
    assert many.mde < 0.5 * few.mde


def test_rounding_that_hits_a_whole_result_alike_widens_the_limit() -> None:
    """In a single problem it looks like a bias.

    Over many problems it is scatter that the ensemble does not explain.
    """
    assert pooled(comparisons(0.0, 1e-4, alike=3e-3)).limit > 3 * pooled(comparisons(0.0, 1e-4)).limit


def test_noisy_problems_count_little() -> None:
    noisy = comparisons(0.5, 0.5, count=10)
    assert pooled([*comparisons(0.0, 1e-4), *noisy]).limit < 2 * pooled(comparisons(0.0, 1e-4)).limit


def test_errors_of_exp_and_log_in_float32_are_no_bias() -> None:
    """Approximations are off by that much, however sharply a great many problems would show it."""
    assert pooled(comparisons(2**-25, 1e-12, unit=2**-24)).agrees
    assert not pooled(comparisons(2**-23, 1e-12, unit=2**-24)).agrees


def test_a_single_problem_is_judged_by_its_own_limit() -> None:
    """Rounding may have hit all of its result alike, and no other problem can show that."""
    (alone,) = comparisons(3e-3, 1e-6, count=1)
    assert pooled([replace(alone, limits={SCALE: 4e-3})]).agrees
    assert not pooled([replace(alone, limits={SCALE: 2e-3})]).agrees


def test_few_problems_see_only_larger_biases() -> None:
    assert pooled(comparisons(0.0, 1e-3, count=3)).limit > 3 * pooled(comparisons(0.0, 1e-3, count=30)).limit


def test_a_pool_of_nothing_sees_nothing() -> None:
    empty = pooled([Comparison(output=OUTPUT, vacuous=True), Comparison(output=OUTPUT, faults=("missing",))])
    assert (empty.problems, empty.mde, empty.agrees) == (0, float("inf"), True)


def test_a_pooled_disagreement_in_words() -> None:
    (words,) = explain_pooled(pooled(comparisons(2e-3, 1e-4)))
    assert words.startswith("grad of weight: pooled over 100 problems, it is 1.00")
    assert "rounding explains 1 +- 0.00012" in words
