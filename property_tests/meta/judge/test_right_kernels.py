# SPDX-License-Identifier: Apache-2.0
"""The bank of right kernels covers every spec, head and dtype, and a slice of it agrees.

``benchmarks/calibration.py`` judges all of it on many more problems.
"""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from lossgate import Precision
from lossgate.bank import right as bank
from lossgate.bank.right import KERNELS
from lossgate.cases.placement import sample_problems
from lossgate.declaration.loading import load_candidate
from lossgate.dtypes import DTYPES
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
    assert load_candidate(f"lossgate.bank.right:{name}").name == name


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
)
"""At least one kernel of every file of the bank, and every dtype and axis."""


@pytest.mark.parametrize(("name", "dtype", "layout"), SLICE)
def test_a_slice_of_them_agrees(make_world: MakeWorld, name: str, dtype: str, layout: str) -> None:
    world = make_world(layout)
    for problem in sample_problems(KERNELS[name], world.layout, dtype, 6, seed=11):
        result = run(KERNELS[name], problem, world)
        assert result.agrees, (result.findings, problem.to_json())


@pytest.mark.parametrize("name", ["nll_hidden_log_softmax_trained", "nll_hidden_cross_entropy_low"])
def test_their_declarations_are_needed(make_world: MakeWorld, name: str) -> None:
    """The same kernels disagree if they declare that nothing before the loss is rounded."""
    right, world = KERNELS[name], make_world("single")
    declared = replace(right, precision={"bfloat16": Precision(loss=right.precision["bfloat16"].loss)})
    results = [run(declared, problem, world) for problem in sample_problems(declared, world.layout, "bfloat16", 6, 11)]
    assert not all(result.agrees for result in results)
