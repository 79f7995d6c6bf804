# SPDX-License-Identifier: Apache-2.0
"""The cross-entropies of PyTorch.

Not judged: class weights (`weight`) and probabilities as targets of `cross_entropy`, which no spec
has; `label_smoothing` of `linear_cross_entropy`, and `mse_loss` as a value loss, which have no
adapter yet.
"""

# pyright: reportMissingParameterType=false

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from lossgate.adapters.support import LOG_SOFTMAX, entry_of, ignoring, load, rounds
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY

entry = entry_of("torch")
load("torch", "torch.nn.functional")

CHUNK = 16


def normalised(total, x, o):
    return total if o.reduction == "sum" else total / x.valid_tokens.clamp(min=1)


@entry("nll", "logits", **LOG_SOFTMAX, axes=("dp", "cp"), supports={"reduction": ANY})
def cross_entropy(x, o, mesh):
    return normalised(F.cross_entropy(x.logits, ignoring(x), reduction="sum"), x, o)


@entry("nll", "logits", **LOG_SOFTMAX, counts="own", untrained="nan")
def cross_entropy_mean(x, o, mesh):
    return F.cross_entropy(x.logits, ignoring(x))


@entry("nll", "logits", **LOG_SOFTMAX, axes=("dp", "cp"))
def nll_of_log_softmax(x, o, mesh):
    return normalised(F.nll_loss(x.logits.log_softmax(-1), ignoring(x), reduction="sum"), x, o)


@entry("label_smoothing", "logits", **LOG_SOFTMAX, minus_inf="never", axes=("dp", "cp"), supports={"smoothing": ANY})
def smoothed_cross_entropy(x, o, mesh):
    total = F.cross_entropy(x.logits, ignoring(x), reduction="sum", label_smoothing=o.smoothing)
    return total / x.valid_tokens.clamp(min=1)


@entry(
    "divergence",
    "logits",
    **rounds("logits", "logsumexp", "logprobs"),
    minus_inf="never",
    axes=("dp", "cp"),
    supports={"temperature": ANY},
)
def kl_div(x, o, mesh):
    student, teacher = ((logits / o.temperature).log_softmax(-1) for logits in (x.logits, x.teacher_logits))
    losses = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return losses.where(x.mask, 0.0).sum() / x.valid_tokens.clamp(min=1)


@entry(
    "token_logprobs",
    "logits",
    **LOG_SOFTMAX,
    axes=("dp", "cp"),
    supports={"temperature": ANY},
    differentiable=("logprobs",),
)
def logprobs(x, o, mesh):
    return Outputs(logprobs=-F.cross_entropy(x.logits / o.temperature, x.labels, reduction="none"))


def linear(x, o, chunking):
    given: Any = {"linear_bias": x.bias, "reduction": "sum", "options": chunking}
    return normalised(F.linear_cross_entropy(x.hidden, x.weight, ignoring(x), **given), x, o)


_LINEAR = {"axes": ("dp", "cp"), "supports": {"reduction": ANY, "bias": ANY}}


@entry("nll", "hidden", **_LINEAR, **LOG_SOFTMAX)
def linear_cross_entropy(x, o, mesh):
    return linear(x, o, None)


@entry("nll", "hidden", **_LINEAR, precision=Precision(grads_in_forward=True), tiles={"token": CHUNK})
def chunked_linear_cross_entropy(x, o, mesh):
    accumulate = torch.promote_types(x.hidden.dtype, torch.float32)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, acc_policy="accurate", acc_dtype=accumulate)
    return linear(x, o, options)


if not hasattr(F, "linear_cross_entropy"):  # it came with 2.13
    del linear_cross_entropy, chunked_linear_cross_entropy


# Backward, which lossgate calls after the kernel, must happen in the context, too.
_loss_parallel = loss_parallel()
_loss_parallel.__enter__()


def parallel(x, o, mesh):
    shape = torch.Size((len(x.labels), x.vocab_size))
    placed: Any = {"run_check": False, "shape": shape, "stride": (shape[1], 1)}
    logits = DTensor.from_local(x.logits, mesh["tp"], [Shard(1)], **placed)
    total: Any = F.cross_entropy(logits, ignoring(x), reduction="sum")
    return normalised(total.to_local(), x, o)


@entry("nll", "logits", axes=("dp", "cp", "tp"), supports={"reduction": ANY, "vocab_split": "even"})
def parallel_cross_entropy(x, o, mesh):
    return parallel(x, o, mesh)
