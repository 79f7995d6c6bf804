# SPDX-License-Identifier: Apache-2.0
"""AReaL's losses. They get packed sequences, and divide by their own counts.

Not judged: `sapo_loss_fn`, `m2_threshold`, `importance_sampling_level`, and `loss_fn_type` of the
critic, which no spec has.
"""

# pyright: reportMissingParameterType=false

from types import SimpleNamespace

import torch
from torch.nn.functional import pad

from lossgate.adapters.support import BOTH, ICEPOP, NO_SAMPLES, TIS, UPCASTS, entry_of, load
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.supports import ANY

_BARE = "areal areal.utils areal.trainer areal.trainer.sft areal.trainer.dpo areal.trainer.rw"
_ABSENT = (
    "areal.api areal.infra areal.utils.data areal.utils.logging areal.experimental areal.utils.stats_tracker "
    "areal.utils.perf_tracer areal.engine ray areal.utils.network areal.utils.constants"
)

entry = entry_of("areal")
functional = load("areal", "areal.utils.functional", bare=_BARE, absent=_ABSENT)
sft_engine = load("areal", "areal.trainer.sft.lm_engine", bare=_BARE, absent=_ABSENT)
rw_engine = load("areal", "areal.trainer.rw.rw_engine", bare=_BARE, absent=_ABSENT)
dpo_engine = load("areal", "areal.trainer.dpo.dpo_engine", bare=_BARE, absent=_ABSENT)
silent = SimpleNamespace(denominator=lambda **named: None, stat=lambda **named: None)
sft_engine.stats_tracker = rw_engine.stats_tracker = dpo_engine.stats_tracker = silent
sft_engine.get_batch_size = lambda *given: 0

_PG = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": ANY, "ratio_clip_max": ANY, "samples": NO_SAMPLES}


def _actor(x, o, **given):
    clips = {"eps_clip": o.ratio_clip_min, "eps_clip_higher": o.ratio_clip_max, "c_clip": o.ratio_clip_c}
    logprobs = x.logprobs, x.prev_logprobs, x.generation_logprobs
    return functional.ppo_actor_loss_fn(*logprobs, x.advantages, loss_mask=x.mask, **clips, **given)[0]


@entry("clipped_pg", "logprobs", under_mask="usual", counts="own", supports=_PG | {"ratio_clip_c": ANY})
def ppo(x, o, mesh):
    return _actor(x, o)


def _decoupled(x, o, action, lower=None):
    bounds = {"lower": lower, "upper": o.truncated_importance_sampling_ratio}
    of_tokens = SimpleNamespace(level="token", action=action, metric="ratio", agg="mean", **bounds)
    return _actor(x, o, rejection_sampling=of_tokens)


@entry("clipped_pg", "logprobs", under_mask="usual", counts="own", supports=_PG | TIS)
def decoupled_tis(x, o, mesh):
    return _decoupled(x, o, "clamp")


@entry("clipped_pg", "logprobs", under_mask="usual", counts="own", supports=_PG | ICEPOP)
def decoupled_icepop(x, o, mesh):
    return _decoupled(x, o, "mask", o.truncated_importance_sampling_ratio_min)


@entry("value", "values", under_mask="usual", counts="own", untrained="nan", supports={"cliprange": (0.2, 0.5)})
def critic(x, o, mesh):
    return functional.ppo_critic_loss_fn(x.values, x.old_values, x.returns, o.cliprange, x.mask)[0]


@entry("nll", "logprobs", under_mask="usual", counts="own", supports={"epsilon": 1e-5})
def sft(x, o, mesh):
    return sft_engine.compute_packed_sft_loss(
        x.logprobs, None, {"cu_seqlens": x.cu_seqlens_padded, "loss_mask": x.mask}
    )


_SPLIT, _EVEN = {"axes": ("dp", "cp", "tp")}, {"vocab_split": "even"}
_DPO = {"reference_policy_kl_penalty": ANY, "samples": NO_SAMPLES}


def _pairs(x, o, loss_type):
    # A sequence of AReaL has a first token that no log-probability is of, so a place more.
    logprobs, of_reference = (pad(x.to_rows(field), (0, 1)).flatten() for field in (x.logprobs, x.reference_logprobs))
    mask = pad(x.to_rows(x.mask), (1, 0))
    given = {"cu_seqlens": torch.arange(len(mask) + 1) * mask.shape[1], "loss_mask": mask.flatten()}
    given |= {"ref_logprobs": of_reference}
    return dpo_engine.compute_dpo_loss(logprobs, None, given, beta=o.reference_policy_kl_penalty, loss_type=loss_type)


# Its engine makes no call for a batch without a pair.
_PAIRS = {"under_mask": "usual", "counts": "own", "untrained": "never"}


@entry("dpo", "logprobs", **_PAIRS, supports=_DPO)
def dpo_of_pairs(x, o, mesh):
    return _pairs(x, o, "sigmoid")


@entry("dpo", "logprobs", **_PAIRS, supports=_DPO | {"preference_average_log_probs": True, "loss_type": "ipo"})
def ipo_of_pairs(x, o, mesh):
    return _pairs(x, o, "ipo")


@entry("preference", "rewards", counts="own", untrained="never", supports={"samples": NO_SAMPLES})
def reward_pairs(x, o, mesh):
    return rw_engine.compute_rw_loss(x.rewards, {"cu_seqlens": torch.arange(len(x.rewards) + 1)})


@entry(
    "token_logprobs", "logits", **UPCASTS, empty_ranks="refused", **_SPLIT, supports=_EVEN, differentiable=("logprobs",)
)
def logprobs(x, o, mesh):
    return Outputs(logprobs=functional.gather_logprobs(x.logits, x.labels, 1.0, mesh.get_group("tp"), chunk_size=16))


@entry(
    "token_logprobs",
    "logits",
    **UPCASTS,
    empty_ranks="refused",
    **_SPLIT,
    **BOTH,
    minus_inf="never",
    supports=_EVEN | {"temperature": ANY},
)
def logprobs_and_entropy(x, o, mesh):
    given = x.logits, x.labels, o.temperature, mesh.get_group("tp")
    found, entropy = functional.gather_logprobs_entropy(*given, chunk_size=16)
    return Outputs(logprobs=found, token_entropy=entropy)
