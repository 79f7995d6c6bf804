# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's losses. They get dictionaries of rows, and multiply by the mask.

Not judged: `CrossTokenizerDistillationLossFn`, which no spec has; `DistillationLossFn`,
`DraftCrossEntropyLossFn`, `from_parallel_hidden_states_to_logprobs` and
`DistributedLogprobWithSampling`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

import torch
from torch.nn.functional import pad

from lossgate.adapters.support import NO_GRAPH, UPCASTS, entry_of, load
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.supports import ANY, Excluded
from lossgate.losses import SPECS

_BARE = "nemo_rl nemo_rl.algorithms nemo_rl.algorithms.loss nemo_rl.distributed nemo_rl.models"
_ABSENT = (
    "ray nemo_rl.algorithms.x_token nemo_rl.distributed.batched_data_dict nemo_rl.models.dtensor "
    "nemo_rl.utils nemo_rl.data wandb nemo_rl.models.policy"
)

entry = entry_of("nemo_rl")
losses = load("nemo_rl", "nemo_rl.algorithms.loss.loss_functions", bare=_BARE, absent=_ABSENT)
loss_utils = load("nemo_rl", "nemo_rl.algorithms.loss.utils", bare=_BARE, absent=_ABSENT)
fusion_wrapper = load(
    "nemo_rl", "nemo_rl.algorithms.loss.wrapper", "SequencePackingFusionLossWrapper", bare=_BARE, absent=_ABSENT
)

_EPSILON = {"epsilon": 1e-8}
_NOT_THEIRS = ("temperature", "top_k", "top_p", "epsilon", "positive_nll_normaliser", "positive_example_nll_weight")
_OPTIONS = [option.name for option in SPECS["clipped_pg"].options if option.name not in _NOT_THEIRS]
_FIELDS = {
    "mask": "token_mask",
    "reference_logprobs": "reference_policy_logprobs",
    **{name: name for name in ("prev_logprobs", "generation_logprobs", "advantages")},
}


def _loss(made, x, given=None):
    """Calls a loss on rows that begin with a token which nothing predicts."""
    data = {"sample_mask": x.sample_mask.float() if hasattr(x, "sample_mask") else torch.ones(x.sequences)}
    for name, theirs in _FIELDS.items():
        if hasattr(x, name):
            data[theirs] = pad(x.to_rows(getattr(x, name)).float(), (1, 0))
    if isinstance(made, losses.DPOLossFn):
        data["reference_policy_logprobs"] = pad(x.to_rows(x.reference_logprobs), (0, 1))
    data["input_ids"] = pad(x.to_rows(x.labels), (1, 0))
    counts = getattr(x, "valid_sequences", None), x.valid_tokens
    return made(x.to_rows(x.logprobs) if given is None else given, data, *counts)


def _clipped_pg(x, o):
    config = type("Config", (), {name: getattr(o, name, 0.0) for name in (*_OPTIONS, "positive_example_nll_weight")})
    return _loss(losses.ClippedPGLossFn(config), x)


_PG = dict.fromkeys(_OPTIONS, ANY) | _EPSILON
_BOUNDED = {"generation": Excluded("extreme", because="nemo_rl.clipped_pg shows what comes of weights that overflow")}


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_PG)
def clipped_pg(x, o, mesh):
    return _clipped_pg(x, o)[0]


@entry("clipped_pg", "logprobs", under_mask="usual", supports=_PG | _BOUNDED)
def clipped_pg_with_metrics(x, o, mesh):
    loss, metrics = _clipped_pg(x, o)
    named = {name: torch.tensor(float(metrics[name])) for name in SPECS["clipped_pg"].metrics if name in metrics}
    named.pop("js_divergence_error")  # it estimates KL(m, p), as docs/reference/losses.md says
    return Outputs(loss=loss, metrics=named)


@entry("nll", "logprobs", under_mask="usual", supports=_EPSILON)
def nll(x, o, mesh):
    return _loss(losses.NLLLossFn(), x)[0]


_PACKED = {"axes": ("dp", "tp"), "under_mask": "usual", "minus_inf": "never"}


@entry("nll", "logits", **UPCASTS, **_PACKED, supports=_EPSILON | NO_GRAPH | {"vocab_split": "even"})
def packed_nll(x, o, mesh):
    starts = x.cu_seqlens, x.cu_seqlens_padded
    shard = mesh.get_local_rank("tp"), mesh.get_group("tp")
    made = fusion_wrapper(losses.NLLLossFn(), loss_utils.prepare_packed_loss_input, *starts, *shard)
    return _loss(made, x, x.logits[None])[0]


_DPO = dict.fromkeys(
    ("reference_policy_kl_penalty", "preference_loss_weight", "sft_loss_weight", "preference_average_log_probs"), ANY
)


@entry("dpo", "logprobs", under_mask="usual", supports=_DPO | _EPSILON | {"sft_average_log_probs": ANY})
def dpo(x, o, mesh):
    return _loss(losses.DPOLossFn(o), x)[0]


@entry("preference", "rewards", supports=_EPSILON)
def reward_pairs(x, o, mesh):
    return _loss(losses.PreferenceLossFn(), x, x.rewards[:, None])[0]


@entry("value", "values", under_mask="usual", supports={"cliprange": ANY, "scale": ANY} | _EPSILON)
def value(x, o, mesh):
    fields = {"token_mask": x.mask, "returns": x.returns, "values": x.old_values}
    data = {name: x.to_rows(field).float() for name, field in fields.items()} | {"sample_mask": torch.ones(x.sequences)}
    return losses.MseValueLossFn(o)(x.to_rows(x.values), data, None, x.valid_tokens)[0]
