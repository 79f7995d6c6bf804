# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's losses: vocabulary-parallel ones, and tiles of any loss of an lm-head."""

# pyright: reportMissingParameterType=false

from types import SimpleNamespace

import torch.distributed
import torch.nn.functional as F

from lossgate.adapters.support import IGNORED, UPCASTS, entry_of, ignoring, load, mean
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY

entry = entry_of("deepspeed")
parallel = load("deepspeed", "deepspeed.sequence.cross_entropy")
tiled = load("deepspeed", "deepspeed.runtime.sequence_parallel.ulysses_sp", "TiledFusedLogitsLoss")
parallel.dist = parallel.pg_utils.dist = torch.distributed  # deepspeed.comm would have to be started

_PARALLEL = {"axes": ("dp", "cp", "tp"), "supports": {"vocab_split": ("balanced", "even")}}
_SHARDS = 4


def _losses(x, labels, mesh, reduction):
    bounds = {"vocab_start_index": x.vocab_start, "vocab_end_index": x.vocab_end}
    given = {"tp_group": mesh.get_group("tp"), "reduction": reduction}
    return parallel.vocab_parallel_cross_entropy(x.logits, labels, **given, **bounds)


@entry("nll", "logits", **UPCASTS, **_PARALLEL)
def vocab_parallel_cross_entropy(x, o, mesh):
    return mean(x, _losses(x, ignoring(x), mesh, "sum"))


@entry("nll", "logits", **UPCASTS, **_PARALLEL | {"axes": ("dp", "tp")}, counts="own")
def vocab_parallel_cross_entropy_mean(x, o, mesh):
    return _losses(x, ignoring(x), mesh, "mean")


@entry("token_logprobs", "logits", **UPCASTS, **_PARALLEL, differentiable=("logprobs",))
def vocab_parallel_logprobs(x, o, mesh):
    return Outputs(logprobs=-_losses(x, x.labels, mesh, "none"))


_TILED = {"precision": Precision(grads_in_forward=True), "supports": {"bias": ANY}}


def _tiles(x, reduction):
    def loss(head, hidden, labels):
        logits = F.linear(hidden, head.weight, head.bias)
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction=reduction)

    head = SimpleNamespace(weight=x.weight, bias=x.bias)
    weights = [x.weight] if x.bias is None else [x.weight, x.bias]
    return tiled.apply(loss, head, x.hidden[None], ignoring(x)[None], None, _SHARDS, weights, reduction)


@entry("nll", "hidden", **_TILED)
def tiled_sum(x, o, mesh):
    return mean(x, _tiles(x, "sum"))


@entry("nll", "hidden", **_TILED, counts="own", untrained="nan")
def tiled_mean(x, o, mesh):
    return _tiles(x, "mean")
