# SPDX-License-Identifier: Apache-2.0
"""Preference losses over pairs of responses, right and wrong."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import DpoHidden, DpoLogprobs
from lossgate.options import DpoOptions

# A fused linear DPO loss, which takes the hidden states of one pair at a time to log-probabilities.

FUSED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"reference_policy_kl_penalty": lossgate.ANY, "bias": lossgate.ANY, "temperature": lossgate.ANY},
}


def _pair_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    mask: Tensor,
    reference: Tensor,
    chosen_tokens: int,
    options: DpoOptions,
    bug: str | None,
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float() / options.temperature
    logps = torch.where(mask, -F.cross_entropy(logits, labels, reduction="none"), 0.0)
    chosen, rejected = logps[:chosen_tokens].sum(), logps[chosen_tokens:].sum()
    logratios = chosen - rejected
    if bug != "reference_dropped":
        ref_logps = torch.where(mask, reference, 0.0)
        logratios = logratios - (ref_logps[:chosen_tokens].sum() - ref_logps[chosen_tokens:].sum())
    return -F.logsigmoid(options.reference_policy_kl_penalty * logratios)


class _FusedLinearPreference(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: DpoHidden,
        options: DpoOptions,
        bug: str | None,
    ) -> Tensor:
        loss = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        starts = inputs.cu_seqlens_padded.tolist()
        for pair in range(0, len(starts) - 1, 2):
            if not inputs.sample_mask[pair]:
                continue
            begin, middle, end = starts[pair : pair + 3]
            tokens = slice(begin, end)
            leaves = [hidden[tokens].detach().requires_grad_(), weight.detach().requires_grad_()]
            leaves += [] if bias is None else [bias.detach().requires_grad_()]
            with torch.enable_grad():
                given = (inputs.labels[tokens], inputs.mask[tokens], inputs.reference_logprobs[tokens])
                head = (leaves[0], leaves[1], None if bias is None else leaves[2])
                part = _pair_loss(*head, *given, middle - begin, options, bug)
            grads = torch.autograd.grad(part, leaves)
            loss += part.detach()
            grad_hidden[tokens] = grads[0]
            grad_weight += grads[1]
            if grad_bias is not None:
                grad_bias += grads[2]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        of_bias = None if grad_bias is None else grads[0] * grad_bias
        return grads[0] * grad_hidden, grads[0] * grad_weight, of_bias, None, None, None


def _fused_dpo(inputs: DpoHidden, options: DpoOptions, bug: str | None = None) -> Tensor:
    loss = _FusedLinearPreference.apply(inputs.hidden, inputs.weight, inputs.bias, inputs, options, bug)
    pairs = inputs.valid_sequences / 2
    return loss / torch.where(pairs == 0, 1.0, pairs)


@lossgate.candidate("dpo", **FUSED)
def fused_dpo_right(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Compares the log-ratios of the policy with those of the reference."""
    return _fused_dpo(inputs, options)


# The fused loss takes the reference's log-probabilities, but its log-ratios are those of the policy
# alone. The author would subtract chosen minus rejected of the reference before beta.
# (Liger-Kernel)
@lossgate.candidate("dpo", **FUSED)
def dpo_without_reference(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """The loss is as if the reference gave all responses the same probability."""
    return _fused_dpo(inputs, options, bug="reference_dropped")


# A trainer that sums log-probabilities up by sequence, and divides by the pairs of a data-parallel
# rank: the wrapper of the model takes the mean over these ranks.

SUMMED: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {
        "reference_policy_kl_penalty": lossgate.ANY,
        "preference_average_log_probs": lossgate.ANY,
        "sft_loss_weight": lossgate.ANY,
        "loss_type": lossgate.ANY,
    },
    "contract": lossgate.Contract(loss={"dp": "avg"}, grads={"logprobs": {"dp": "avg"}}),
}


def _summed_dpo(inputs: DpoLogprobs, options: DpoOptions, mesh: DeviceMesh, bug: str | None = None) -> Tensor:
    ranks = mesh.get_group("dp").size()
    zeros = torch.zeros(len(inputs.sample_mask), device=inputs.logprobs.device)
    logps = torch.where(inputs.mask, inputs.logprobs, 0.0)
    gaps = torch.where(inputs.mask, inputs.logprobs - inputs.reference_logprobs, 0.0)
    rewards = zeros.index_add(0, inputs.sequence, gaps)
    if options.preference_average_log_probs:
        rewards = rewards / zeros.index_add(0, inputs.sequence, inputs.mask.float()).clamp(min=1)
    beta, margin = options.reference_policy_kl_penalty, rewards[0::2] - rewards[1::2]
    losses = (margin - 1 / (2 * beta)).square() if options.loss_type == "ipo" else -F.logsigmoid(beta * margin)
    if options.sft_loss_weight:
        losses = losses - options.sft_loss_weight * zeros.index_add(0, inputs.sequence, logps)[0::2]
    total = torch.where(inputs.sample_mask[0::2], losses, 0.0).sum()
    pairs = inputs.valid_sequences // 2
    pairs_per_rank = pairs // ranks if bug == "pairs_rounded_down" else pairs / ranks
    return total / torch.where(pairs_per_rank == 0, 1, pairs_per_rank)


@lossgate.candidate("dpo", **SUMMED)
def summed_dpo_right(inputs: DpoLogprobs, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Divides by the pairs of all ranks over the number of ranks."""
    return _summed_dpo(inputs, options, mesh)


# The pairs of a rank are an integer division of all pairs by the ranks, so what is left over is not
# counted, and the loss is too large. The author would divide with / in place of //.
# (of no one project)
@lossgate.candidate("dpo", **SUMMED)
def pairs_rounded_down(inputs: DpoLogprobs, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Pairs that do not divide by the ranks are left out of the count."""
    return _summed_dpo(inputs, options, mesh, bug="pairs_rounded_down")


BUGS = {
    "dpo_without_reference": ("single",),
    "pairs_rounded_down": ("dp=2",),
}
RIGHT = ("fused_dpo_right", "summed_dpo_right")
