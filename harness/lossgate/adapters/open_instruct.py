# SPDX-License-Identifier: Apache-2.0
"""open-instruct's losses, put together as its trainer does.

Not judged: `simpo_loss`, `wpo_loss`, and `label_smoothing` and `reference_free` of `dpo_loss`,
which no spec has; `dpo_norm`, `log_softmax_and_gather` and `entropy_from_logits`, which have no
adapter yet.
"""

# pyright: reportMissingParameterType=false

from types import SimpleNamespace

import torch

from lossgate.adapters.support import NO_SAMPLES, entry_of, load, pair_sums, rows
from lossgate.declaration.supports import ANY, Excluded
from lossgate.losses import SPECS

_BARE = "open_instruct"
_ABSENT = (
    "pandas olmo_core ray wandb datasets open_instruct.data_loader open_instruct.data_types vllm "
    "open_instruct.logger_utils open_instruct.olmo_core_utils open_instruct.utils open_instruct.tensor_utils "
    "open_instruct.padding_free_collator open_instruct.dataset_transformation open_instruct.ground_truth_utils"
)

entry = entry_of("open_instruct")
grpo_utils = load("open_instruct", "open_instruct.grpo_utils", bare=_BARE, absent=_ABSENT)
dpo_utils = load("open_instruct", "open_instruct.dpo_utils", bare=_BARE, absent=_ABSENT)

_NOT_THEIRS = ("temperature", "top_k", "top_p", "loss_scale")
_OPTIONS = [option.name for option in SPECS["grpo"].options if option.name not in _NOT_THEIRS]
_DPO = {"reference_policy_kl_penalty": ANY, "samples": NO_SAMPLES}
_KNOWN = Excluded("both", "not known", because="it takes a log-probability that is not known for equal")
_GRPO = dict.fromkeys(_OPTIONS, ANY) | {"generation_everywhere": _KNOWN}


@entry("grpo", "logprobs", under_mask="usual", untrained="never", supports=_GRPO)
def grpo(x, o, mesh):
    new, old, sampler, advantages, reference = rows(
        x, "logprobs old_logprobs vllm_logprobs advantages reference_logprobs"
    )
    mask, counts = x.to_rows(x.mask), float(x.valid_tokens) if o.loss_denominator == "token" else o.loss_denominator
    config = SimpleNamespace(**vars(o) | {"loss_fn": grpo_utils.GRPOLossType(o.loss_fn)})
    rho = grpo_utils.compute_rho_correction(old, sampler, mask, advantages, config)
    ratio = torch.exp(new - old)
    losses, _, kl = grpo_utils.compute_grpo_loss(new, ratio, advantages, reference, config, rho.weights)
    return grpo_utils.masked_mean(losses + o.beta * kl, mask, None, counts)


@entry("dpo", "logprobs", counts="own", untrained="never", supports=_DPO)
def dpo(x, o, mesh):
    return dpo_utils.dpo_loss(*pair_sums(x, "logprobs", "reference_logprobs"), o.reference_policy_kl_penalty)[0].mean()
