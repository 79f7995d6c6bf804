# SPDX-License-Identifier: Apache-2.0
"""torchtitan's cross-entropies.

Not judged: `ChunkedLossWrapper` and `MTPLoss`, which take modules or outputs of a model;
`DAPOLoss`, `GRPOLoss` and `compute_logprobs`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import UPCASTS, entry_of, ignoring, load, mean
from lossgate.declaration.candidate import Outputs

_ABSENT = "spmd_types torchtitan.config torchtitan.distributed torchtitan.tools"

entry = entry_of("torchtitan")
losses = load("torchtitan", "torchtitan.components.loss", bare="torchtitan torchtitan.components", absent=_ABSENT)
losses.get_spmd_backend = lambda: "none"
# The release takes [B, L, V], and later commits [T, V].
_flattens = "flatten" in losses.cross_entropy_loss.__code__.co_names

_PARALLEL = {"axes": ("dp", "cp", "tp"), "supports": {"vocab_split": "even"}}


@entry("nll", "logits", **UPCASTS, axes=("dp", "cp"))
def cross_entropy(x, o, mesh):
    given = x.logits, ignoring(x)
    return mean(x, losses.cross_entropy_loss(*(one[None] if _flattens else one for one in given)))


@entry("nll", "logits", **UPCASTS, **_PARALLEL)
def parallel_cross_entropy(x, o, mesh):
    given = x.logits, ignoring(x), mesh.get_group("tp"), x.vocab_size
    return mean(x, losses._LossParallelCrossEntropy.apply(*given))


@entry("token_logprobs", "logits", **UPCASTS, **_PARALLEL, differentiable=("logprobs",))
def parallel_logprobs(x, o, mesh):
    given = x.logits, x.labels, mesh.get_group("tp"), x.vocab_size, "none"
    return Outputs(logprobs=-losses._LossParallelCrossEntropy.apply(*given))
