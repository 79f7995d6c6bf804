# SPDX-License-Identifier: Apache-2.0
"""Kernels that mistake some shards of the vocabulary, or its bias, disagree whatever the seed.

Before these situations were coverage goals, cells of 3 of 8 seeds agreed with a kernel that loses a
tp rank without a row.
"""

import pytest

from kernel_bank.cross_entropy import STYLES
from kernel_bank.sharded_vocabulary import SHARD_BUGS, ShardBug, for_every_split
from lossgate import Layout
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings

SEEDS = range(3)


def verified(bug: ShardBug | None, layout: str, seed: int) -> CellResult:
    """Returns what comes of a kernel with a bug."""
    cell = Cell(for_every_split(STYLES["float32"][1], bug), Layout.parse(layout), "float32")
    return run_cell(cell, Settings(shrink_calls=0, seed=seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", SHARD_BUGS)
def test_bugs_of_shards_disagree(bug: ShardBug, seed: int) -> None:
    """Of two ranks one is empty only if the vocabulary has a single row, which says nothing."""
    layout = "tp=4" if bug == "rank without a row lost" else "tp=2"
    assert verified(bug, layout, seed).verdict is Verdict.DISAGREE


@pytest.mark.parametrize("layout", ["tp=2", "tp=4"])
def test_the_kernel_without_them_agrees(layout: str) -> None:
    found = verified(None, layout, 0)
    assert found.verdict is Verdict.AGREE, found.reasons
    empty = {"shard of padding rows alone", "shard without a row"} if layout == "tp=4" else set[str]()
    assert {"shard with padding rows", *empty} <= found.record.coverage.keys()
    assert {"with a bias", "without a bias", "padding between sequences"} <= found.record.coverage.keys()
