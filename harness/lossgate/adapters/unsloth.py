# SPDX-License-Identifier: Apache-2.0
"""unsloth_zoo's losses, as they are without torch.compile.

Not judged: `sapo`, `vespo` and `luspo` of `grpo_compute_loss`, which no spec has;
`fused_linear_cross_entropy`, which is cut-cross-entropy's and needs a GPU; `grpo_compute_loss` with
other types, and `chunked_hidden_states_selective_log_softmax`, which have no adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import entry_of, ignoring, load
from lossgate.declaration.candidate import Outputs
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY

_BARE = "unsloth_zoo unsloth_zoo.fused_losses unsloth_zoo.temporary_patches"
_ABSENT = "datasets unsloth_zoo.log unsloth_zoo.device_type unsloth_zoo.utils"

entry = entry_of("unsloth")
fused = load(
    "unsloth", "unsloth_zoo.fused_losses.cross_entropy_loss", "unsloth_fused_ce_loss", bare=_BARE, absent=_ABSENT
)
rl = load("unsloth", "unsloth_zoo.rl_replacements", bare=_BARE, absent=_ABSENT)

_FUSED = {"precision": Precision(grads_in_forward=True), "hooks": "refused", "tiles": {"token": 16}}


def _fused(x, **given):
    inputs = x.hidden[None], x.weight, x.bias, ignoring(x)[None]
    chunks = {"n_chunks": max(1, len(x.labels) // 16), "torch_compile": False, "shift_labels": False}
    return fused(None, *inputs, n_items=x.valid_tokens.clamp(min=1), **chunks, **given)


@entry("nll", "hidden", **_FUSED, supports={"bias": ANY, "softcap": ANY})
def fused_cross_entropy(x, o, mesh):
    return _fused(x, logit_softcapping=o.softcap)


@entry("label_smoothing", "hidden", **_FUSED, supports={"bias": ANY, "smoothing": ANY})
def fused_smoothed_cross_entropy(x, o, mesh):
    return _fused(x, label_smoothing=o.smoothing)


@entry("token_logprobs", "logits", supports={"temperature": ANY}, differentiable=("logprobs",))
def logprobs(x, o, mesh):
    return Outputs(logprobs=rl.chunked_selective_log_softmax(x.logits[None], x.labels[None], o.temperature)[0])
