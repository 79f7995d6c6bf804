# SPDX-License-Identifier: Apache-2.0
"""The bank of right kernels covers every spec, head and dtype, and a slice of it agrees.

``benchmarks/calibration.py`` judges all of it on many more problems.
"""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernel_bank import right as bank
from kernel_bank.right import KERNELS
from lossgate import Precision, Problem
from lossgate.base.names import DTYPES
from lossgate.cases.placement import sample_problems
from lossgate.declaration.loading import load_candidate
from lossgate.losses import SPECS

from .checks import MakeWorld, run


def test_every_spec_and_head_is_written_in_several_ways() -> None:
    for spec in SPECS.values():
        for head in spec.inputs:
            written = [kernel for kernel in KERNELS.values() if (kernel.spec, kernel.head) == (spec, head)]
            assert len(written) >= 3, (spec, head)
    assert all(kernel.dtypes == DTYPES for kernel in KERNELS.values())
    assert len(KERNELS) >= 60


def test_every_axis_is_covered() -> None:
    for axis in ("dp", "cp", "tp"):
        assert len({kernel.spec.name for kernel in KERNELS.values() if axis in kernel.axes}) >= 8, axis


def test_no_kernel_uses_a_reference() -> None:
    for file in Path(bank.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in imported if name.startswith(("dense_losses", "fused_losses"))], file


def test_a_kernel_is_loaded_by_its_name() -> None:
    name = "nll_hidden_online_trained"
    assert load_candidate(f"kernel_bank.right:{name}").name == name


SLICE = (
    ("nll_hidden_cut_low_dlogits_float32", "bfloat16", "dp=2,cp=2"),
    ("nll_hidden_in_forward_low_trained", "bfloat16", "single"),
    ("nll_logits_logaddexp_of_tiles_float32", "float32", "dp=2"),
    ("token_logprobs_hidden_parallel_shifted_parallel_entropy_trained", "bfloat16", "tp=2"),
    ("z_loss_logits_parallel_float32", "float32", "tp=3"),
    ("label_smoothing_hidden_target_trained", "bfloat16", "cp=2"),
    ("softcap_logits_exponentials_float32", "float32", "single"),
    ("divergence_hidden_parallel_trained", "bfloat16", "dp=2,tp=2"),
    ("clipped_pg_hidden_hinge_float32", "float32", "dp=2"),
    ("grpo_logprobs_where_float64", "float32", "cp=2"),
    ("dpo_logits_by_index_add_by_binary_cross_entropy_joined_trained", "float16", "dp=2"),
    ("preference_rewards_by_two_classes_float32", "float16", "dp=2"),
    ("value_values_moves_float32", "float16", "cp=2"),
    ("distill_logits_kl_of_differences_float32", "float32", "single"),
    ("distill_hidden_kl_by_torch_trained", "bfloat16", "dp=2"),
    ("nll_hidden_cut_low_sums_float32", "bfloat16", "single"),
    ("nll_hidden_label_apart_float64", "float32", "single"),
    ("token_logprobs_logits_log_softmax_entropy_of_logprobs_low", "bfloat16", "single"),
    ("grpo_hidden_minimum_float32", "float16", "dp=2"),
    ("token_logprobs_logits_sorted_and_cut_float32", "bfloat16", "single"),
)
"""At least one kernel of every file of the bank, and every dtype and axis."""


