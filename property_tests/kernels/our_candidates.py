# SPDX-License-Identifier: Apache-2.0
"""The candidates with which ci verifies our kernels."""

from pathlib import Path

from lossgate.declaration.loading import load_candidates

OURS = {one.name: one for one in load_candidates(str(Path(__file__).parents[2] / "ci/candidates/ours.py"))}
"""By name."""
