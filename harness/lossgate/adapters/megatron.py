# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's cross-entropies, which write to the logits.

Not judged: `te_parallel_cross_entropy`, which is Transformer Engine's and needs a GPU;
`compute_language_model_loss`, which is a part of a model.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import UPCASTS, current_group, entry_of, load, mean
from lossgate.declaration.candidate import Outputs

entry = entry_of("megatron")
plain = load("megatron", "megatron.core.tensor_parallel.cross_entropy")
fused = load("megatron", "megatron.core.fusions.fused_cross_entropy")
group = current_group("tp")
plain.get_tensor_model_parallel_group = group
plain.get_tensor_model_parallel_rank = lambda: group().rank()
plain.get_tensor_model_parallel_world_size = lambda: group().size()

_DECLARED = {"axes": ("dp", "cp", "tp"), "supports": {"vocab_split": "even"}} | {
    "inputs": "written",
    "under_mask": "finite",
}


@entry("nll", "logits", **UPCASTS, **_DECLARED)
def vocab_parallel_cross_entropy(x, o, mesh):
    return mean(x, plain.vocab_parallel_cross_entropy(x.logits, x.labels))


@entry("nll", "logits", **UPCASTS, **_DECLARED, empty_ranks="refused")
def fused_vocab_parallel_cross_entropy(x, o, mesh):
    return mean(x, fused.fused_vocab_parallel_cross_entropy(x.logits, x.labels, mesh.get_group("tp")))


@entry("token_logprobs", "logits", **UPCASTS, **_DECLARED, differentiable=("logprobs",))
def vocab_parallel_logprobs(x, o, mesh):
    return Outputs(logprobs=-plain.vocab_parallel_cross_entropy(x.logits, x.labels))


@entry("label_smoothing", "logits", **UPCASTS, **_DECLARED, minus_inf="never")
def smoothed_cross_entropy(x, o, mesh):
    """Megatron leaves the label itself out of what it spreads: a * V / (V - 1) is a for all."""
    smoothing = o.smoothing * (x.vocab_size - 1) / x.vocab_size
    return mean(x, plain.vocab_parallel_cross_entropy(x.logits, x.labels, smoothing))
