# SPDX-License-Identifier: Apache-2.0
"""The ensemble: its members are unbiased, repeatable, and as noisy as kernels are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_bank.cross_entropy import STYLES, Style, make
from lossgate import Candidate, Contract, Precision, Problem
from lossgate.judge.ensemble import stages_of
from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.noise import Noise
from lossgate.numerics.rounded_arithmetic import RoundedRun

from .checks import ALL_STYLES, IDS, bind, make_problem, members_of, noise_of, reference_of


def off_by(output: str, problem: Problem, kernel: Candidate, members: int = 16) -> Tensor:
    """Returns what the members are off by."""
    return members_of(kernel, problem, members)[output] - reference_of(problem)[output]


@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES, ids=IDS)
def test_members_scatter_about_the_reference(dtype: str, style: Style) -> None:
    """The mean over many members is far closer to the reference than any of them."""
    problem = make_problem(dtype)
    reference, members = reference_of(problem), members_of(make(style), problem, 256)
    mask = bind(problem).batch.fields["mask"]
    for output, member in members.items():
        deviations = member - reference[output]
        if output.startswith("vocab") or output.endswith(("min", "max")):
            continue  # an extremum of noisy numbers is biased, in kernels as here
        if output == "logprobs":
            deviations = deviations[:, mask]
        typical = deviations.square().mean().sqrt()
        assert deviations.mean(0).square().mean().sqrt() < 0.25 * typical, output
        assert typical > 0


def test_members_are_the_same_for_the_same_problem() -> None:
    """With another seed they have other noise."""
    problem, kernel = make_problem("bfloat16"), make(STYLES["bfloat16"][3])
    bound = bind(problem)
    one, again, other = (noise_of(kernel, problem, bound, seed) for seed in ("1", "1", "2"))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["grad of hidden"], other["grad of hidden"])


@pytest.mark.parametrize(
    ("stages", "output"),
    [
        ({"logits": "bfloat16"}, "logprobs"),
        ({"logsumexp": "bfloat16"}, "logprobs"),
        ({"logprobs": "bfloat16"}, "grad of hidden"),
        ({"dlogits": "bfloat16"}, "grad of weight"),
        ({"accumulate": "bfloat16", "chunk": 4}, "grad of weight"),
        ({"accumulate": "float16", "chunk": 4}, "grad of weight"),
        ({"reduce": "bfloat16"}, "grad of hidden"),
        ({"loss": "bfloat16"}, "loss"),
        ({"grads_in_forward": True}, "grad of weight in bfloat16"),
    ],
    ids=str,
)
def test_coarser_stages_make_more_noise(stages: dict[str, object], output: str) -> None:
    """Every field of ``Precision`` counts."""
    output, _, dtype = output.partition(" in ")
    problem = make_problem(dtype or "float32", "tp=4")

    def noise(precision: Precision) -> float:
        kernel = replace(make(STYLES["float32"][1]), precision={problem.dtype: precision})
        return float(off_by(output, problem, kernel).square().mean().sqrt())

    assert noise(Precision(**stages)) > 1.05 * noise(Precision())  # type: ignore[arg-type]


def test_a_rounded_temperature_errs_alike_on_all_tokens() -> None:
    """A kernel holds 1 / 0.75 in float32.

    What errs for each token alone averages out over 400 of them.
    """

    def relative_error_of_the_sum(temperature: float) -> float:
        changes = {"lengths": (400,), "masks": ("all",), "vocab": 8, "logit_std": 30.0}
        problem = make_problem("float32", **changes, options={"temperature": temperature})
        reference = reference_of(problem)["logprobs"]
        off = off_by("logprobs", problem, make(STYLES["float32"][1]), 32).sum(1) / reference.sum()
        return float(off.square().mean().sqrt())

    assert relative_error_of_the_sum(0.75) > 0.4 * FLOAT32.unit
    assert relative_error_of_the_sum(1.0) < 0.2 * FLOAT32.unit


def test_parts_that_the_caller_adds_are_rounded_to_the_dtype_in_which_they_are_returned() -> None:
    reduces = make(STYLES["bfloat16"][0])
    caller_reduces = replace(reduces, contract=Contract(grads={"hidden": {"tp": "sum"}}))
    problem = make_problem("bfloat16", "tp=4")
    own, callers = (
        float(off_by("grad of hidden", problem, kernel).square().mean()) for kernel in (reduces, caller_reduces)
    )
    assert callers > 2 * own


@pytest.mark.parametrize(
    ("logit", "roundings"),
    [
        (-1.0, 1.0),  # errors of lse and of p cancel, and those of the two numbers that are subtracted are left
        (128.0, 1000.0),  # errors of lse make p err, which the logit multiplies
    ],
)
def test_entropy_is_as_noisy_as_a_kernel_that_subtracts_the_mean_logit_from_lse(logit: float, roundings: float) -> None:
    """With a vocabulary of one row both are the logit, and all of it cancels."""
    problem = make_problem(
        "float32", head="logits", lengths=(2,), masks=("all",), vocab=1, outliers=((0, 0, logit),), options={}
    )
    kernel = replace(make(STYLES["float32"][1]), head="logits")
    variance_of_one = (logit * FLOAT32.unit) ** 2 * 2 / 3
    assert float(off_by("entropy", problem, kernel, 1000).square().mean()) > roundings * variance_of_one


def test_terms_below_the_spacing_of_a_sum_over_the_vocabulary_are_lost_together() -> None:
    """Added one by one in float32, nothing is left of them, and that does not average out."""
    dlogits, weight = torch.full((1, 20_000), 2e-7), 1 + 0.1 * torch.linspace(-1, 1, 60_000).sin().reshape(-1, 3)
    dlogits[0, 0], weight[0] = -0.2, 50.0
    exact = dlogits.double() @ weight.double()
    one_by_one = np.cumsum((dlogits.T * weight).numpy(), 0)[-1]
    error = (torch.from_numpy(one_by_one) - exact).abs().mean()

    def noise(product: str) -> Tensor:
        run = RoundedRun(Noise(0), 32, stages_of(make(STYLES["float32"][0]), "float32"))
        found = getattr(run, product)(dlogits.double().expand(32, 1, -1), weight.double())
        return (found - exact).square().mean().sqrt()

    assert error / 3 < noise("matmul_over_vocab") < 3 * error
    assert noise("matmul") < error / 3
