# SPDX-License-Identifier: Apache-2.0
"""What the judge says about itself: the smallest error that it sees, and what it cannot see."""

import pytest
import torch
from torch import Tensor

from kernel_bank.cross_entropy import STYLES, make
from lossgate import Problem
from lossgate.dense_candidates import dense_candidate
from lossgate.judge import tolerance
from lossgate.judge.comparison import Comparison
from lossgate.judge.statistics import SCALE, Blocks
from lossgate.losses import SPECS
from lossgate.specs.outputs import metric_output

from .checks import MakeWorld, compare, make_problem, rounds_to, run


def test_the_minimum_detectable_effect_is_what_it_says() -> None:
    """A result that is scaled by a little more than the effect is rejected, up and down.

    One that is scaled by a little less is accepted in at least one of the two directions.
    """
    reference = torch.randn(30, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = 1e-3 * torch.randn(9, 30, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * reference
    members, result = reference + noise[:8], reference + noise[8]

    def judged(k: Tensor) -> Comparison:
        return compare(metric_output("x"), k, reference, members, **rounds_to(2**-24))

    mde = judged(result).mde
    for sign in (1, -1):
        assert not judged(result * (1 + sign * 1.01 * mde)).agrees
    assert any(judged(result * (1 + sign * 0.9 * mde)).shares[SCALE] < 1 for sign in (1, -1))


def test_planted_errors_are_seen(make_world: MakeWorld) -> None:
    for comparison in run(make(STYLES["bfloat16"][0]), make_problem("bfloat16"), make_world("single")).comparisons:
        assert comparison.rejected["x1.01"]
        assert comparison.rejected["x0.99"]
        assert comparison.rejected["zero"]
        assert all(comparison.rejected.values())
        assert not comparison.blind


def test_planted_errors_are_what_they_are_called() -> None:
    k = torch.arange(12.0, dtype=torch.float64).view(4, 3) + 1
    rows = Blocks("token", 0, torch.arange(4), 4)
    tiles = Blocks("vocab tile", 1, torch.tensor([0, 0, 1]), 2)
    planted = {name: error.put(k, slice(None)) for name, error in tolerance.plant(k, [rows, tiles]).items()}
    assert set(planted) == set(tolerance.PLANTED)
    assert torch.equal(planted["x1.01"], 1.01 * k)
    assert torch.equal(planted["x0.99"], 0.99 * k)
    assert not planted["zero"].any()
    assert planted["token dropped"].sum(1).tolist() == [6, 15, 0, 33]
    assert planted["vocab tile dropped"].tolist()[0] == [0, 0, 3]


def test_a_judge_that_is_blind_says_so(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a limit were too wide for what it claims, the planted errors would show it."""
    assert tolerance.blind_spots({"x1.01": 0.01}, {"x1.01": False}, 0.0, 0.004) == ("x1.01",)
    assert tolerance.blind_spots({"x1.01": 0.01}, {"x1.01": True}, 0.0, 0.004) == ()
    assert tolerance.blind_spots({"x1.01": 0.01}, {"x1.01": False}, 0.0, 0.02) == ()
    right = tolerance.blind_spots

    def blind(scales: dict[str, float], rejected: dict[str, bool], scale: float, limit: float) -> tuple[str, ...]:
        return right(scales, dict.fromkeys(rejected, False), scale, limit)

    monkeypatch.setattr(tolerance, "blind_spots", blind)
    result = run(make(STYLES["bfloat16"][0]), make_problem("bfloat16"), make_world("single"))
    assert any(comparison.blind for comparison in result.comparisons)


def test_a_comparison_without_a_reference_is_vacuous() -> None:
    zero = torch.zeros(3, 2, dtype=torch.float64)

    def judged(result: Tensor) -> Comparison:
        return compare(metric_output("x"), result, zero, zero.expand(8, 3, 2), **rounds_to(2**-8))

    assert judged(zero).vacuous
    assert judged(zero).mde == float("inf")
    assert not judged(zero + 1e-9).agrees


def test_a_reference_far_below_its_noise_is_vacuous() -> None:
    """Its square is zero even in float64, so that no error in its scale could show."""
    reference = torch.full((3, 2), 1e-170, dtype=torch.float64)
    members = torch.randn(9, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {**rounds_to(2**-24), "blocks": [Blocks("token", 0, torch.arange(3), 3)]}
    judged = compare(metric_output("x"), members[0], reference, members[1:], **given)
    assert judged.vacuous
    assert judged.mde == float("inf")


def test_a_gradient_whose_squares_underflow_is_judged(make_world: MakeWorld) -> None:
    """The probability that is left beside logits of 300 and -300 is 1e-261."""
    spikes = ((0, 0, 300.0), (0, 1, -300.0), (1, 0, 300.0), (1, 1, -300.0))
    sizes = {"lengths": (2,), "masks": ("all",), "hidden": 1, "vocab": 2, "forced_labels": ((0, 0), (1, 0))}
    problem = Problem(spec="nll", head="logits", dtype="float32", outliers=spikes, **sizes)
    found = run(dense_candidate(SPECS["nll"], "logits"), problem, make_world("single"))
    assert found.agrees, found.findings
