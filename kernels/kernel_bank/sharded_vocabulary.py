# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy kernels for every split of the vocabulary: a right one, and those with a bug that
shows only on some splits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from kernel_bank.cross_entropy import Style, make
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.declaration.supports import ANY

ShardBug = Literal["padding rows counted", "rank without a row lost", "bias ignored"]
SHARD_BUGS: Mapping[ShardBug, str] = {
    "padding rows counted": "the padding rows of a tp rank take part as if they belonged to the vocabulary",
    "rank without a row lost": "a tp rank without a row of the vocabulary returns a loss of 0",
    "bias ignored": "the bias of the lm-head takes no part",
}
"""Bugs, and their sentences."""


def for_every_split(style: Style, bug: ShardBug | None = None) -> Candidate:
    """Returns the cross-entropy kernel of a style, given shards of every kind.

    Args:
        style: how it computes.
        bug: what it does wrong; None for nothing.
    """
    own = make(style)

    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs:
        rows = inputs.vocab_end - inputs.vocab_start
        if bug != "padding rows counted":
            bias = None if inputs.bias is None else inputs.bias[:rows]
            inputs = replace(inputs, weight=inputs.weight[:rows], bias=bias)
        if bug == "bias ignored" and inputs.bias is not None:
            inputs = replace(inputs, bias=0 * inputs.bias)
        if bug == "rank without a row lost" and not rows:
            inputs = replace(inputs, mask=torch.zeros_like(inputs.mask))
        return own.kernel(inputs, options, mesh)  # type: ignore[return-value]

    return replace(
        own, kernel=kernel, supports={**own.supports, "vocab_split": ANY}, name=f"{own.name}, every split; {bug}"
    )
