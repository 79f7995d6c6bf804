# SPDX-License-Identifier: Apache-2.0
"""verl's losses. They divide by the counts that their config holds, or by their own.

Not judged: `sapo`, `geo_mean`, `clip_cov`, `kl_cov`, `dppo_tv`, `dppo_kl` and `dro`, which no spec
has; the Triton `linear_cross_entropy`, which needs a GPU; `sft_loss`, `kl_penalty`,
`compute_forward_kl_topk` and `vocab_parallel_log_probs_from_logits`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import (
    BOTH,
    ICEPOP,
    LOG_SOFTMAX,
    NO_SAMPLES,
    ONE_EACH,
    TIS,
    clamped_at,
    entry_of,
    load,
    rounds,
    rows,
)
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.supports import ANY

_BARE = "verl verl.utils verl.trainer verl.trainer.ppo verl.utils.experimental"
_ABSENT = "omegaconf tensordict ray verl.trainer.config verl.workers.config verl.utils.import_utils"

entry = entry_of("verl")
algorithms = load("verl", "verl.trainer.ppo.core_algos", bare=_BARE, absent=_ABSENT)
torch_functional = load("verl", "verl.utils.torch_functional", bare=_BARE, absent=_ABSENT)
correction = load("verl", "verl.trainer.ppo.rollout_corr_helper", bare=_BARE, absent=f"{_ABSENT} verl.protocol")
fused = load("verl", "verl.utils.experimental.torch_functional", "FusedLinearForPPO", bare=_BARE)

_PG = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": ANY, "ratio_clip_max": ANY, "samples": NO_SAMPLES}
_CLAMPED = _PG | clamped_at(20)
_DUAL = _CLAMPED | {"ratio_clip_c": (3.0, 1.75)}
_OWN = {"under_mask": "finite", "counts": "own", "untrained": "nan"}
_BY_SEQUENCE = {"token_level_loss": False}
_GSPO = _PG | clamped_at(10) | _BY_SEQUENCE | {"sequence_level_importance_ratios": True, "advantages_per": ONE_EACH}
_CHECKED = {"under_mask": "usual", "untrained": "error", "empty_ranks": "refused"}
_NO_CLIP = {"reference_policy_kl_penalty": 0.0, "disable_ppo_ratio": True, "samples": NO_SAMPLES}


class _Config(algorithms.ActorConfig):
    """What a loss reads of the actor's config."""

    def __init__(self, o, **counts):
        self.clip_ratio = self.clip_ratio_low = o.ratio_clip_min
        self.clip_ratio_high, self.clip_ratio_c = o.ratio_clip_max, o.ratio_clip_c or float("inf")
        self.global_batch_info = counts

    def get(self, name, default):
        return getattr(self, name)


def _policy(name, x, o, mode="token-mean", weights=None, **counts):
    old, new, advantages, mask = rows(x, "prev_logprobs logprobs advantages mask")
    compute = algorithms.get_policy_loss_fn(name)
    config = _Config(o, **counts)
    return compute(old, new, advantages, mask, mode, config, rollout_is_weights=weights)[0]


@entry("clipped_pg", "logprobs", **_OWN, supports=_DUAL)
def vanilla(x, o, mesh):
    return _policy("vanilla", x, o)


@entry("clipped_pg", "logprobs", under_mask="finite", untrained="nan", supports=_DUAL)
def vanilla_of_global_tokens(x, o, mesh):
    return _policy("vanilla", x, o, batch_num_tokens=x.valid_tokens)


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_CLAMPED | _BY_SEQUENCE | {"ratio_clip_c": 3.0})
def vanilla_of_sequences(x, o, mesh):
    return _policy("vanilla", x, o, "seq-mean-token-mean", global_batch_size=x.valid_sequences)


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_GSPO)
def gspo(x, o, mesh):
    return _policy("gspo", x, o, "seq-mean-token-mean", global_batch_size=x.valid_sequences)


@entry("clipped_pg", "logprobs", **_OWN, supports=_CLAMPED | {"use_cispo": True})
def cispo(x, o, mesh):
    return _policy("cispo", x, o)


@entry("clipped_pg", "logprobs", **_OWN, supports=_NO_CLIP)
def gpg(x, o, mesh):
    return _policy("gpg", x, o)


def _weighed(x, o, threshold):
    old, sampler, mask = rows(x, "prev_logprobs generation_logprobs mask")
    weights, _ = correction.compute_rollout_correction_weights(old - sampler, mask, "token", threshold)
    return _policy("vanilla", x, o, weights=weights, batch_num_tokens=x.valid_tokens)


@entry("clipped_pg", "logprobs", **_CHECKED, supports=_CLAMPED | TIS)
def tis(x, o, mesh):
    return _weighed(x, o, o.truncated_importance_sampling_ratio)


@entry("clipped_pg", "logprobs", **_CHECKED, supports=_CLAMPED | ICEPOP)
def icepop(x, o, mesh):
    bounds = o.truncated_importance_sampling_ratio_min, o.truncated_importance_sampling_ratio
    return _weighed(x, o, f"{bounds[0]}_{bounds[1]}")


@entry("value", "values", **_OWN, supports={"cliprange": (0.2, 0.5)})
def value(x, o, mesh):
    new, returns, old, mask = rows(x, "values returns old_values mask")
    return algorithms.compute_value_loss(new, returns, old, mask, o.cliprange)[0]


@entry("token_logprobs", "logits", **LOG_SOFTMAX, empty_ranks="refused", minus_inf="never", **BOTH)
def logprobs_and_entropy(x, o, mesh):
    entropy = torch_functional.entropy_from_logits(x.logits)
    return Outputs(logprobs=torch_functional.logprobs_from_logits(x.logits, x.labels), token_entropy=entropy)


@entry(
    "token_logprobs",
    "hidden",
    **rounds("logits", "entropy", "dlogits", "accumulate", chunk=16, returned={"token_entropy": "bfloat16"}),
    supports={"temperature": ANY},
    tiles={"token": 16},
    **BOTH,
)
def fused_linear(x, o, mesh):
    logprobs, entropy = fused(chunk_size=16)(x.hidden, x.weight, x.labels, o.temperature)
    return Outputs(logprobs=logprobs, token_entropy=entropy)
