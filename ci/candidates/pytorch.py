# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy kernels that come with PyTorch, as candidates; and what lossgate found in them
(docs/reference/known-failures.md).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from lossgate import ANY, KnownFailure, Precision, candidate
from lossgate.inputs import NllHidden, NllLogits
from lossgate.options import NllOptions

KNOWN_FAILURES = Path(__file__).parent / "known_failures"
IGNORED = -100

ON_CPU = {
    "float32": Precision(),
    # On CPU log_softmax keeps the sum of exponentials in the dtype of its input.
    "bfloat16": Precision(
        logits="bfloat16", logsumexp="bfloat16", logprobs="bfloat16", dlogits="bfloat16", loss="bfloat16"
    ),
}


def _targets(inputs: NllHidden | NllLogits) -> Tensor:
    return inputs.labels.masked_fill(~inputs.mask, IGNORED)


def _normalised(total: Tensor, inputs: NllHidden | NllLogits, options: NllOptions) -> Tensor:
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@candidate(
    "nll",
    head="logits",
    axes=("dp", "cp"),
    precision=ON_CPU,
    supports={"reduction": ANY},
    good_for="whole logits; the sum, to be divided by the global count",
)
def torch_cross_entropy(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return _normalised(F.cross_entropy(inputs.logits, _targets(inputs), reduction="sum"), inputs, options)


@candidate(
    "nll",
    head="logits",
    precision=ON_CPU,
    good_for="single-rank means with at least one trained token",
    known_failure=KnownFailure(name="torch-1", example=KNOWN_FAILURES / "torch-1-mean-of-nothing.json"),
)
def torch_cross_entropy_mean(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return F.cross_entropy(inputs.logits, _targets(inputs))


def linear_candidate(*given: Any, **more: Any) -> Callable[..., Any]:
    """Declares a candidate, unless torch has no ``linear_cross_entropy``, as before 2.13."""
    return candidate(*given, **more) if hasattr(F, "linear_cross_entropy") else lambda kernel: None


def _linear(inputs: NllHidden, options: NllOptions, chunking: Any) -> Tensor:
    targets = _targets(inputs)
    total = F.linear_cross_entropy(
        inputs.hidden, inputs.weight, targets, linear_bias=inputs.bias, reduction="sum", options=chunking
    )
    return _normalised(total, inputs, options)


@linear_candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp"),
    precision=ON_CPU,
    supports={"reduction": ANY, "bias": ANY},
    good_for="hidden states; forms the logits",
)
def torch_linear_cross_entropy(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return _linear(inputs, options, None)


CHUNK = 16
POLICY: Any = "balanced" if torch.__version__ < "2.14" else "compact"
"""The policy of torch-3, by the name that it has now."""


@linear_candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=("float32",),  # in bfloat16 it adds up the loss in bfloat16 too, which no word declares
    precision=Precision(grads_in_forward=True),
    supports={"reduction": ANY, "bias": ANY},
    tiles={"token": CHUNK},
    good_for="hidden states in chunks, in float32",
)
def torch_linear_cross_entropy_chunked(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    chunking = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=CHUNK, acc_policy="accurate", acc_dtype=_accumulate(inputs)
    )
    return _linear(inputs, options, chunking)


def _accumulate(inputs: NllHidden) -> torch.dtype:
    return torch.promote_types(inputs.hidden.dtype, torch.float32)


@linear_candidate(
    "nll",
    head="hidden",
    precision=Precision(loss="bfloat16", grads_in_forward=True),
    supports={"reduction": ANY},
    good_for="not the value of a bfloat16 loss",
    known_failure=KnownFailure(name="torch-2", example=KNOWN_FAILURES / "torch-2-chunked-loss.json"),
)
def torch_linear_cross_entropy_default_chunks(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return _linear(inputs, options, torch.nn.LinearCrossEntropyOptions())


@linear_candidate(
    "nll",
    head="hidden",
    precision=Precision(
        loss="bfloat16", grads_in_forward=True
    ),  # as its documentation has it: gradients accumulate in float32
    supports={"reduction": ANY, "bias": True},
    good_for="not many chunks in bfloat16",
    known_failure=KnownFailure(name="torch-3", example=KNOWN_FAILURES / "torch-3-chunked-gradients.json"),
)
def torch_linear_cross_entropy_many_chunks(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return _linear(
        inputs,
        options,
        torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4, acc_policy=POLICY, acc_dtype=_accumulate(inputs)),
    )


# Backward, which lossgate calls after the kernel, must happen in the context, too.
_loss_parallel = loss_parallel()
_loss_parallel.__enter__()


def _parallel(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    shape = torch.Size((len(inputs.labels), inputs.vocab_size))
    logits = DTensor.from_local(
        inputs.logits, mesh["tp"], [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1)
    )
    total = F.cross_entropy(logits, _targets(inputs), reduction="sum")
    assert isinstance(total, DTensor)
    return _normalised(total.to_local(), inputs, options)


@candidate(
    "nll",
    head="logits",
    axes=("dp", "cp", "tp"),
    dtypes=("float32",),
    supports={"reduction": ANY, "vocab_split": "even"},
    good_for="tensor-parallel logits as DTensor; float32, vocabularies that tp divides",
)
def torch_loss_parallel(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return _parallel(inputs, options, mesh)


@candidate(
    "nll",
    head="logits",
    axes=("tp",),
    dtypes=("float32",),
    supports={"reduction": ANY, "vocab_split": "chunked"},
    good_for="not vocabularies that leave a rank without a row",
    known_failure=KnownFailure(name="torch-4", example=KNOWN_FAILURES / "torch-4-empty-shard.json"),
)
def torch_loss_parallel_uneven(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return _parallel(inputs, options, mesh)


@candidate(
    "nll",
    head="logits",
    axes=("tp",),
    dtypes=("bfloat16",),
    precision=Precision(logprobs="bfloat16", dlogits="bfloat16", loss="bfloat16"),
    supports={"reduction": ANY, "vocab_split": "even"},
    good_for="not confident labels in bfloat16",
    known_failure=KnownFailure(name="torch-5", example=KNOWN_FAILURES / "torch-5-confident-label.json"),
)
def torch_loss_parallel_bfloat16(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return _parallel(inputs, options, mesh)
