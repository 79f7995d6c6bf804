# SPDX-License-Identifier: Apache-2.0
"""TRL's losses. Those of trainers are methods, which get what they read of their trainer.

Not judged: DPO's `hinge`, `robust`, `apo_zero` and others, GRPO's `sapo`, `vespo` and `luspo`,
SFT's `dft`, `ld_alpha`, `use_weighting`, `off_policy_mask_threshold`, `top_entropy_quantile`,
`use_bias_correction_kl`, and `KTOTrainer`, `CPOTrainer`, `ORPOTrainer`, `RLOOTrainer` and
`GMPOTrainer`, which no spec has; `DistillationTrainer`, `RewardTrainer`, GRPO's `delta` and
`selective_log_softmax_and_entropy`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch.nn.functional import pad

from lossgate.adapters.support import (
    BOTH,
    FULL_RANKS,
    LOG_SOFTMAX,
    NO_SAMPLES,
    ONE_EACH,
    UNBOUNDED_KL,
    chosen_first,
    entry_of,
    load,
    mean,
    rounds,
    rows,
    rows_of_labels,
)
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.supports import ANY

_ABSENT = "datasets pandas pyarrow trl.experimental.utils trl.generation trl.data_utils trl.chat_template_utils"

entry = entry_of("trl")
grpo_trainer = load("trl", "trl.trainer.grpo_trainer", "GRPOTrainer", bare="trl", absent=_ABSENT)
dpo_trainer = load("trl", "trl.trainer.dpo_trainer", "DPOTrainer", absent=_ABSENT)
gkd_trainer = load("trl", "trl.experimental.gkd.gkd_trainer", "GKDTrainer", absent=_ABSENT)
selective_log_softmax, entropy_from_logits = load(
    "trl", "trl.trainer.utils", "selective_log_softmax", "entropy_from_logits", absent=_ABSENT
)
chunked_logprobs = load("trl", "trl.kernels", "ChunkedLogProbFunction")


def _same(value, *given, **named):
    return value


_ACCELERATOR = SimpleNamespace(num_processes=1, gather=_same, gather_for_metrics=_same, reduce=_same, device="cpu")
_TRAINER = {"accelerator": _ACCELERATOR, "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
_GRPO = {
    **_TRAINER,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "current_gradient_accumulation_steps": 1,
    "use_vllm": False,
    "_entropy_bonus_enabled": False,
    "args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
}


def _grpo(x, loss_type, old, advantages, beta, low, high, level="token", length=None):
    new, reference, mask = rows(x, "logprobs reference_logprobs mask")
    own = {
        "loss_type": loss_type,
        "beta": beta,
        "epsilon_low": low,
        "epsilon_high": high,
        "max_completion_length": length,
    }
    trainer = SimpleNamespace(**_GRPO, **own, importance_sampling_level=level, _metrics={"train": defaultdict(list)})
    trainer._get_per_token_logps_and_entropies = lambda *given, **named: (new, torch.zeros_like(new), None)
    ids, none = x.to_rows(x.labels), x.labels.new_zeros(len(mask), 0)
    inputs = {"prompt_ids": none, "prompt_mask": none, "completion_ids": ids, "completion_mask": mask}
    inputs |= {"old_per_token_logps": x.to_rows(old), "ref_per_token_logps": reference, "advantages": advantages}
    return grpo_trainer._compute_loss(trainer, None, inputs | {"num_items_in_batch": x.valid_tokens})


def _of_tokens(x, o, loss_type, high=0.0, length=None):
    advantages, clips = x.to_rows(x.advantages), (o.clip_lower, high + o.clip_higher)
    return _grpo(x, loss_type, x.old_logprobs, advantages, o.beta, *clips, length=length)


def _of_sequences(x, o, level):
    advantages, clips = x.per_sequence(x.advantages), (o.ratio_clip_min, o.ratio_clip_max)
    return _grpo(x, "grpo", x.prev_logprobs, advantages, o.reference_policy_kl_penalty, *clips, level=level)


_TOKENS = {"use_rho_correction": False, "beta": (0.0, 0.05), "clip_lower": ANY, "clip_higher": ANY} | UNBOUNDED_KL
_SEQUENCES = (
    {
        "token_level_loss": False,
        "reference_policy_kl_penalty": 0.0,
        "ratio_clip_min": ANY,
        "ratio_clip_max": ANY,
    }
    | {"advantages_per": ONE_EACH, "samples": NO_SAMPLES}
    | FULL_RANKS
)
_GSPO = _SEQUENCES | {"sequence_level_importance_ratios": True}


@entry("grpo", "logprobs", under_mask="usual", supports=_TOKENS)
def dapo(x, o, mesh):
    return _of_tokens(x, o, "dapo")


@entry("grpo", "logprobs", under_mask="usual", supports=_TOKENS | {"loss_fn": "cispo"})
def cispo(x, o, mesh):
    return _of_tokens(x, o, "cispo", 1.0)


@entry("grpo", "logprobs", under_mask="usual", counts="own", supports=_TOKENS)
def bnpo(x, o, mesh):
    return _of_tokens(x, o, "bnpo")


@entry("grpo", "logprobs", axes=(), under_mask="usual", supports=_TOKENS | {"loss_denominator": (512.0, 7.0)})
def dr_grpo(x, o, mesh):
    """TRL divides by a length times the sequences of its rank: on one rank by any number."""
    return _of_tokens(x, o, "dr_grpo", length=o.loss_denominator / x.sequences)


@entry("clipped_pg", "logprobs", under_mask="usual", counts="own", supports=_SEQUENCES)
def grpo(x, o, mesh):
    return _of_sequences(x, o, "token")


@entry("clipped_pg", "logprobs", under_mask="usual", counts="own", supports=_GSPO)
def gspo(x, o, mesh):
    return _of_sequences(x, o, "sequence")


def _dpo(x, o, loss_type):
    given = [chosen_first(x.to_rows(one.where(x.mask, 0.0))) for one in (x.logprobs, x.reference_logprobs)]
    new, reference = given
    mask, flags = pad(chosen_first(x.to_rows(x.mask)), (1, 0)).long(), torch.zeros_like(new, dtype=torch.bool)
    outputs = SimpleNamespace(log_probs=new, entropy=new.detach(), mean_logits=new.detach(), is_top1=flags)
    trainer = SimpleNamespace(**_TRAINER, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl")
    trainer.loss_types, trainer.loss_weights, trainer.use_weighting = [loss_type], [1.0], False
    trainer.beta, trainer._metrics = o.reference_policy_kl_penalty, {"train": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    chosen, rejected = reference.sum(1).chunk(2)
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return dpo_trainer._compute_loss(trainer, lambda **named: outputs, inputs, False)


_PAIRS = {"counts": "own", "untrained": "never"}
_DPO = {"reference_policy_kl_penalty": ANY, "samples": NO_SAMPLES}
_MEANS = _DPO | {"preference_average_log_probs": True}


@entry("dpo", "logprobs", **_PAIRS, supports=_DPO)
def dpo(x, o, mesh):
    return _dpo(x, o, "sigmoid")


@entry("dpo", "logprobs", **_PAIRS, supports=_MEANS | {"loss_type": "ipo"})
def ipo(x, o, mesh):
    return _dpo(x, o, "ipo")


@entry("dpo", "logprobs", **_PAIRS, supports=_MEANS)
def dpo_of_means(x, o, mesh):
    return _dpo(x, o, "sigmoid_norm")


def _jsd(x, o, beta):
    logits = x.to_rows(x.logits), x.to_rows(x.teacher_logits)
    count = x.valid_tokens.clamp(min=1)
    given = {"beta": beta, "temperature": o.temperature, "num_items_in_batch": count}
    return gkd_trainer.generalized_jsd_loss(*logits, rows_of_labels(x), **given)


_KL = rounds("logits", "logsumexp", "logprobs") | {"minus_inf": "never"}


@entry("divergence", "logits", **_KL, supports={"temperature": ANY})
def gkd_forward(x, o, mesh):
    return _jsd(x, o, 0)


@entry("divergence", "logits", **_KL, supports={"temperature": ANY, "divergence_type": "reverse"})
def gkd_reverse(x, o, mesh):
    return _jsd(x, o, 1)


@entry("divergence", "logits", minus_inf="never", supports={"temperature": ANY, "divergence_type": "jsd", "beta": ANY})
def gkd_jsd(x, o, mesh):
    return _jsd(x, o, o.beta)


@entry(
    "token_logprobs",
    "logits",
    **LOG_SOFTMAX,
    minus_inf="never",
    empty_ranks="refused",
    supports={"temperature": ANY},
    **BOTH,
)
def logprobs_and_entropy(x, o, mesh):
    logits, labels = x.to_rows(x.logits), x.to_rows(x.labels)
    found = selective_log_softmax(logits, labels, o.temperature), entropy_from_logits(logits / o.temperature)
    return Outputs(logprobs=x.from_rows(found[0]), token_entropy=x.from_rows(found[1]))


_HEAD = {"temperature": ANY, "bias": ANY, "softcap": ANY}


@entry("token_logprobs", "hidden", **rounds("logits", "dlogits"), supports=_HEAD, tiles={"vocab": 16}, **BOTH)
def chunked_head(x, o, mesh):
    given = x.hidden, x.weight, x.bias, x.labels, o.temperature, 16, o.softcap
    logprobs, entropy, *_ = chunked_logprobs.apply(*given)
    return Outputs(logprobs=logprobs, token_entropy=entropy)


@entry("nll", "hidden", **rounds("logits", "dlogits"), supports=_HEAD, tiles={"vocab": 16})
def chunked_nll(x, o, mesh):
    given = x.hidden, x.weight, x.bias, x.labels, o.temperature, 16, o.softcap
    return mean(x, -chunked_logprobs.apply(*given)[0])
