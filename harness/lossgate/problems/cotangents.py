# SPDX-License-Identifier: Apache-2.0
"""Cotangents: the upstream gradients from which backward starts."""

from collections.abc import Collection, Mapping

from torch import Tensor

from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams


def draw_cotangents(problem: Problem, fields: Mapping[str, Tensor], outputs: Collection[str]) -> dict[str, Tensor]:
    """Draws the upstream gradient of each output that gets one.

    They are of either sign, never 1, and different for each token, so that a kernel which ignores
    or shares them is seen. They have eight significant bits, so every dtype holds them exactly.

    Args:
        problem: says which outputs get one.
        fields: of the batch; masked tokens get a cotangent of 0.
        outputs: the names of the outputs that the spec has.
    """
    streams = RandomStreams(problem.to_json())
    drawn = {"loss": _eight_bits(streams, "loss cotangent", 1).squeeze(0)}
    for name in ("logprobs", "token_entropy"):
        tokens = _eight_bits(streams, f"{name} cotangent", len(fields["mask"])) * fields["mask"]
        # About what the mean over tokens gives to each token.
        drawn[name] = tokens * 0.5 ** int(fields["valid_tokens"]).bit_length()
    return {name: value for name, value in drawn.items() if name in outputs and problem.cotangent in (name, "both")}


def _eight_bits(streams: RandomStreams, stream: str, count: int) -> Tensor:
    """Returns odd multiples of 1/128 in +-(0.5, 2)."""
    size = streams.integers(stream, 96, count) * 2 + 65
    sign = 1 - 2 * streams.integers(stream + " sign", 2, count)
    return (sign * size).double() / 128
