# SPDX-License-Identifier: Apache-2.0
"""The statistics: each of them can fail, and their limits come from the members."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lossgate.judge.comparison import Comparison
from lossgate.judge.limits import NoiseModel
from lossgate.judge.statistics import NOISE, SCALE, WORST
from lossgate.specs.outputs import metric_output

from .checks import MakeWorld, compare, judge_changed, make_problem, rounds_to


def with_noise(gradient: Tensor) -> Tensor:
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=gradient.dtype)
    return gradient + 3e-2 * gradient.abs().mean() * noise


@pytest.mark.parametrize(
    ("statistic", "wrong"),
    [
        (SCALE, lambda k: k * 1.01),
        (NOISE, with_noise),
        (WORST, lambda k: k.index_put((torch.tensor(3), torch.tensor(5)), k.abs().max())),
        ("token", lambda k: k.index_copy(0, torch.tensor([5]), 1.05 * k[5:6])),
        ("sequence", lambda k: torch.cat([k[:40], 1.02 * k[40:]])),
    ],
    ids=[SCALE, NOISE, WORST, "token", "sequence"],
)
def test_each_statistic_can_fail(make_world: MakeWorld, statistic: str, wrong: Callable[[Tensor], Tensor]) -> None:
    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs["grad of hidden"] = wrong(outputs["grad of hidden"])

    problem, world = make_problem("bfloat16"), make_world("single")
    assert judge_changed(problem, world, lambda _: None)["grad of hidden"].agrees
    assert judge_changed(problem, world, spoil)["grad of hidden"].shares[statistic] > 1


def test_one_entry_may_be_three_times_as_far_off_as_the_worst_of_the_members() -> None:
    reference = torch.ones(30, 20, dtype=torch.float64)
    noise = 1e-3 * torch.randn(12, 30, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def judged(times: float) -> Comparison:
        wrong = reference.clone()
        wrong[7, 4] += times * noise.abs().max()
        return compare(metric_output("x"), wrong, reference, reference + noise, **rounds_to(2**-24))

    assert judged(2.5).agrees
    assert [name for name, share in judged(3.5).shares.items() if share > 1] == [WORST]
    assert judged(3.5).where[WORST] == "7, 4"


def test_no_member_is_judged_by_noise_that_it_helped_to_make() -> None:
    reference = torch.ones(6, 5, dtype=torch.float64)
    deviations = 1e-3 * torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rounding(rows: slice) -> Tensor:
        return 2**-24 * reference[rows]

    found = NoiseModel(reference, deviations, rounding).precision_without_each(slice(None))
    for i in range(4):
        others = torch.cat([deviations[:i], deviations[i + 1 :]])
        assert torch.allclose(found[i], NoiseModel(reference, others, rounding).precision(slice(None))[0], rtol=1e-12)
