# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of pairs of responses, recreated from public reports."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate

FLOAT32 = ("float32",)


class _Pairs(torch.autograd.Function):
    """Computes DPO's or IPO's loss of each pair from the difference of its rewards."""

    @staticmethod
    def forward(ctx, margin, beta, kind, bug):
        ctx.save_for_backward(margin)
        ctx.beta, ctx.kind = beta, "sigmoid" if bug == "kind not passed" else kind
        if kind == "ipo":
            return (margin - 1 / (2 * beta)) ** 2
        return -F.logsigmoid(beta * margin)

    @staticmethod
    def backward(ctx, upstream):
        (margin,) = ctx.saved_tensors
        if ctx.kind == "ipo":
            slope = 2 * (margin - 1 / (2 * ctx.beta))
        else:
            slope = -ctx.beta * torch.sigmoid(-ctx.beta * margin)
        return slope * upstream, None, None, None


class _SumOverCp(torch.autograd.Function):
    """Adds up parts of context-parallel ranks, all of which then compute the same loss."""

    @staticmethod
    def forward(ctx, part, group, bug):
        ctx.group, ctx.bug = group, bug
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream):
        if ctx.bug == "sum in backward":
            upstream = upstream.clone()
            dist.all_reduce(upstream, group=ctx.group)
        return upstream, None, None


def _finish(chosen: Tensor, rejected: Tensor, loss: Tensor, gate: Tensor, inputs: Any, bug: str) -> dict[str, Tensor]:
    """Returns the metrics of the rewards of pairs."""
    pairs = (inputs.valid_sequences / 2).clamp(min=1)
    responses = inputs.valid_sequences.clamp(min=1)
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "preference_loss": loss.detach(),
        "accuracy": (gate & (chosen > rejected)).sum() / pairs,
        "rewards_chosen_mean": chosen[gate].sum() / (responses if bug == "one denominator" else pairs),
        "rewards_rejected_mean": rejected[gate].sum() / (responses if bug == "one denominator" else pairs),
    }