@pytest.mark.parametrize(("name", "dtype", "layout"), SLICE)
def test_a_slice_of_them_agrees(make_world: MakeWorld, name: str, dtype: str, layout: str) -> None:
    world = make_world(layout)
    for problem in sample_problems(KERNELS[name], world.layout, dtype, 6, seed=11):
        result = run(KERNELS[name], problem, world)
        assert result.agrees, (result.findings, problem.to_json())


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("spec", ["clipped_pg", "grpo"])
@pytest.mark.parametrize(("head", "stage"), [("hidden", "logits"), ("logits", "logits"), ("hidden", "loss")])
def test_formats_coarser_than_the_inputs_agree(make_world: MakeWorld, spec: str, head: str, stage: str) -> None:
    """Problems keep clear of the edge of a clip by the coarsest format that a kernel declares."""
    (kernel,) = (k for n, k in KERNELS.items() if n.startswith(f"{spec}_{head}") and n.endswith(f"coarse_{stage}"))
    found = sample_problems(kernel, make_world("single").layout, "float32", 40, seed=12)
    assert {problem.rounded_to for problem in found} == {"bfloat16"}
    for problem in found:
        result = run(kernel, problem, make_world("single"))
        assert result.agrees, (result.findings, problem.to_json())


def test_problems_of_kernels_that_round_to_their_inputs_do_not_say_so(make_world: MakeWorld) -> None:
    for name, dtype, layout in SLICE:
        (problem,) = sample_problems(KERNELS[name], make_world(layout).layout, dtype, 1, seed=12)
        assert problem.rounded_to is None
        assert problem.coarsest.dtype is getattr(torch, dtype)
        assert "rounded_to" not in problem.to_json()


ROUNDED_ON_THE_WAY = (
    Problem(  # torch.logsumexp of bfloat16 logits is rounded itself, and so is the slope that it gives
        spec="z_loss", head="logits", dtype="bfloat16", lengths=(2,), masks=("response",), vocab=509, hidden=1,
        options={"z_loss_weight": 0.125}, logit_std=30.0, outliers=((1, 459, 8.0), (0, 205, 30.0)), seed=1161581906,
    ),
    Problem(
        spec="z_loss", head="logits", dtype="float16", lengths=(16,), masks=("all",), vocab=64, hidden=1,
        options={"z_loss_weight": 1.0}, logit_std=10.0, seed=3,
    ),
    Problem(  # exp(x) - 1 of a small x in bfloat16
        spec="grpo", head="logprobs", dtype="bfloat16", lengths=(0, 2, 1, 6, 3, 1, 2, 1), vocab=13, hidden=1,
        masks=("holes", "all", "response", "response", "response", "all", "holes", "holes"),
        options={"use_rho_correction": False, "loss_fn": "cispo", "clip_lower": 0.1, "clip_higher": 0.2},
        scenario={"advantages": "zero", "generation": "everywhere"}, label_boost=12.0, seed=2916830008,
    ),
    Problem(  # an entropy as lse - <p, z> of large logits, where p does not quite sum to 1
        spec="distill", head="hidden", dtype="float16", lengths=(2,), masks=("all",), vocab=16, hidden=8,
        options={"kl_type": "mixed", "zero_outside_topk": True, "log_infinitesimal": -20.0, "temperature": 0.4},
        scenario={"teacher": "near"}, logit_std=30.0, label_boost=12.0, seed=135487068,
    ),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(ROUNDED_ON_THE_WAY)))
def test_what_a_declared_format_rounds_on_the_way_agrees(make_world: MakeWorld, number: int) -> None:
    problem, world = ROUNDED_ON_THE_WAY[number], make_world("single")
    for kernel in KERNELS.values():
        if (kernel.spec.name, kernel.head) == (problem.spec, problem.head):
            for seed in range(problem.seed, problem.seed + 4):
                result = run(kernel, replace(problem, seed=seed), world)
                assert result.agrees, (kernel.name, seed, result.findings)


@pytest.mark.parametrize("name", ["nll_hidden_log_softmax_trained", "nll_hidden_cross_entropy_low"])
def test_their_declarations_are_needed(make_world: MakeWorld, name: str) -> None:
    """The same kernels disagree if they declare that nothing before the loss is rounded."""
    right, world = KERNELS[name], make_world("single")
    declared = replace(right, precision={"bfloat16": Precision(loss=right.precision["bfloat16"].loss)})
    results = [run(declared, problem, world) for problem in sample_problems(declared, world.layout, "bfloat16", 6, 11)]
    assert not all(result.agrees for result in results)
