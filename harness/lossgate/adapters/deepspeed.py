# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's losses: vocabulary-parallel ones, and tiles of any loss of an lm-head.

Not judged: `teacher_top_k` and `pointwise_clip` of `generalized_jsd_loss`, which no spec has; the
backends `liger` and `triton`, which refuse CPU tensors; `FPDT_LogitsLoss`, `ChunkedCausalLMLoss`,
`VocabParallelCausalLMLoss` and `vocab_sequence_parallel_cross_entropy`, which have no adapter yet;
`vocab_parallel_linear_cross_entropy`, whose backward computes the logits again in blocks of another
shape: lossgate cannot yet tell its rounding from a mistake.
"""

# pyright: reportMissingParameterType=false

from types import SimpleNamespace

import torch.distributed
import torch.nn.functional as F

from lossgate.adapters.support import BOTH, IGNORED, UPCASTS, entry_of, ignoring, load, mean
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY

entry = entry_of("deepspeed")
parallel = load("deepspeed", "deepspeed.sequence.cross_entropy")
operations = load("deepspeed", "deepspeed.sequence.vocab_parallel_ops")
chunked = load("deepspeed", "deepspeed.runtime.chunked_cross_entropy")
distilled = load("deepspeed", "deepspeed.runtime.rollout.opsd")
tiled = load("deepspeed", "deepspeed.runtime.sequence_parallel.ulysses_sp", "TiledFusedLogitsLoss")
for module in (parallel, parallel.pg_utils, operations):
    module.dist = torch.distributed  # deepspeed.comm would have to be started

_SPLIT = {"vocab_split": ("balanced", "even")}
_PARALLEL = {"axes": ("dp", "cp", "tp"), "supports": _SPLIT}
_TEMPERED = _SPLIT | {"temperature": ANY}
_SHARDS = 4


def _shard(x, mesh):
    bounds = {"vocab_start_index": x.vocab_start, "vocab_end_index": x.vocab_end}
    return bounds | {"tp_group": mesh.get_group("tp")}


def _losses(x, labels, mesh, reduction):
    return parallel.vocab_parallel_cross_entropy(x.logits, labels, reduction=reduction, **_shard(x, mesh))


@entry("nll", "logits", **UPCASTS, **_PARALLEL)
def vocab_parallel_cross_entropy(x, o, mesh):
    return mean(x, _losses(x, ignoring(x), mesh, "sum"))


@entry("nll", "logits", **UPCASTS, **_PARALLEL | {"axes": ("dp", "tp")}, counts="own")
def vocab_parallel_cross_entropy_mean(x, o, mesh):
    return _losses(x, ignoring(x), mesh, "mean")


@entry("token_logprobs", "logits", **UPCASTS, **_PARALLEL, differentiable=("logprobs",))
def vocab_parallel_logprobs(x, o, mesh):
    return Outputs(logprobs=-_losses(x, x.labels, mesh, "none"))


@entry("token_logprobs", "logits", **_PARALLEL | {"supports": _TEMPERED}, **BOTH)
def vocab_parallel_logprobs_and_entropy(x, o, mesh):
    logits = x.logits / o.temperature
    logprobs = operations.vocab_parallel_logprobs(logits, x.labels, **_shard(x, mesh))
    return Outputs(logprobs=logprobs, token_entropy=operations.vocab_parallel_entropy(logits, mesh.get_group("tp")))


def _kl(x, o, mesh, reverse):
    logits = x.logits / o.temperature, x.teacher_logits / o.temperature
    return mean(x, operations.vocab_parallel_kl_div(*logits, reverse, mesh.get_group("tp")))


@entry("divergence", "logits", **_PARALLEL | {"supports": _TEMPERED})
def vocab_parallel_forward_kl(x, o, mesh):
    return _kl(x, o, mesh, False)


@entry("divergence", "logits", **_PARALLEL | {"supports": _TEMPERED | {"divergence_type": "reverse"}})
def vocab_parallel_reverse_kl(x, o, mesh):
    return _kl(x, o, mesh, True)


@entry("divergence", "logits", minus_inf="never", supports={"temperature": ANY, "divergence_type": "jsd", "beta": ANY})
def generalized_jsd(x, o, mesh):
    given = x.logits[None], x.teacher_logits[None], x.mask[None], o.beta, o.temperature
    return distilled.generalized_jsd_loss(*given).loss_sum / x.valid_tokens.clamp(min=1)


@entry("nll", "logits", **UPCASTS, axes=("dp", "cp"))
def chunked_cross_entropy(x, o, mesh):
    return mean(x, chunked.chunked_cross_entropy(x.logits, ignoring(x), reduction="sum", block_rows=16))


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