def _dpo(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    differences = torch.where(inputs.mask, inputs.logprobs.float() - inputs.reference_logprobs, 0.0)
    rewards = differences.new_zeros(len(inputs.sample_mask)).index_add(0, inputs.sequence, differences)
    rewards = _SumOverCp.apply(rewards, mesh.get_group("cp"), bug)
    chosen, rejected, gate = rewards[0::2], rewards[1::2], inputs.sample_mask[0::2]
    losses = _Pairs.apply(chosen - rejected, options.reference_policy_kl_penalty, options.loss_type, bug)
    loss = torch.where(gate, losses, 0.0).sum() / (inputs.valid_sequences / 2).clamp(min=1)
    return lossgate.Outputs(
        loss=options.preference_loss_weight * loss, metrics=_finish(chosen, rejected, loss, gate, inputs, bug)
    )


_REPLICATED = lossgate.Contract(
    loss={"cp": "replicate"},
    metrics={
        name: {"cp": "replicate"}
        for name in ("preference_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean")
    },
)
_DPO = dict.fromkeys(("reference_policy_kl_penalty", "preference_loss_weight", "loss_type"), lossgate.ANY)


@lossgate.candidate("dpo", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DPO, contract=_REPLICATED)
def right_dpo(inputs, options, mesh):
    """Adds up rewards over context-parallel ranks, each of which returns the whole loss."""
    return _dpo(inputs, options, mesh)


@lossgate.candidate("dpo", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DPO, contract=_REPLICATED)
def ipo_with_gradient_of_dpo(inputs, options, mesh):
    """The type of loss is not passed on to backward, which gives IPO the gradient of DPO."""
    return _dpo(inputs, options, mesh, bug="kind not passed")


@lossgate.candidate("dpo", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DPO, contract=_REPLICATED)
def reward_sum_reduced_in_backward(inputs, options, mesh):
    """Backward of the sum over cp adds up the gradients of ranks that all have the whole one."""
    return _dpo(inputs, options, mesh, bug="sum in backward")


@lossgate.candidate("dpo", head="logprobs", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DPO, contract=_REPLICATED)
def mean_rewards_by_responses(inputs, options, mesh):
    """Mean rewards of chosen and of rejected responses are divided by the number of both.

    One denominator for all metrics.
    """
    return _dpo(inputs, options, mesh, bug="one denominator")


# DPO from logits of a pack, sequence by sequence


def _dpo_by_ranges(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    log_p = (inputs.logits.float() / options.temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, inputs.labels[:, None])[:, 0]
    lengths = inputs.cu_seqlens.diff()
    starts = (inputs.cu_seqlens if bug == "starts without padding" else inputs.cu_seqlens_padded)[:-1]
    loss = logprobs.sum() * 0.0
    for pair in range(len(lengths) // 2):
        rewards = []
        for sequence in (2 * pair, 2 * pair + 1):
            at = slice(int(starts[sequence]), int(starts[sequence] + lengths[sequence]))
            difference = logprobs[at] - inputs.reference_logprobs[at]
            rewards.append(torch.where(inputs.mask[at], difference, 0.0).sum())
        if inputs.sample_mask[2 * pair]:
            loss = loss - F.logsigmoid(options.reference_policy_kl_penalty * (rewards[0] - rewards[1]))
    return lossgate.Outputs(loss=loss / (inputs.valid_sequences / 2).clamp(min=1), logprobs=logprobs)


_BY_RANGES = dict.fromkeys(("reference_policy_kl_penalty", "temperature"), lossgate.ANY)


@lossgate.candidate("dpo", head="logits", axes=("dp",), dtypes=FLOAT32, supports=_BY_RANGES)
def right_dpo_by_ranges(inputs, options, mesh):
    """Takes each response from where it starts in the padded pack."""
    return _dpo_by_ranges(inputs, options)


@lossgate.candidate("dpo", head="logits", axes=("dp",), dtypes=FLOAT32, supports=_BY_RANGES)
def response_ranges_without_padding(inputs, options, mesh):
    """Responses are sliced from the padded pack where they would start without padding."""
    return _dpo_by_ranges(inputs, options, bug="starts without padding")


# A reward model, whose scores every context-parallel rank has


class _ShareOfLoss(torch.autograd.Function):
    """Returns a rank's share of a loss that all context-parallel ranks compute."""

    @staticmethod
    def forward(ctx, loss, ranks, bug):
        ctx.ranks = 1 if bug == "share in forward" else ranks
        return loss / ranks

    @staticmethod
    def backward(ctx, upstream):
        return upstream / ctx.ranks, None, None


def _reward_model(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    margin = inputs.rewards[0::2].float() - inputs.rewards[1::2].float()
    total = -torch.where(inputs.sample_mask[0::2], F.logsigmoid(margin), 0.0).sum()
    return _ShareOfLoss.apply(total / (inputs.valid_sequences / 2).clamp(min=1), mesh.get_group("cp").size(), bug)


@lossgate.candidate("preference", head="rewards", axes=("dp", "cp"), dtypes=FLOAT32)
def right_reward_model(inputs, options, mesh):
    """Gives each context-parallel rank the same share of the loss and of its gradient."""
    return _reward_model(inputs, options, mesh)


@lossgate.candidate("preference", head="rewards", axes=("dp", "cp"), dtypes=FLOAT32)
def share_of_loss_without_backward(inputs, options, mesh):
    """Each cp rank returns its share of the loss, but sends back the gradient of the whole."""
    return _reward_model(inputs, options, mesh, bug="share in forward")


BUGS = {
    "ipo_with_gradient_of_dpo": ("single", "dp=2"),
    "reward_sum_reduced_in_backward": ("cp=2", "dp=2,cp=2"),
    "mean_rewards_by_responses": ("single", "cp=2"),
    "response_ranges_without_padding": ("single", "dp=2"),
    "share_of_loss_without_backward": ("cp=2", "dp=2,cp=2"),
}
RIGHT = ("right_dpo", "right_dpo_by_ranges", "right_reward_model")
