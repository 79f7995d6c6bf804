# SPDX-License-Identifier: Apache-2.0
"""Names and dims of what a candidate gives: "loss", "logprobs", "token_entropy", a metric's name, and "grad of <leaf>"."""

from collections.abc import Mapping

from lossgate.problems.partition import Dims
from lossgate.specs.spec import HEADS

OUTPUT_DIMS: Mapping[str, Dims] = {"loss": (), "logprobs": ("token",), "token_entropy": ("token",)}
"""Dims of the outputs that are no gradient; metrics are scalars."""


def grad_name(leaf: str) -> str:
    return f"grad of {leaf}"


def output_dims(name: str, head: str) -> Dims:
    for leaf, dims in HEADS[head].leaves.items():
        if name == grad_name(leaf):
            return dims
    return OUTPUT_DIMS.get(name, ())
