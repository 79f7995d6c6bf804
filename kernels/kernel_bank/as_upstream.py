# SPDX-License-Identifier: Apache-2.0
"""Losses as public libraries compute them, with the conventions that their callers keep.

They are written anew, from descriptions. Most multiply by the mask or divide by their own counts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossgate.declaration.candidate import Candidate, candidate
from lossgate.declaration.conventions import Conventions

AS_UPSTREAM: dict[str, Candidate] = {}
"""The kernels, by library and loss."""

_OWN = Conventions(under_mask="usual", counts="own")
_OWN_OR_NAN = Conventions(under_mask="usual", counts="own", untrained="nan")
_BY_MASK = Conventions(under_mask="usual")
_PLAIN_GRPO: Mapping[str, Any] = {"beta": 0.0, "use_rho_correction": False}
_PLAIN_PG: Mapping[str, Any] = {"reference_policy_kl_penalty": 0.0}
_SEQUENCES: Mapping[str, Any] = {**_PLAIN_PG, "token_level_loss": False}


def _add(spec: str, head: str, conventions: Conventions, **declared: Any) -> Callable[[Any], Candidate]:
    def add(kernel: Any) -> Candidate:
        axes = declared.pop("axes", ("dp",))
        made = candidate(spec, head=head, axes=axes, dtypes=("float32",), conventions=conventions, **declared)(kernel)
        AS_UPSTREAM[made.name] = made
        return made

    return add


def _counted(inputs: Any) -> Tensor:
    """Returns the mask of the trained tokens in sequences that count."""
    return inputs.mask & inputs.sample_mask[inputs.sequence]


def _sums(x: Tensor, inputs: Any) -> Tensor:
    return x.new_zeros(len(inputs.cu_seqlens) - 1).index_add(0, inputs.sequence, x)


def _ppo(ratio: Tensor, inputs: Any, low: float, high: float) -> Tensor:
    return torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(1 - low, 1 + high))


def _of_tokens(inputs: Any, options: Any) -> Tensor:
    ratio = torch.exp(inputs.logprobs - inputs.prev_logprobs)
    return _ppo(ratio, inputs, options.ratio_clip_min, options.ratio_clip_max)


def _of_grpo(inputs: Any, options: Any) -> Tensor:
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    return options.loss_scale * _ppo(ratio, inputs, options.clip_lower, options.clip_higher)


@_add("grpo", "logprobs", _OWN, supports=_PLAIN_GRPO)
def trl_bnpo(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return (_of_grpo(inputs, options) * inputs.mask).sum() / inputs.mask.sum().clamp(min=1.0)


@_add("grpo", "logprobs", _BY_MASK, supports={**_PLAIN_GRPO, "loss_denominator": 512.0})
def trl_dr_grpo(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return (_of_grpo(inputs, options) * inputs.mask).sum() / 512.0


@_add("clipped_pg", "logprobs", _OWN, supports=_SEQUENCES)
def trl_grpo(inputs: Any, options: Any, mesh: Any) -> Tensor:
    means = _sums(_of_tokens(inputs, options) * inputs.mask, inputs) / _sums(inputs.mask.float(), inputs).clamp(min=1.0)
    return (means * inputs.sample_mask).sum() / inputs.sample_mask.sum().clamp(min=1)


@_add("clipped_pg", "logprobs", _OWN, supports={**_SEQUENCES, "sequence_level_importance_ratios": True})
def trl_gspo(inputs: Any, options: Any, mesh: Any) -> Tensor:
    count = _sums(inputs.mask.float(), inputs).clamp(min=1.0)
    apart = _sums((inputs.logprobs - inputs.prev_logprobs) * inputs.mask, inputs) / count
    losses = _ppo(apart.exp()[inputs.sequence], inputs, options.ratio_clip_min, options.ratio_clip_max)
    means = _sums(losses * inputs.mask, inputs) / count
    return (means * inputs.sample_mask).sum() / inputs.sample_mask.sum().clamp(min=1)


@_add("dpo", "logprobs", Conventions(under_mask="usual", counts="own", untrained="never"))
def trl_dpo(inputs: Any, options: Any, mesh: Any) -> Tensor:
    apart = _sums((inputs.logprobs - inputs.reference_logprobs) * inputs.mask, inputs)
    losses = -F.logsigmoid(options.reference_policy_kl_penalty * (apart[0::2] - apart[1::2]))
    return losses[inputs.sample_mask[0::2]].mean()


@_add("clipped_pg", "logprobs", _OWN, supports=_PLAIN_PG)
def verl_vanilla(inputs: Any, options: Any, mesh: Any) -> Tensor:
    mask = _counted(inputs)
    return (_of_tokens(inputs, options) * mask).sum() / (mask.sum() + 1e-8)


@_add("value", "values", _OWN, supports={"cliprange": 0.2})
def verl_value(inputs: Any, options: Any, mesh: Any) -> Tensor:
    near = inputs.old_values + (inputs.values - inputs.old_values).clamp(-0.2, 0.2)
    losses = torch.maximum((inputs.values - inputs.returns) ** 2, (near - inputs.returns) ** 2)
    return 0.5 * (losses * inputs.mask).sum() / (inputs.mask.sum() + 1e-8)


@_add("nll", "logprobs", _OWN_OR_NAN)
def areal_sft(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return -(inputs.logprobs * inputs.mask).sum() / inputs.mask.sum()


@_add("clipped_pg", "logprobs", _BY_MASK, supports=_PLAIN_PG)
def nemo_rl_clipped_pg(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return (_of_tokens(inputs, options) * _counted(inputs)).sum() / (inputs.valid_tokens + 1e-8)


@_add("grpo", "logprobs", _OWN_OR_NAN, supports=_PLAIN_GRPO)
def open_instruct_grpo(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return (_of_grpo(inputs, options) * inputs.mask).sum() / inputs.mask.sum()


@_add("nll", "logits", Conventions(counts="own", untrained="nan"))
def torchtune_cross_entropy(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return F.cross_entropy(inputs.logits.float(), inputs.labels.masked_fill(~inputs.mask, -100))


class GradientInPlace(torch.autograd.Function):
    """Writes the gradient of a sum of cross-entropies over the logits, in forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        labels = labels[:, None]
        loss = -(logits.log_softmax(-1).gather(1, labels).squeeze(1) * weight).sum()
        logits.copy_(logits.softmax(-1)).scatter_add_(1, labels, -torch.ones_like(logits[:, :1]))
        ctx.save_for_backward(logits.mul_(weight[:, None]))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None


@_add("nll", "logits", Conventions(counts="own", inputs="written", minus_inf="never"))
def liger_cross_entropy(inputs: Any, options: Any, mesh: Any) -> Tensor:
    weight = inputs.mask / inputs.mask.sum().clamp(min=1)
    return GradientInPlace.apply(inputs.logits, inputs.labels, weight)
