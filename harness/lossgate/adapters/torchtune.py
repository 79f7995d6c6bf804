# SPDX-License-Identifier: Apache-2.0
"""torchtune's losses, without torchao, which its package asks for and no loss does.

Not judged: `RSOLoss`, `SymmetricKLLoss` and `label_smoothing` of `DPOLoss`, which no spec has; the
value term of `PPOLoss` (`value_coeff`) and `get_batch_log_probs`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import (
    LOG_SOFTMAX,
    NO_SAMPLES,
    UPCASTS,
    entry_of,
    ignoring,
    load,
    pair_sums,
    rows,
    rows_of_labels,
)
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.supports import ANY

entry = entry_of("torchtune")
losses = load("torchtune", "torchtune.modules.loss", bare="torchtune torchtune.modules")
rlhf = load("torchtune", "torchtune.rlhf.loss", absent="torchtune.data")
sequences = load("torchtune", "torchtune.rlhf", absent="torchtune.data")

_CHUNKS = 4
_OWN = {"under_mask": "usual", "counts": "own", "minus_inf": "never"}
_REVERSE = {"divergence_type": "reverse"}
_DPO = {"reference_policy_kl_penalty": ANY, "samples": NO_SAMPLES}
_PPO = {"reference_policy_kl_penalty": 0.0, "samples": NO_SAMPLES}


def _chunks(x, name="logits"):
    return list(x.to_rows(getattr(x, name)).chunk(_CHUNKS, dim=1))


def _entropy(x):
    """Returns the mean of the teacher's entropy, which the forward KL of torchtune leaves out: it
    has no gradient.
    """
    logprobs = x.teacher_logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1).where(x.mask, 0.0)
    return entropies.sum() / x.mask.sum().clamp(min=1)


@entry("nll", "logits", **UPCASTS, counts="own", untrained="nan")
def chunked_cross_entropy(x, o, mesh):
    return losses.CEWithChunkedOutputLoss(_CHUNKS)(_chunks(x), rows_of_labels(x))


@entry("divergence", "logits", **UPCASTS, **_OWN)
def forward_kl(x, o, mesh):
    return losses.ForwardKLLoss()(x.logits, x.teacher_logits, ignoring(x)) - _entropy(x)


@entry("divergence", "logits", **UPCASTS, **_OWN, supports=_REVERSE)
def reverse_kl(x, o, mesh):
    return losses.ReverseKLLoss()(x.logits, x.teacher_logits, ignoring(x))


@entry("divergence", "logits", **UPCASTS, **_OWN)
def chunked_forward_kl(x, o, mesh):
    chunked = losses.ForwardKLWithChunkedOutputLoss(_CHUNKS)
    return chunked(_chunks(x), _chunks(x, "teacher_logits"), rows_of_labels(x)) - _entropy(x)


@entry("divergence", "logits", **UPCASTS, **_OWN, untrained="nan", supports=_REVERSE)
def chunked_reverse_kl(x, o, mesh):
    chunked = losses.ReverseKLWithChunkedOutputLoss(_CHUNKS)
    return chunked(_chunks(x), _chunks(x, "teacher_logits"), rows_of_labels(x))


@entry("dpo", "logprobs", counts="own", untrained="never", supports=_DPO)
def dpo(x, o, mesh):
    return rlhf.DPOLoss(o.reference_policy_kl_penalty)(*pair_sums(x, "logprobs", "reference_logprobs"))[0].mean()


@entry("clipped_pg", "logprobs", under_mask="usual", counts="own", supports=_PPO)
def ppo(x, o, mesh):
    new, old, advantages, mask = rows(x, "logprobs prev_logprobs advantages mask")
    made = rlhf.PPOLoss(epsilon=o.ratio_clip_min, value_coeff=0.0)
    return made(old, new, advantages, old, old, old, mask, mask)[0]


@entry("token_logprobs", "logits", **LOG_SOFTMAX, supports={"temperature": ANY}, differentiable=("logprobs",))
def logprobs(x, o, mesh):
    return Outputs(logprobs=sequences.logits_to_logprobs(x.logits[None], x.labels[None], o.temperature)[0])
