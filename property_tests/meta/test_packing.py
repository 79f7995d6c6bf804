# SPDX-License-Identifier: Apache-2.0
"""The padded pack: what a layout adds to a problem, and what it must leave as it is."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from lossgate import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.placement import PlacedProblem, Placement
from lossgate.cases.reference import DenseRun
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Dims
from lossgate.problems.problem import Problem
from lossgate.specs.heads import HEADS

LAYOUTS = [("dp=2", 3), ("cp=2", 1), ("dp=2,cp=3", 3), ("cp=2,tp=2", 4)]
"""Layouts, and the multiple to which sequences are padded."""

CANDIDATES = [
    ("nll", "hidden"),
    ("dpo", "logprobs"),
    ("clipped_pg", "logprobs"),
    ("value", "values"),
    ("distill", "logits"),
    ("token_logprobs", "logits"),
    ("preference", "rewards"),
]


@cache
def bound_problems(family: str, head: str) -> list[BoundProblem]:
    drawn = Draws(dense_candidate(SPECS[family], head), "float32", "packing", 12, rich=True).all()
    return [BoundProblem(SPECS[family], problem) for problem in drawn]


def placed_problems(family: str, head: str, layout: str, multiple: int) -> list[PlacedProblem]:
    placement = Placement(Layout.parse(layout), "padded", multiple)
    return [PlacedProblem(bound, placement.put(bound.problem)) for bound in bound_problems(family, head)]


def padding_of(batch: GlobalBatch) -> torch.Tensor:
    """Returns which tokens of the pack are padding, bool."""
    padding = torch.ones(batch.partition.tokens, dtype=torch.bool)
    padding[batch.partition.real_tokens] = False
    return padding


def dims_of(batch: GlobalBatch, head: str) -> dict[str, Dims]:
    """Returns the dims of everything that has tokens."""
    plain: dict[str, Dims] = dict.fromkeys(("input_ids", "labels", "mask", "sequence"), ("token",))
    every = {**plain, **batch.field_dims, **HEADS[head].leaves}
    return {name: dims for name, dims in every.items() if "token" in dims}


@pytest.mark.parametrize(("layout", "multiple"), LAYOUTS)
@pytest.mark.parametrize(("family", "head"), CANDIDATES)
def test_real_tokens_are_the_same_on_every_layout(family: str, head: str, layout: str, multiple: int) -> None:
    padded = 0
    for placed in placed_problems(family, head, layout, multiple):
        one, other, real = placed.bound.batch, placed.batch, placed.partition.real_tokens
        tokens = dims_of(one, head)
        ones, others = {**one.fields, **one.leaves}, {**other.fields, **other.leaves}
        assert ones.keys() == others.keys()
        for name, tensor in others.items():
            own = tensor.index_select(tokens[name].index("token"), real) if name in tokens else tensor
            assert torch.equal(own, ones[name]), name
        for name, cotangent in other.cotangents.items():
            assert torch.equal(cotangent[real] if cotangent.dim() else cotangent, one.cotangents[name])
        padded += other.partition.tokens - one.partition.tokens
    assert padded > 0


@pytest.mark.parametrize(("family", "head"), CANDIDATES)
def test_padding_is_masked_copies_of_real_tokens(family: str, head: str) -> None:
    for placed in placed_problems(family, head, "dp=2,cp=3", 3):
        batch, padding = placed.batch, padding_of(placed.batch)
        assert padding.any()
        tokens = {name: dims for name, dims in dims_of(batch, head).items() if name != "sequence"}
        for name, dims in tokens.items():
            tensor = {**batch.fields, **batch.leaves}[name].movedim(dims.index("token"), 0)
            if tensor.dtype is torch.bool and dims == ("token",):
                assert not tensor[padding].any(), name
            else:
                assert {str(row.tolist()) for row in tensor[padding]} <= {str(row.tolist()) for row in tensor[~padding]}
        for cotangent in batch.cotangents.values():
            assert not cotangent.dim() or not cotangent[padding].any()
    if head != "rewards":  # whose only tokens are not the loss's
        leaf = next(name for name, dims in HEADS[head].leaves.items() if "token" in dims)
        assert any(
            bool(placed.batch.leaves[leaf][padding_of(placed.batch)].abs().sum() > 0)
            for placed in placed_problems(family, head, "dp=2,cp=3", 3)
        )


def test_a_layout_without_padding_changes_no_tensor() -> None:
    for placed in placed_problems("nll", "hidden", "dp=2", 1):
        one, other = placed.bound.batch, placed.batch
        assert all(torch.equal(other.leaves[name], leaf) for name, leaf in one.leaves.items())
        assert all(torch.equal(other.fields[name], value) for name, value in one.fields.items())
        assert other.partition == placed.partition


@pytest.mark.parametrize(("layout", "multiple"), LAYOUTS)
@pytest.mark.parametrize(("family", "head"), CANDIDATES)
def test_the_reference_on_the_pack_is_that_without_padding(family: str, head: str, layout: str, multiple: int) -> None:
    """So padding counts for nothing, and its gradients are zero."""
    for placed in placed_problems(family, head, layout, multiple):
        bound, real = placed.bound, placed.partition.real_tokens
        own = DenseRun(bound.batch, head).outputs(bound.bound_spec)
        packed = DenseRun(placed.batch, head).outputs(bound.bound_spec)
        assert own.keys() == packed.keys()
        for output, expected in own.items():
            found = packed[output]
            if "token" in output.dims:
                dim = output.dims.index("token")
                if output.kind == "gradient":
                    assert not found.index_fill(dim, real, 0.0).any(), output
                found = found.index_select(dim, real)
            size = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11 * size, equal_nan=True), output


def test_padding_is_seen_by_a_kernel_that_uses_it() -> None:
    """A reference with the masks of padding switched on gives another loss."""
    changed = 0
    for placed in placed_problems("nll", "hidden", "cp=2", 1):
        batch, padding = placed.batch, padding_of(placed.batch)
        if not padding.any():
            continue
        trained = replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] | padding})
        own, other = (DenseRun(b, "hidden").outputs(placed.bound.bound_spec) for b in (batch, trained))
        loss = next(output for output in own if str(output) == "loss")
        changed += not torch.allclose(own[loss], other[loss], rtol=1e-6)
    assert changed > 5


def test_rows_of_a_padded_vocabulary_are_there_for_each_leaf() -> None:
    problem = Problem(
        spec="nll",
        head="hidden",
        dtype="float32",
        lengths=(4,),
        masks=("all",),
        hidden=3,
        vocab=5,
        bias=True,
        layout=Layout(tp=4),
        vocab_split="padded",
    )
    placed = PlacedProblem(BoundProblem(SPECS["nll"], problem), problem)
    assert {name: tuple(rows.shape) for name, rows in placed.batch.vocab_padding.items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }
    assert not placed.bound.batch.vocab_padding
