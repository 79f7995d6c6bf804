# SPDX-License-Identifier: Apache-2.0
"""Pooling: over many problems the judge sees noise that is too small for a single comparison."""

import re
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

import lossgate
from kernel_bank.right import KERNELS
from lossgate import ANY, Candidate, Layout, Outputs, Precision
from lossgate.cases.placement import sample_problems
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.evidence.redo import redo
from lossgate.inputs import NllLogprobs
from lossgate.judge.comparison import Comparison
from lossgate.judge.explain import explain_pooled, explain_pooled_difference
from lossgate.judge.pooled_output import Pooled, pool
from lossgate.judge.pooling import FEWEST, pool_noise, pool_noises
from lossgate.judge.statistics import SCALE
from lossgate.options import NllOptions
from lossgate.specs.outputs import LOSS, Output
from lossgate.worlds import SimulatedWorld

from .checks import MakeWorld, run

SUMS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def loss_of_sums_in(dtype: str) -> Candidate:
    """Returns a kernel that returns a loss in bfloat16, which it adds up in a dtype."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, terms: Tensor) -> Tensor:
            ctx.shape, total = terms.shape, torch.zeros((), dtype=SUMS[dtype])
            for term in terms:
                total = total + term.to(SUMS[dtype])
            return total.float()

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:  # type: ignore[override]
            return upstream.expand(ctx.shape)

    def kernel(inputs: NllLogprobs, options: NllOptions, mesh: object) -> Outputs:
        total = Sum.apply(-torch.where(inputs.mask, inputs.logprobs.float(), 0.0))
        mean = total / inputs.valid_tokens.clamp(min=1)
        return Outputs(loss=(total if options.reduction == "sum" else mean).bfloat16())

    declare = lossgate.candidate(
        "nll",
        head="logprobs",
        dtypes=("bfloat16",),
        precision=Precision(returned="bfloat16"),
        supports={"reduction": ANY},
        name=f"sums in {dtype}",
    )
    return declare(kernel)


def undeclared(name: str, **changes: Any) -> Candidate:
    """Returns a right kernel of the bank that declares less than it does."""
    right = KERNELS[name]
    return replace(right, precision={"bfloat16": replace(right.precision["bfloat16"], **changes)})


MISTAKES = {
    "a scalar added up in bfloat16": (loss_of_sums_in("bfloat16"), "loss"),
    "gradients rounded twice": (
        undeclared("nll_logits_in_forward_rounded_float32", grads_in_forward=False),
        "grad of logits",
    ),
    "dW added up in bfloat16": (
        undeclared("nll_hidden_chunked_float32", accumulate="float32", chunk=None),
        "grad of weight",
    ),
}
RIGHT = [
    loss_of_sums_in("float32"),
    *(KERNELS[f"nll_{name}"] for name in ("logits_in_forward_rounded_float32", "hidden_chunked_float32")),
]


def pooled_where_it_agrees(kernel: Candidate, world: SimulatedWorld) -> dict[str, Pooled]:
    """Pools the outputs of a kernel over the problems in which nothing is wrong with it."""
    cases = [run(kernel, problem, world) for problem in sample_problems(kernel, Layout(), "bfloat16", 30, 7)]
    found: dict[Output, list[Comparison]] = {}
    for comparison in (c for case in cases if case.agrees for c in case.comparisons):
        found.setdefault(comparison.output, []).append(comparison)
    return {str(output): pool(output, of_output) for output, of_output in found.items()}


@pytest.mark.parametrize(("kernel", "output"), MISTAKES.values(), ids=[*MISTAKES])
def test_mistakes_that_single_problems_do_not_show_disagree_over_many(
    make_world: MakeWorld, kernel: Candidate, output: str
) -> None:
    pooled = pooled_where_it_agrees(kernel, make_world("single"))[output]
    assert pooled.scale_agrees
    assert not pooled.agrees
    assert pooled.noise is not None
    assert pooled.noise.noise > pooled.noise.limit


@pytest.mark.parametrize("kernel", RIGHT, ids=lambda kernel: kernel.name)
def test_right_kernels_agree_with_margin(make_world: MakeWorld, kernel: Candidate) -> None:
    for pooled in pooled_where_it_agrees(kernel, make_world("single")).values():
        assert pooled.agrees
        assert pooled.noise is None or pooled.noise.noise < 0.9 * pooled.noise.limit


def test_a_cell_disagrees_and_its_evidence_says_so() -> None:
    kernel, output = MISTAKES["gradients rounded twice"]
    found = run_cell(Cell(kernel, Layout(), "bfloat16"), Settings(examples=20))
    assert found.verdict is Verdict.DISAGREE
    assert found.failure is None
    (reason,) = found.reasons
    said = (
        rf"{output}: pooled over \d+ problems, the errors are 1\.\d+ times the most that the declared precision "
        r"explains; the limit is 1\.\d+ times\. Add the gradient up in float32 and round it once; or declare in "
        r"Precision how the kernel rounds, for example by accumulate= or grads_in_forward="
    )
    assert re.fullmatch(said, reason)
    (redone,) = redo([found.record])
    assert (redone.verdict, found.record.symptoms, redone.contradiction) == ("DISAGREE", (output,), "")


def test_scalars_of_a_loss_in_bfloat16_are_not_pooled(make_world: MakeWorld) -> None:
    """It may add them up one by one, which its declaration does not say. Gradients are pooled."""
    kernel = replace(loss_of_sums_in("bfloat16"), precision={"bfloat16": Precision(loss="bfloat16")})
    pooled = pooled_where_it_agrees(kernel, make_world("single"))
    assert pooled["loss"].noise is None
    assert pooled["loss"].problems >= FEWEST
    assert pooled["grad of logprobs"].noise is not None


# The arithmetic


def test_a_quarter_of_the_problems_must_be_noisy() -> None:
    """Some problems are noisy in right kernels, too: those whose numbers are alike."""
    few, many = (pool_noise([2.5] * noisy + [0.9] * (20 - noisy)) for noisy in (5, 6))
    assert few is not None
    assert few.agrees
    assert many is not None
    assert not many.agrees
    assert (many.problems, many.noise) == (20, 2.5)


def test_few_problems_say_nothing_and_more_are_sharper() -> None:
    assert pool_noise([9.0] * (FEWEST - 1)) is None
    limits = [found.limit for n in (8, 20, 200) if (found := pool_noise([1.0] * n)) is not None]
    assert limits == pytest.approx([1.35, 1.2, 1.11])


def test_many_pools_are_those_of_each() -> None:
    pools = [[1.5, nan] + [0.5] * 9 + [3.0] * 3, [], [nan, nan], [2.0] * 8, [7.0] * 3]
    together = pool_noises([noise for each in pools for noise in each], [len(each) for each in pools])
    assert together.problems.tolist() == [13, 0, 0, 8, 3]
    assert together.noise.tolist() == [1.5, 0.0, 0.0, 2.0, 0.0]
    assert [limit == inf for limit in together.limit.tolist()] == [False, True, True, False, True]


def noisy(noise: float | None, limit: float = 0.1) -> Comparison:
    return Comparison(output=LOSS, values={SCALE: 0.0}, limits={SCALE: limit}, sd=0.01, noise=noise)


def test_what_says_nothing_does_not_count() -> None:
    """No run has any noise, or rounding explains anything."""
    telling = [noisy(0.8)] * 9
    for silent in (noisy(None), noisy(5.0, limit=1.0)):
        found = pool(LOSS, [*telling, *([silent] * 9)])
        assert found.noise is not None
        assert (found.noise.problems, found.noise.noise) == (9, 0.8)


def test_a_pooled_difference_in_words() -> None:
    """Only the noise differs, so that only the noise is reported."""
    found = pool(LOSS, [noisy(3.0)] * 20)
    (words,) = explain_pooled_difference(found, "a", "b")
    assert words == (
        "loss: pooled over 20 problems, a and b differ by 3 times the most that the noise of both explains; the "
        "limit is 1.2 times"
    )
    (words,) = explain_pooled(found)
    assert words == (
        "loss: pooled over 20 problems, the errors are 3 times the most that the declared precision explains; the "
        "limit is 1.2 times. Compute it in float32 and round it once; or declare in Precision how the kernel rounds, "
        "for example by loss="
    )
