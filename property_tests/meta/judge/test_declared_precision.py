# SPDX-License-Identifier: Apache-2.0
"""The judge holds a kernel to the precision that it declares."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate
from kernel_bank.cross_entropy import ALL_BFLOAT16, STYLES, make
from lossgate import Layout, Precision
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import Verdict
from lossgate.inputs import NllHidden
from lossgate.options import NllOptions

from .checks import MakeWorld, by_output, judge_changed, make_problem, run


def test_a_finer_precision_than_the_kernel_has_disagrees(make_world: MakeWorld) -> None:
    """The declaration claims float32 logits, and the kernel computes them in bfloat16."""
    right = make(STYLES["bfloat16"][3])
    wrong = replace(right, precision={"bfloat16": Precision(dlogits="bfloat16", reduce="bfloat16")})
    world = make_world("single")
    assert run(right, make_problem("bfloat16"), world).agrees
    assert not run(wrong, make_problem("bfloat16"), world).agrees


def test_a_coarser_declaration_only_costs_power(make_world: MakeWorld) -> None:
    exact = make(STYLES["bfloat16"][0])
    coarse = replace(exact, precision={"bfloat16": replace(ALL_BFLOAT16.precision, loss="float32")})
    world, problem = make_world("single"), make_problem("bfloat16")
    of_exact, of_coarse = (by_output(run(kernel, problem, world).comparisons) for kernel in (exact, coarse))
    assert all(comparison.agrees for comparison in of_coarse.values())
    for output in ("grad of hidden", "grad of weight", "logprobs"):
        assert of_coarse[output].mde >= of_exact[output].mde


@pytest.mark.parametrize(
    ("precision", "output", "agrees"),
    [
        (Precision(dlogits="bfloat16"), "grad of hidden", True),
        (Precision(loss="bfloat16"), "grad of weight", True),
        (Precision(), "grad of hidden", False),
        (Precision(dlogits="bfloat16"), "logprobs", False),
    ],
    ids=["dlogits in bfloat16", "loss in bfloat16", "all in float32", "not on the way"],
)
def test_rounding_on_the_way_to_a_gradient_may_hit_all_of_it_alike(
    make_world: MakeWorld, precision: Precision, output: str, agrees: bool
) -> None:
    """That holds even for a gradient that comes in float32.

    What does not lie on that way may not be hit.
    """

    def scale(outputs: dict[str, Tensor]) -> None:
        outputs.update({name: tensor * (1 + 0.9 * 2**-8) for name, tensor in outputs.items()})

    comparisons = judge_changed(make_problem("float32"), make_world("single"), scale, precision)
    assert comparisons[output].agrees == agrees


@lossgate.candidate(
    "nll",
    head="hidden",
    dtypes=("bfloat16",),
    precision=Precision(logits="bfloat16", dlogits="bfloat16", reduce="bfloat16"),
    supports={"softcap": (None, 2.0)},
)
def capped_in_bfloat16(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    logits = inputs.hidden @ inputs.weight.T
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    loss = F.cross_entropy(logits.float(), inputs.labels, reduction="none")
    return torch.where(inputs.mask, loss, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


def test_a_softcap_may_round_as_logits_do() -> None:
    cell = Cell(capped_in_bfloat16, Layout(), "bfloat16")
    assert run_cell(cell, Settings(examples=20)).verdict is Verdict.AGREE
    finer = replace(capped_in_bfloat16, precision={"bfloat16": Precision(dlogits="bfloat16", reduce="bfloat16")})
    assert run_cell(Cell(finer, Layout(), "bfloat16"), Settings(shrink_calls=0)).verdict is Verdict.DISAGREE
