# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own kernels, which nobody here wrote; and that the findings in them still show."""

from pathlib import Path

import pytest

import lossgate
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.engine.run import plan, run_cell
from lossgate.engine.settings import Settings

ROOT = Path(__file__).parents[1]
PYTORCH = {candidate.name: candidate for candidate in load_candidates(str(ROOT / "ci/candidates/pytorch.py"))}
KNOWN = [candidate for candidate in PYTORCH.values() if candidate.finding]

test_cross_entropy = lossgate.suite(PYTORCH["torch_cross_entropy"], layouts=["single", "dp=2,cp=2"])
test_linear_cross_entropy = lossgate.suite(PYTORCH["torch_linear_cross_entropy"], layouts=["single", "cp=2"])
test_linear_cross_entropy_chunked = lossgate.suite(
    PYTORCH["torch_linear_cross_entropy_chunked"], layouts=["single", "dp=2"]
)
test_loss_parallel = lossgate.suite(PYTORCH["torch_loss_parallel"], layouts=["single", "tp=2", "dp=2,tp=3"])


@pytest.mark.parametrize("known", KNOWN, ids=[candidate.name for candidate in KNOWN])
def test_findings_still_show_and_are_described(known: Candidate) -> None:
    (cell,) = plan([known], Settings())
    assert run_cell(cell, Settings()).expected
    assert known.finding is not None
    assert f"## {known.finding.name}" in (ROOT / "docs/findings.md").read_text()
