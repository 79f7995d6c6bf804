# SPDX-License-Identifier: Apache-2.0
"""What to do about wrong numbers names the conventions under which they are right."""

from pathlib import Path

import pytest

from lossgate import Layout
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings

KERNEL = """
import torch
import lossgate


@lossgate.candidate("nll", head="logits", axes=("dp",))
def kernel(inputs, options, mesh):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return FACTOR * total / COUNT
"""
OWN = "conventions=lossgate.Conventions(counts='own'): "
OWN_OR_NAN = "conventions=lossgate.Conventions(counts='own', untrained='nan'): "


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("count", "factor", "named"),
    [
        ("inputs.mask.sum().clamp(min=1)", 1, OWN),
        ("inputs.mask.sum()", 1, OWN_OR_NAN),
        ("inputs.mask.sum().clamp(min=1)", 2, ""),
        ("inputs.valid_tokens.clamp(min=1)", 2, ""),
    ],
)
def test_the_fewest_conventions_are_named(tmp_path: Path, count: str, factor: int, named: str) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNEL.replace("COUNT", count).replace("FACTOR", str(factor)))
    (kernel,) = load_candidates(str(file))
    told = run_cell(Cell(kernel, Layout(dp=2), "float32"), Settings(examples=12, rounds=1)).record.first_told
    assert ("Conventions(" in told) == bool(named)
    assert named in told
