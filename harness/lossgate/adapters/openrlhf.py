# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's losses. They multiply by the mask, and divide by their own counts if given none.

Not judged: `label_smoothing` of `DPOLoss`, `margin` of `PairWiseLoss`, the gates `binary_kl` and
`tv` of `PolicyLoss`, and means over sequences in `SFTLoss` and `ValueLoss`, which no spec has;
`is_correction_level` and `compute_approx_kl`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import (
    ICEPOP,
    LOG_SOFTMAX,
    NO_SAMPLES,
    TIS,
    clamped_at,
    entry_of,
    ignoring,
    load,
    pair_sums,
    rows,
)
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.supports import ANY, Excluded

entry = entry_of("openrlhf")
loss = load("openrlhf", "openrlhf.models.loss", bare="openrlhf openrlhf.models", absent="deepspeed")
logits_of = load("openrlhf", "openrlhf.models.utils")

_PG = (
    clamped_at(20)
    | {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": ANY, "ratio_clip_max": ANY}
    | {"samples": NO_SAMPLES}
)
_BY_SEQUENCE = _PG | {"token_level_loss": False}
_OWN = {"under_mask": "usual", "counts": "own", "untrained": "nan"}


def _policy(x, o, counts=None, **given):
    new, old, advantages, mask, sampler = rows(x, "logprobs prev_logprobs advantages mask generation_logprobs")
    made = loss.PolicyLoss(o.ratio_clip_min, o.ratio_clip_max, o.ratio_clip_c, o.token_level_loss, **given)
    return made(new, old, advantages, mask, sampler, **counts or {})[0]


def _corrected(x, o, **given):
    bounds = [o.truncated_importance_sampling_ratio_min or 0.0, o.truncated_importance_sampling_ratio]
    return _policy(x, o, is_correction_threshold=bounds, **given)


@entry("clipped_pg", "logprobs", **_OWN, supports=_PG | {"ratio_clip_c": ANY})
def ppo(x, o, mesh):
    return _policy(x, o)


@entry("clipped_pg", "logprobs", under_mask="usual", untrained="nan", supports=_PG | {"ratio_clip_c": ANY})
def ppo_of_global_tokens(x, o, mesh):
    return _policy(x, o, {"batch_num_tokens": x.valid_tokens})


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_BY_SEQUENCE | {"ratio_clip_c": ANY})
def ppo_of_sequences(x, o, mesh):
    return _policy(x, o, {"global_batch_size": x.valid_sequences})


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_BY_SEQUENCE | {"sequence_level_importance_ratios": True})
def gspo(x, o, mesh):
    return _policy(x, o, {"global_batch_size": x.valid_sequences}, policy_loss_type="gspo")


@entry("clipped_pg", "logprobs", **_OWN, supports=_PG | TIS | {"truncated_importance_sampling_ratio_min": (None, 0.5)})
def tis(x, o, mesh):
    return _corrected(x, o, is_correction_level="token", is_correction_mode="clip")


@entry("clipped_pg", "logprobs", **_OWN, supports=_PG | ICEPOP)
def icepop(x, o, mesh):
    return _corrected(x, o, is_correction_level="token", is_correction_mode="mask")


@entry("value", "values", **_OWN, supports={"cliprange": ANY})
def value(x, o, mesh):
    return loss.ValueLoss(o.cliprange)(*rows(x, "values old_values returns mask"))


def _pairs(x):
    chosen, rejected, reference_chosen, reference_rejected = pair_sums(x, "logprobs", "reference_logprobs")
    return chosen, rejected, reference_chosen, reference_rejected


_DPO = {"reference_policy_kl_penalty": ANY, "samples": NO_SAMPLES}


@entry("dpo", "logprobs", counts="own", untrained="never", supports=_DPO)
def dpo(x, o, mesh):
    return loss.DPOLoss(o.reference_policy_kl_penalty)(*_pairs(x))[0]


@entry("dpo", "logprobs", counts="own", untrained="never", supports=_DPO | {"loss_type": "ipo"})
def ipo(x, o, mesh):
    return loss.DPOLoss(o.reference_policy_kl_penalty, ipo=True)(*_pairs(x))[0]


@entry("preference", "rewards", counts="own", untrained="never", supports={"samples": NO_SAMPLES})
def reward_pairs(x, o, mesh):
    return loss.PairWiseLoss()(x.rewards[0::2], x.rewards[1::2])


@entry("preference", "rewards", counts="own", untrained="never", supports={"samples": NO_SAMPLES})
def reward_pairs_by_exp(x, o, mesh):
    return loss.LogExpLoss()(x.rewards[0::2], x.rewards[1::2])


@entry("nll", "logprobs", **_OWN)
def sft(x, o, mesh):
    return loss.SFTLoss()(*rows(x, "logprobs mask"))


@entry("nll", "logits", **LOG_SOFTMAX, tokens="rows", counts="own", untrained="nan")
def language_model(x, o, mesh):
    return loss.GPTLMLoss()(x.to_rows(x.logits), ignoring(x, x.input_ids))


_NO_ROWS = {"empty": Excluded("rank", because="in bfloat16 it stacks rows, and no rows raise an error")}


@entry("token_logprobs", "logits", **LOG_SOFTMAX, supports=_NO_ROWS, differentiable=("logprobs",))
def logprobs(x, o, mesh):
    return Outputs(logprobs=logits_of.log_probs_from_logits(x.logits, x.labels))
