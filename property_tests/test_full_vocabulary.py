# SPDX-License-Identifier: Apache-2.0
"""Losses that ask for more of the logits than the labels' log-probabilities.

They are z-loss, label smoothing, soft-cap and divergences over the whole vocabulary. Right kernels
agree, dense, chunked and parallel over the vocabulary; those with one line wrong disagree.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bank.full_vocabulary import LOSSES, WRONG, Style, make
from lossgate import ANY, Layout, Precision, Problem, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.judge.ensemble import stages_of
from lossgate.losses import SPECS
from lossgate.specs.outputs import gradient_output

SETTINGS = Settings(examples=20, rounds=12)


def together(spec: str, *values: str, head: str) -> Any:
    """Returns parameters of a test. Tests of a loss and a head run in one worker, because they
    share decks.
    """
    mark = pytest.mark.xdist_group(f"{spec} {head}")
    return pytest.param(spec, *values, head, id="-".join((spec, *values, head)), marks=mark)


HEADS_OF_LOSSES = ("hidden", "logits")

LAYOUTS: dict[Style, tuple[str, ...]] = {
    "dense": ("dp=2,cp=2",),
    "chunked": ("dp=2,cp=2",),
    "vocab-parallel": ("tp=3", "dp=2,tp=2"),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("style", "layout"), [(style, one) for style, all_ in LAYOUTS.items() for one in all_])
@pytest.mark.parametrize(("spec", "head"), [together(spec, head=head) for spec in LOSSES for head in HEADS_OF_LOSSES])
def test_right_kernels_agree(spec: str, head: str, style: Style, layout: str, dtype: str) -> None:
    result = run_cell(Cell(make(spec, head, style), Layout.parse(layout), dtype), SETTINGS)
    assert result.verdict is Verdict.AGREE, result.reasons


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("spec", "what", "head"),
    [together(spec, what, head=head) for spec, wrong in WRONG.items() for what in wrong for head in HEADS_OF_LOSSES],
)
def test_one_wrong_line_is_found(spec: str, what: str, head: str, dtype: str) -> None:
    wrong = make(spec, head, "dense", WRONG[spec][what])
    result = run_cell(Cell(wrong, Layout(), dtype), Settings(examples=20, rounds=12, shrink_calls=1))
    assert result.verdict is Verdict.DISAGREE


def capped_in_bfloat16(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """As Hugging Face's Gemma 2: the cap in bfloat16, then the softmax in float32."""
    logits = inputs.logits
    if options.softcap is not None:
        logits = (logits / options.softcap).tanh() * options.softcap
    labels = inputs.labels.masked_fill(~inputs.mask, -100)
    return F.cross_entropy(logits.float(), labels, reduction="sum") / inputs.valid_tokens.clamp(min=1)


def test_a_cap_in_bfloat16_before_a_softmax_in_float32_is_one_of_spec_nll() -> None:
    low = Precision(logits="bfloat16", dlogits="bfloat16")
    supports = {"softcap": ANY}
    declare = candidate("nll", head="logits", dtypes=("bfloat16",), precision=low, supports=supports)
    result = run_cell(Cell(declare(capped_in_bfloat16), Layout(), "bfloat16"), SETTINGS)
    assert result.verdict is Verdict.AGREE, result.reasons


def test_the_general_way_is_as_sharp_as_the_fast_one() -> None:
    """Spec ``softcap`` asks for the logits, spec ``nll`` for log-probabilities of capped logits.

    Both are the same loss. The judge allows them nearly the same noise.
    """
    general = Problem(
        spec="softcap",
        head="hidden",
        dtype="float32",
        lengths=(20, 13),
        masks=("all", "response"),
        hidden=8,
        vocab=33,
        options={"softcap": 2.0},
        seed=3,
    )
    fast = replace(general, spec="nll")
    for leaf, dims in {"hidden": ("token", "hidden"), "weight": ("vocab", "hidden")}.items():
        found = [_noise(problem, leaf, dims) for problem in (general, fast)]
        assert 0.5 < found[0] / found[1] < 2


def _noise(problem: Problem, leaf: str, dims: tuple[str, ...]) -> float:
    """Returns the standard deviation of the noise of a gradient, relative to its size."""
    spec = SPECS[problem.spec]
    bound = BoundProblem(spec, problem)
    stages = stages_of(dense_candidate(spec, "hidden"), "float32")
    output, reference = gradient_output(leaf, dims), bound.reference(())
    noise = bound.noise.deviations(problem.partition, stages, (), reference)[output]
    return float(noise.std(0).square().mean().sqrt() / torch.linalg.vector_norm(reference[output]))
