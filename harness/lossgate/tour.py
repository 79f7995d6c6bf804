# SPDX-License-Identifier: Apache-2.0
"""A right kernel and a wrong kernel, to try lossgate on before you have written your own.

lossgate verify lossgate.tour --layout cp=2
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import NllHidden
from lossgate.options import NllOptions

_TOKENS = 8


@lossgate.candidate("nll", head="hidden", axes=("dp", "cp"), dtypes=("float32",), tiles={"token": _TOKENS})
def chunked(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Computes the mean NLL, eight tokens at a time."""
    return _sum(inputs) / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", head="hidden", axes=("dp", "cp"), dtypes=("float32",), tiles={"token": _TOKENS})
def of_own_tokens(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Divides by the trained tokens of its own rank, so the sum over two ranks is too large."""
    return _sum(inputs) / inputs.mask.sum().clamp(min=1)


def _sum(inputs: NllHidden) -> Tensor:
    """Sums the NLL over the rank's trained tokens. It holds the logits of at most eight tokens."""
    # This adds 0, so that a rank without tokens also has gradients.
    total = 0.0 * inputs.hidden.sum() + 0.0 * inputs.weight.sum()
    for start in range(0, len(inputs.labels), _TOKENS):
        chunk = slice(start, start + _TOKENS)
        logits = inputs.hidden[chunk] @ inputs.weight.T
        losses = F.cross_entropy(logits, inputs.labels[chunk], reduction="none")
        total = total + torch.where(inputs.mask[chunk], losses, 0.0).sum()
    return total
