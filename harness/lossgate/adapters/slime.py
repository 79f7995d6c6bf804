# SPDX-License-Identifier: Apache-2.0
"""slime's losses of tokens, which its trainer masks and adds up; and its log-probabilities.

Not judged: `compute_opsm_mask`, which no spec has; `compute_gspo_kl`, `compute_approx_kl`,
`vanilla_tis_function`, `icepop_function`, `value_loss_function` and `sft_loss_function`, which have
no adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import BOTH, NO_GRAPH, NO_SAMPLES, UPCASTS, entry_of, load, mean
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.supports import ANY

entry = entry_of("slime")
utils = load("slime", "slime.utils.ppo_utils", bare="slime slime.utils")

_SPLIT = {"axes": ("dp", "cp", "tp"), "supports": {"vocab_split": "even"} | NO_GRAPH}
_PG = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": ANY, "ratio_clip_max": ANY, "samples": NO_SAMPLES}


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_PG | {"ratio_clip_c": ANY})
def ppo(x, o, mesh):
    clips = o.ratio_clip_min, o.ratio_clip_max, o.ratio_clip_c
    return mean(x, utils.compute_policy_loss(x.prev_logprobs - x.logprobs, x.advantages, *clips)[0])


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_PG | {"use_cispo": True})
def cispo(x, o, mesh):
    clips = o.ratio_clip_min, o.ratio_clip_max
    return mean(x, utils.compute_cispo_loss(x.prev_logprobs - x.logprobs, x.logprobs, x.advantages, *clips)[0])


@entry("token_logprobs", "logits", **UPCASTS, **_SPLIT, **BOTH, minus_inf="never")
def logprobs_and_entropy(x, o, mesh):
    given = {"with_entropy": True, "chunk_size": 16}
    found, entropy = utils.calculate_log_probs_and_entropy(x.logits, x.labels, mesh.get_group("tp"), **given)
    return Outputs(logprobs=found.flatten(), token_entropy=entropy)
