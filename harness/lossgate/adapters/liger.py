# SPDX-License-Identifier: Apache-2.0
"""Liger's losses: Triton kernels, which write to their inputs, and chunked losses in torch.

Not judged: `LigerFusedLinearORPOLoss`, its CPO, SimPO, KTO and cosine siblings, `LigerTVDLoss`,
DPO's `hinge`, `robust` and others, and GRPO's `sapo`, `vespo` and `luspo`, which no spec has;
`softcap`, which needs a GPU; GRPO's `grpo`, `bnpo` and `dr_grpo`, `LigerKLDIVLoss` and
`LigerVocabParallelCrossEntropy`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

from typing import Any

import torch

from lossgate.adapters.support import (
    BOTH,
    INTERPRETED,
    NO_SAMPLES,
    ONE_EACH,
    UNBOUNDED_KL,
    chosen_first,
    entry_of,
    ignoring,
    load,
    mean,
    rows,
    rows_of_labels,
)
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.contract import Contract
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY, Excluded

entry = entry_of("liger")
functional = load("liger", "liger_kernel.transformers.functional")
chunked = load("liger", "liger_kernel.chunked_loss")
triton_grpo_loss = load("liger", "liger_kernel.transformers.grpo_loss", "triton_grpo_loss")
scaled = load("liger", "liger_kernel.ops", "LigerFusedLinearScaledCrossEntropyFunction")

# The interpreter is no place for the threads of several ranks, nor does it take their soft-cap.
_LOGITS = {"axes": (), "minus_inf": "never", "inputs": "written"}
_HIDDEN = {"axes": (), "precision": Precision(grads_in_forward=True)}
_MEAN = {"counts": "own", "supports": INTERPRETED}


@entry("nll", "logits", **_LOGITS, supports=INTERPRETED)
def cross_entropy(x, o, mesh):
    return mean(x, functional.liger_cross_entropy(x.logits, ignoring(x), reduction="sum"))


@entry("nll", "logits", **_LOGITS, **_MEAN)
def cross_entropy_mean(x, o, mesh):
    return functional.liger_cross_entropy(x.logits, ignoring(x))


@entry("label_smoothing", "logits", **_LOGITS, counts="own", supports=INTERPRETED | {"smoothing": ANY})
def smoothed_cross_entropy(x, o, mesh):
    return functional.liger_cross_entropy(x.logits, ignoring(x), label_smoothing=o.smoothing)


@entry("z_loss", "logits", **_LOGITS, counts="own", supports=INTERPRETED | {"z_loss_weight": ANY})
def cross_entropy_with_z_loss(x, o, mesh):
    return functional.liger_cross_entropy(x.logits, ignoring(x), lse_square_scale=o.z_loss_weight)


@entry("nll", "hidden", **_HIDDEN, supports=INTERPRETED | {"bias": ANY})
def fused_linear_cross_entropy(x, o, mesh):
    given = {"bias": x.bias, "reduction": "sum"}
    return mean(x, functional.liger_fused_linear_cross_entropy(x.hidden, x.weight, ignoring(x), **given))


@entry("nll", "hidden", **_HIDDEN, **_MEAN)
def fused_linear_cross_entropy_mean(x, o, mesh):
    return functional.liger_fused_linear_cross_entropy(x.hidden, x.weight, ignoring(x))


@entry("label_smoothing", "hidden", **_HIDDEN, counts="own", supports=INTERPRETED | {"smoothing": ANY, "bias": ANY})
def fused_linear_smoothed(x, o, mesh):
    given = {"bias": x.bias, "label_smoothing": o.smoothing}
    return functional.liger_fused_linear_cross_entropy(x.hidden, x.weight, ignoring(x), **given)


@entry("z_loss", "hidden", **_HIDDEN, counts="own", supports=INTERPRETED | {"z_loss_weight": ANY, "bias": ANY})
def fused_linear_with_z_loss(x, o, mesh):
    given = {"bias": x.bias, "lse_square_scale": o.z_loss_weight}
    return functional.liger_fused_linear_cross_entropy(x.hidden, x.weight, ignoring(x), **given)


@entry("token_logprobs", "hidden", axes=(), supports=INTERPRETED | {"temperature": ANY}, **BOTH)
def fused_linear_logprobs(x, o, mesh):
    losses, entropy = scaled.apply(x.hidden, x.weight, x.labels, o.temperature, -100, 1, True)
    return Outputs(logprobs=-losses, token_entropy=entropy)


_JSD = {"divergence_type": "jsd", "beta": ANY}


@entry("divergence", "logits", axes=(), minus_inf="never", counts="own", supports=INTERPRETED | _JSD)
def jsd(x, o, mesh):
    student, teacher = (logits.log_softmax(-1) for logits in (x.logits, x.teacher_logits))
    return functional.liger_jsd(student, teacher, ignoring(x), o.beta)


_WIDE = {"large": Excluded("vocabulary", "tokens", because="the teacher's weight is an identity of that size")}
_SOFT = _JSD | {"temperature": ANY} | _WIDE
_FUNC = {"precision": Precision(grads_in_forward=True), "hooks": "refused"}


@entry("divergence", "hidden", **_HIDDEN, counts="own", supports=INTERPRETED | _SOFT)
def fused_linear_jsd(x, o, mesh):
    teacher = x.teacher_logits, torch.eye(x.vocab_size, device=x.hidden.device)
    given = {"jsd_beta": o.beta, "temperature": o.temperature}
    return functional.liger_fused_linear_jsd(x.hidden, x.weight, *teacher, ignoring(x), **given)


@entry("divergence", "hidden", **_HIDDEN, counts="own", supports=INTERPRETED | {"temperature": ANY})
def fused_linear_kl(x, o, mesh):
    teacher = (x.teacher_logits / o.temperature).softmax(-1)
    given = {"shift_labels": ignoring(x), "temperature": o.temperature}
    return functional.liger_fused_linear_kl_div(x.hidden, x.weight, teacher, **given)


@entry("divergence", "hidden", **_FUNC, counts="own", supports=_SOFT)
def chunked_jsd(x, o, mesh):
    made = chunked.LigerFusedLinearJSDLoss(0.0, 1.0, o.beta, temperature=o.temperature, compiled=False, chunk_size=16)
    return made(x.hidden, x.weight, x.teacher_logits, torch.eye(x.vocab_size, device=x.hidden.device), ignoring(x))


_AVERAGED: Any = {"dp": "avg"}
_CHUNKED = {
    "precision": Precision(grads_in_forward=True),
    "contract": Contract(loss=_AVERAGED, grads=dict.fromkeys(("hidden", "weight", "bias"), _AVERAGED)),
}
_GRPO = (
    {"use_rho_correction": False, "beta": (0.0, 0.05), "clip_lower": ANY, "clip_higher": ANY, "temperature": ANY}
    | {"advantages_per": ONE_EACH}
    | UNBOUNDED_KL
)
_NO_CHUNK = Excluded("rank", because="without a sequence it has no chunk to put together")
_GRPO_HEAD = _GRPO | {"bias": ANY, "empty": _NO_CHUNK}


def _chunked_grpo(x, o, loss_type, high=0.0):
    old, reference, mask = rows(x, "old_logprobs reference_logprobs mask")
    clips = {"epsilon_low": o.clip_lower, "epsilon_high": high + o.clip_higher}
    made = chunked.LigerFusedLinearGRPOLoss(
        o.beta, compiled=False, use_ref_model=o.beta > 0, loss_type=loss_type, temperature=o.temperature, **clips
    )
    given = (
        x.to_rows(x.hidden),
        x.weight,
        x.to_rows(x.labels),
        mask,
        x.per_sequence(x.advantages),
        x.bias,
        reference,
        old,
    )
    return made(*given, num_items_in_batch=x.valid_tokens)[0]


@entry("grpo", "hidden", **_CHUNKED, under_mask="usual", supports=_GRPO_HEAD)
def chunked_dapo(x, o, mesh):
    return _chunked_grpo(x, o, "dapo")


@entry("grpo", "hidden", **_CHUNKED, under_mask="usual", supports=_GRPO_HEAD | {"loss_fn": "cispo"})
def chunked_cispo(x, o, mesh):
    return _chunked_grpo(x, o, "cispo", 1.0)


@entry("grpo", "logits", axes=(), minus_inf="never", inputs="written", supports=INTERPRETED | _GRPO)
def triton_grpo(x, o, mesh):
    old, reference, mask = rows(x, "old_logprobs reference_logprobs mask")
    logits, none = x.to_rows(x.logits), x.logits.new_zeros(x.sequences, 1, x.logits.shape[1])
    given = old, reference, x.to_rows(x.labels), x.per_sequence(x.advantages), mask
    own = {"temperature": o.temperature, "beta": o.beta, "eps_low": o.clip_lower, "eps_high": o.clip_higher}
    logits = torch.cat([logits, none], 1)
    return triton_grpo_loss(logits, *given, **own, reduce=True, num_items_in_batch=x.valid_tokens)[0]


_ITSELF = {"reference": Excluded("near", "far", "equal", because="it computes the reference itself")}
_DPO = {"reference_policy_kl_penalty": ANY, "bias": ANY, "samples": NO_SAMPLES} | _ITSELF


@entry("dpo", "hidden", **_FUNC, counts="own", untrained="never", supports=_DPO)
def chunked_dpo(x, o, mesh):
    made = chunked.LigerFusedLinearDPOLoss(beta=o.reference_policy_kl_penalty, compiled=False)
    policy, reference = (chosen_first(x.to_rows(hidden)) for hidden in (x.hidden, x.reference_hidden))
    labels = chosen_first(rows_of_labels(x))
    return made(x.weight, policy, labels, x.bias, reference, x.reference_weight)[0]
