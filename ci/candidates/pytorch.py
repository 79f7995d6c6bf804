# SPDX-License-Identifier: Apache-2.0
"""What lossgate found in PyTorch 2.13 (docs/reference/known-failures.md). What is right there is in
``lossgate.adapters.torch``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lossgate import ANY, KnownFailure, Precision, candidate
from lossgate.adapters import torch as upstream  # what is imported by name would be a candidate of this file too
from lossgate.adapters.support import LOG_SOFTMAX, ignoring
from lossgate.inputs import NllHidden, NllLogits
from lossgate.options import NllOptions

KNOWN_FAILURES = Path(__file__).parent / "known_failures"


@candidate(
    "nll",
    head="logits",
    **LOG_SOFTMAX,
    good_for="single-rank means with at least one trained token",
    known_failure=KnownFailure(name="torch-1", example=KNOWN_FAILURES / "torch-1-mean-of-nothing.json"),
)
def torch_cross_entropy_mean(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return F.cross_entropy(inputs.logits, ignoring(inputs))


def linear_candidate(*given: Any, **more: Any) -> Callable[..., Any]:
    """Declares a candidate, unless torch has no ``linear_cross_entropy``, as before 2.13."""
    return candidate(*given, **more) if hasattr(F, "linear_cross_entropy") else lambda kernel: None


POLICY: Any = "balanced" if torch.__version__ < "2.14" else "compact"
"""The policy of torch-3, by the name that it has now."""


@linear_candidate(
    "nll",
    head="hidden",
    precision=Precision(loss="bfloat16", grads_in_forward=True),
    supports={"reduction": ANY},
    good_for="not the value of a bfloat16 loss",
    known_failure=KnownFailure(name="torch-2", example=KNOWN_FAILURES / "torch-2-chunked-loss.json"),
)
def torch_linear_cross_entropy_default_chunks(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return upstream.linear(inputs, options, torch.nn.LinearCrossEntropyOptions())


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
    return upstream.linear(
        inputs,
        options,
        torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=4, acc_policy=POLICY, acc_dtype=torch.promote_types(inputs.hidden.dtype, torch.float32)
        ),
    )


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
    return upstream.parallel(inputs, options, mesh)


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
    return upstream.parallel(inputs, options, mesh)
