# SPDX-License-Identifier: Apache-2.0
"""A tolerance says the same of a stack of results as of each result alone."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lossgate.judge.comparison import Comparison
from lossgate.judge.pooled_output import pool
from lossgate.judge.statistics import SCALE, Blocks
from lossgate.judge.tolerance import Tolerance
from lossgate.numerics.float_formats import FLOAT32
from lossgate.specs.outputs import LOGPROBS, LOSS, Output, gradient_output, metric_output

from .checks import rounds_to

UNIT = FLOAT32.unit
WEIGHT = gradient_output("weight", ("vocab", "hidden"))
BLOCKS = [
    Blocks("vocab row", 0, torch.arange(8), 8),
    Blocks("vocab tile", 0, torch.arange(8) // 3, 3),
    Blocks("vocab shard", 0, torch.arange(8) // 4, 2),
]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def infinite_in_places() -> Tensor:
    reference = normal(0, 12)
    reference[[2, 7]] = float("-inf")
    return reference


def zero_in_places() -> Tensor:
    reference = normal(1, 8, 5)
    reference[3] = 0
    return reference


REFERENCES: dict[str, tuple[Output, Tensor, list[Blocks]]] = {
    "scalar": (LOSS, torch.tensor(1.7, dtype=torch.float64), []),
    "vector": (LOGPROBS, infinite_in_places(), []),
    "matrix": (WEIGHT, zero_in_places(), BLOCKS),
    "zero": (WEIGHT, torch.zeros(8, 5, dtype=torch.float64), BLOCKS),
}


def tolerance_of(name: str) -> Tolerance:
    """Returns the tolerance of members that are off by float32 rounding."""
    output, reference, blocks = REFERENCES[name]
    finite = torch.where(reference.isfinite(), reference, 0.0)
    deviations = finite * UNIT * normal(2, 16, *reference.shape)
    return Tolerance(output, reference, deviations, **rounds_to(UNIT), blocks=blocks)


def results(reference: Tensor) -> list[Tensor]:
    """Returns right and wrong results."""
    finite = torch.where(reference.isfinite(), reference, 0.0)
    found = [reference.clone(), torch.zeros_like(reference)]
    for i, size in enumerate((0.1, 1, 3, 10, 30, 100, 1e6)):
        found.append(reference + finite * UNIT * size)
        found.append(reference + finite * UNIT * size * normal(10 + i, *reference.shape))
    entries = reference.numel()
    for i in range(0, entries, max(1, entries // 13)):
        for wrong in (1e-4, float("nan"), float("inf"), float("-inf")):
            changed = reference.clone()
            changed.view(-1)[i] = wrong if wrong != 1e-4 else changed.view(-1)[i] + wrong
            found.append(changed)
    if reference.dim() == 2:
        for rows in (slice(0, 1), slice(3, 6), slice(4, 8)):
            for size in (3, 30, 1e4):
                changed = reference.clone()
                changed[rows] *= 1 + size * UNIT
                found.append(changed)
    return found


@pytest.mark.parametrize("name", REFERENCES)
def test_a_stack_is_judged_as_each_of_its_results(name: str) -> None:
    tolerance, each = tolerance_of(name), results(REFERENCES[name][1])
    alone = [not tolerance.compare(result).agrees for result in each]
    assert tolerance.rejects(torch.stack(each)).tolist() == alone
    assert True in alone
    assert False in alone
    assert not alone[0]  # the reference itself


def test_one_block_that_is_off_is_rejected_in_a_stack_for_the_block_alone() -> None:
    """All other statistics are within their limits."""
    reference = normal(5, 64, 40)
    tiles = Blocks("vocab tile", 0, torch.arange(64) // 8, 8)
    deviations = reference * UNIT * normal(6, 16, 64, 40)
    tolerance = Tolerance(WEIGHT, reference, deviations, **rounds_to(UNIT), blocks=[tiles])
    off = reference.clone()
    off[16:24] *= 1 + 3 * UNIT
    comparison = tolerance.compare(off)
    assert {name for name, share in comparison.shares.items() if share > 1} == {"vocab tile"}
    assert comparison.where["vocab tile"] == "2"
    assert tolerance.rejects(torch.stack([reference, off])).tolist() == [False, True]


# The largest of many rounded numbers is larger than the largest of the numbers

SPREAD = 1e-3


def extremum(problem: int, *, bias: float = 0.0) -> Comparison:
    """Compares the maximum of rounded numbers with the maximum of the numbers.

    Args:
        problem: the number of the problem; the seed of the noise.
        bias: what the result is too large by, relative to it.
    """
    numbers = 1 + 1e-5 * normal(1000 + problem, 200)
    noise = SPREAD * normal(2000 + problem, 33, 200)
    largest = (numbers * (1 + noise)).amax(1)
    reference = numbers.max()
    tolerance = Tolerance(metric_output("max"), reference, largest[1:] - reference, **rounds_to(UNIT))
    return tolerance.compare(largest[0] * (1 + bias))


def test_the_mean_of_the_members_is_reported() -> None:
    found = [extremum(problem) for problem in range(10)]
    assert all(2 * SPREAD < comparison.mean < 4 * SPREAD for comparison in found)
    assert all(comparison.agrees for comparison in found)


def test_a_bias_that_rounding_makes_is_allowed_in_the_pool() -> None:
    pooled = pool(metric_output("max"), [extremum(problem) for problem in range(60)])
    assert pooled.scale > 2 * SPREAD
    assert pooled.agrees


@pytest.mark.parametrize("bias", [3 * SPREAD, -9 * SPREAD])
def test_a_bias_beyond_it_is_not(bias: float) -> None:
    assert not pool(metric_output("max"), [extremum(problem, bias=bias) for problem in range(60)]).agrees


def test_without_the_mean_of_the_members_the_pool_would_disagree() -> None:
    unaware = [replace(extremum(problem), mean=0.0, sd=SPREAD / 10) for problem in range(60)]
    assert unaware[0].values[SCALE] > 0
    assert not pool(metric_output("max"), unaware).agrees


def test_a_large_one_is_freed_as_soon_as_it_is_not_used() -> None:
    """It holds several times the memory of an lm-head, of which Python's search knows nothing."""
    reference = normal(3, 600, 512)
    tolerance = Tolerance(WEIGHT, reference, UNIT * normal(4, 4, 600, 512), **rounds_to(UNIT))
    assert tolerance.compare(reference).agrees
    alive = weakref.ref(tolerance)
    gc.disable()
    try:
        del tolerance
        assert alive() is None
    finally:
        gc.enable()
