# SPDX-License-Identifier: Apache-2.0
"""The blocks of an output: an error in one of them is seen, and the report says in which."""

from dataclasses import replace

import pytest
from torch import Tensor

from kernel_bank.cross_entropy import STYLES, make
from lossgate import Candidate
from lossgate.judge.blocks import blocks_of
from lossgate.specs.outputs import gradient_output

from .checks import MakeWorld, judge_changed, make_problem


@pytest.mark.parametrize("block", ["vocab row", "vocab tile", "vocab shard"])
def test_an_error_in_a_block_of_the_vocabulary_is_seen(make_world: MakeWorld, block: str) -> None:
    rows = {"vocab row": slice(7, 8), "vocab tile": slice(32, 64), "vocab shard": slice(49, 97)}[block]

    def spoil(outputs: dict[str, Tensor]) -> None:
        wrong = outputs["grad of weight"].clone()
        wrong[rows] *= 1.03
        outputs["grad of weight"] = wrong

    comparison = judge_changed(make_problem("bfloat16", "tp=2"), make_world("tp=2"), spoil)["grad of weight"]
    assert comparison.shares[block] > 1
    assert comparison.where[block] == {"vocab row": "7", "vocab tile": "1", "vocab shard": "1"}[block]


def test_an_error_in_the_tokens_of_a_rank_is_seen(make_world: MakeWorld) -> None:
    problem = make_problem("bfloat16", "cp=2")
    held = problem.partition.real_token_shards[1]

    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs["grad of hidden"] = outputs["grad of hidden"].index_put((held,), 1.02 * outputs["grad of hidden"][held])

    comparison = judge_changed(problem, make_world("cp=2"), spoil)["grad of hidden"]
    assert comparison.shares["token shard"] > 1
    assert comparison.where["token shard"] == "1"


def test_vocabulary_tiles_are_those_that_the_kernel_declares() -> None:
    partition, kernel = make_problem("bfloat16", vocab=7).partition, make(STYLES["bfloat16"][0])
    gradient = gradient_output("weight", ("vocab", "hidden"))

    def tiles(declared: Candidate) -> list[list[int]]:
        return [b.index.tolist() for b in blocks_of(gradient, partition, declared.tiles) if b.name == "vocab tile"]

    assert tiles(replace(kernel, tiles={"vocab": (3,)})) == [[0, 0, 0, 1, 1, 1, 2]]
    assert tiles(kernel) == []  # one tile of the usual size holds all rows
