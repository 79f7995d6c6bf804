# SPDX-License-Identifier: Apache-2.0
"""Kernels that ``torch.compile`` compiles, on real process groups."""

from functools import partial
from typing import Any

import pytest

from lossgate import Layout
from lossgate.worlds import RankContext, make_world
from property_tests.kernels.compiled_programs import VOCAB, Ranks, compilations

OVER_TP = (
    "linear_logprobs, filtered",
    "linear_cross_entropy",
    "vocab_parallel_logprobs",
    "linear_sft_loss",
    "linear_logprobs, all statistics",
)
OVER_CP = ("dpo_loss", "grpo_loss", "clipped_pg_loss, GSPO")


def _over_tp(name: str, context: RankContext) -> int:
    group = context.mesh.get_group("tp")
    rows = VOCAB // group.size()
    start = group.rank() * rows
    head: dict[str, Any] = {"tp_group": group, "vocab_start": start}
    if name == OVER_TP[-1]:
        head["sequence_parallel"] = True
    return compilations(name, None, Ranks(head, {}), slice(start, start + rows))


def _over_cp(name: str, context: RankContext) -> int:
    return compilations(name, None, Ranks({}, {"cp_group": context.mesh.get_group("tp")}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OVER_TP, *OVER_CP])
def test_kernels_over_ranks_compile_in_one_graph_and_at_most_twice(name: str) -> None:
    world = make_world("gloo", Layout(tp=2), timeout=120.0)
    assert max(world.run(partial(_over_tp if name in OVER_TP else _over_cp, name))) <= 2
