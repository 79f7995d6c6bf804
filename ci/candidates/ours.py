# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``fused_losses``, as candidates. Chunks are small, so that small problems turn every loop."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_losses import linear_logprobs, vocab_parallel_logprobs
from lossgate import ANY, Outputs, Precision, candidate
from lossgate.specs.inputs import HiddenInputs, LogitsInputs
from lossgate.specs.nll import NllOptions

TOKEN_CHUNK, VOCAB_CHUNK = 16, 32


def _outputs(inputs: HiddenInputs | LogitsInputs, options: NllOptions, logprobs: Tensor, entropy: Tensor) -> Outputs:
    normaliser = inputs.valid_tokens.clamp(min=1)
    total = -torch.where(inputs.mask, logprobs, 0.0).sum()
    mean_entropy = torch.where(inputs.mask, entropy, 0.0).sum() / normaliser
    return Outputs(loss=total if options.reduction == "sum" else total / normaliser, logprobs=logprobs, metrics={"entropy": mean_entropy})


@candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp", "tp"),
    precision=Precision(),
    supports={"temperature": ANY, "reduction": ANY, "bias": ANY, "vocab_split": ANY},
    differentiable=("loss", "logprobs"),
    tiles={"token": TOKEN_CHUNK, "vocab": VOCAB_CHUNK},
    good_for="SFT from hidden states, no logits; any upstream gradient",
)
def fused_linear_cross_entropy(inputs: HiddenInputs, options: NllOptions, mesh: DeviceMesh) -> Outputs:
    logprobs, entropy = linear_logprobs(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        bias=inputs.bias,
        temperature=options.temperature,
        vocab_start=inputs.vocab_start,
        vocab_rows=inputs.vocab_end - inputs.vocab_start,
        tp_group=mesh.get_group("tp"),
        token_chunk=TOKEN_CHUNK,
        vocab_chunk=VOCAB_CHUNK,
    )
    return _outputs(inputs, options, logprobs, entropy)


@candidate(
    "nll",
    head="logits",
    axes=("dp", "cp", "tp"),
    precision=Precision(),
    supports={"temperature": ANY, "reduction": ANY, "vocab_split": ANY},
    differentiable=("loss", "logprobs"),
    good_for="SFT from tensor-parallel logits; any upstream gradient",
)
def fused_vocab_parallel_cross_entropy(inputs: LogitsInputs, options: NllOptions, mesh: DeviceMesh) -> Outputs:
    logprobs, entropy = vocab_parallel_logprobs(
        inputs.logits,
        inputs.labels,
        temperature=options.temperature,
        vocab_start=inputs.vocab_start,
        vocab_rows=inputs.vocab_end - inputs.vocab_start,
        tp_group=mesh.get_group("tp"),
    )
    return _outputs(inputs, options, logprobs, entropy)
