# SPDX-License-Identifier: Apache-2.0
"""Pooling: a bias too small for one comparison is seen over many, and rounding that hits a whole result alike is not one."""

import random
from dataclasses import replace

import pytest

from lossgate.judge.comparison import Comparison
from lossgate.judge.explain import explain_pooled
from lossgate.judge.pooling import pool
from lossgate.judge.statistics import SCALE

BFLOAT16 = 2.0**-8


def comparisons(
    bias: float, sd: float, alike: float = 0.0, count: int = 100, seed: int = 0, unit: float = BFLOAT16
) -> list[Comparison]:
    """SCALEs with a bias, noise of ``sd`` that the ensemble knows of, and rounding of up to ``alike`` that it does not."""
    random_ = random.Random(seed)
    scales = [bias + random_.gauss(0, sd) + random_.uniform(-alike, alike) for _ in range(count)]
    return [Comparison(output="x", values={SCALE: scale}, limits={SCALE: 1.0}, sd=sd, unit=unit) for scale in scales]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alike", [0.0, 2e-3])
def test_no_bias_no_alarm(seed: int, alike: float) -> None:
    assert pool("x", comparisons(0.0, 2e-4, alike, seed=seed)).agrees


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sign", [1, -1])
def test_a_tenth_of_a_percent_is_seen_over_a_hundred_problems(seed: int, sign: int) -> None:
    pooled = pool("x", comparisons(sign * 1e-3, 2e-4, seed=seed))
    assert not pooled.agrees
    assert pooled.limit < 1e-3


def test_the_mde_is_what_it_says() -> None:
    clean = pool("x", comparisons(0.0, 1e-3))
    assert not pool("x", comparisons(1.01 * clean.mde, 1e-3)).agrees
    assert not pool("x", comparisons(-1.01 * clean.mde, 1e-3)).agrees


def test_more_problems_see_more() -> None:
    few, many = (pool("x", comparisons(0.0, 2e-3, count=count)) for count in (10, 400))
    assert many.mde < 0.5 * few.mde


def test_rounding_that_hits_all_alike_widens_the_limit() -> None:
    """It can't be told from a bias in one problem; over many it shows as scatter beyond the ensemble's."""
    assert pool("x", comparisons(0.0, 1e-4, alike=3e-3)).limit > 3 * pool("x", comparisons(0.0, 1e-4)).limit


def test_noisy_problems_count_little() -> None:
    noisy = comparisons(0.5, 0.5, count=10)
    assert pool("x", [*comparisons(0.0, 1e-4), *noisy]).limit < 2 * pool("x", comparisons(0.0, 1e-4)).limit


def test_what_approximations_of_exp_and_log_in_float32_are_off_by_is_no_bias() -> None:
    """However sharply a great many problems would show it."""
    assert pool("x", comparisons(2**-25, 1e-12, unit=2**-24)).agrees
    assert not pool("x", comparisons(2**-23, 1e-12, unit=2**-24)).agrees


def test_a_single_problem_is_judged_by_its_own_limit() -> None:
    """Its rounding may have hit all of it alike, and there is no other problem to tell."""
    (alone,) = comparisons(3e-3, 1e-6, count=1)
    assert pool("x", [replace(alone, limits={SCALE: 4e-3})]).agrees
    assert not pool("x", [replace(alone, limits={SCALE: 2e-3})]).agrees


def test_few_problems_see_less() -> None:
    assert pool("x", comparisons(0.0, 1e-3, count=3)).limit > 3 * pool("x", comparisons(0.0, 1e-3, count=30)).limit


def test_nothing_to_pool_sees_nothing() -> None:
    empty = pool("x", [Comparison(output="x", vacuous=True), Comparison(output="x", faults=("missing",))])
    assert (empty.problems, empty.mde, empty.agrees) == (0, float("inf"), True)


def test_in_words() -> None:
    pooled = pool("grad of weight", comparisons(2e-3, 1e-4))
    assert explain_pooled(pooled).startswith("grad of weight: over 100 problems together 1.00")
    assert "where rounding explains 1 +- 0.00012" in explain_pooled(pooled)
