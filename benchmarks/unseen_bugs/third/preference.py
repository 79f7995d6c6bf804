# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of pairs with gathered rewards, layouts of the reference and reward models, beside
right ones."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate

FLOAT32 = ("float32",)


def _of_pairs(values: Tensor, inputs: Any) -> Tensor:
    """Returns the sum over pairs that count, divided by those of the batch."""
    total = torch.where(inputs.sample_mask[0::2], values, 0.0).sum()
    return total / (inputs.valid_sequences / 2).clamp(min=1)


# DPO and IPO whose parts of sequences are gathered over context parallelism


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the parts of all ranks; the own one keeps its graph."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    parts[group.rank()] = part
    return torch.stack(parts)


def _gathered_dpo(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    counted = inputs.mask & inputs.sample_mask[inputs.sequence]
    differences = torch.where(counted, inputs.logprobs.float() - inputs.reference_logprobs, 0.0)
    columns = torch.stack([differences, counted.float()])
    own = columns.new_zeros(2, len(inputs.sample_mask)).index_add(1, inputs.sequence, columns)
    sums, counts = _gathered(own, mesh.get_group("cp")).unbind(1)
    if not options.preference_average_log_probs:
        rewards = sums.sum(0)
    elif bug == "mean of means":
        rewards = (sums / counts.clamp(min=1)).mean(0)
    elif bug == "length of chosen":
        rewards = sums.sum(0) / counts.sum(0).clamp(min=1)[0::2].repeat_interleave(2)
    else:
        rewards = sums.sum(0) / counts.sum(0).clamp(min=1)
    chosen, rejected = rewards[0::2], rewards[1::2]
    if bug == "rejected without gradient":
        rejected = rejected.detach()
    beta = options.reference_policy_kl_penalty
    if options.loss_type == "ipo":
        losses = (chosen - rejected - 1 / (2 * beta)) ** 2
    else:
        losses = F.softplus(beta * (rejected - chosen))
    loss = _of_pairs(losses, inputs)
    metrics = {
        "rewards_chosen_mean": _of_pairs(chosen.detach(), inputs),
        "rewards_rejected_mean": _of_pairs(rejected.detach(), inputs),
    }
    return lossgate.Outputs(loss=options.preference_loss_weight * loss, metrics=metrics)


_WHOLE = {"cp": "replicate"}
_GATHERED: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(
        ("reference_policy_kl_penalty", "preference_loss_weight", "preference_average_log_probs", "loss_type"),
        lossgate.ANY,
    ),
    "contract": lossgate.Contract(
        loss=_WHOLE, metrics={"rewards_chosen_mean": _WHOLE, "rewards_rejected_mean": _WHOLE}
    ),
}


@lossgate.candidate("dpo", **_GATHERED)
def right_gathered_dpo(inputs, options, mesh):
    """Divides the sum over all parts of a sequence by the tokens of all."""
    return _gathered_dpo(inputs, options, mesh)


@lossgate.candidate("dpo", **_GATHERED)
def reward_is_mean_of_parts_means(inputs, options, mesh):
    """The mean over a sequence is the mean of the means that context-parallel ranks have of
    their parts.
    """
    return _gathered_dpo(inputs, options, mesh, bug="mean of means")


@lossgate.candidate("dpo", **_GATHERED)
def both_means_by_length_of_chosen(inputs, options, mesh):
    """The mean reward of a rejected response divides by the number of tokens of the chosen one."""
    return _gathered_dpo(inputs, options, mesh, bug="length of chosen")


@lossgate.candidate("dpo", **_GATHERED)
def rejected_reward_detached(inputs, options, mesh):
    """The reward of the rejected response is detached, so only chosen ones are trained."""
    return _gathered_dpo(inputs, options, mesh, bug="rejected without gradient")


# DPO with an SFT term, and a reference in any layout


def _with_sft(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    reference = inputs.reference_logprobs
    if options.reference_layout == "token":
        reference = reference.roll(1 if bug == "rolled right" else -1)
    mask = inputs.mask & inputs.sample_mask[inputs.sequence]
    logprobs, reference = (torch.where(mask, x.float(), 0.0) for x in (inputs.logprobs, reference))
    zeros = logprobs.new_zeros(len(inputs.sample_mask))
    of_policy, of_reference = (zeros.index_add(0, inputs.sequence, x) for x in (logprobs, reference))
    rewards = of_policy - of_reference
    preference = _of_pairs(F.softplus(options.reference_policy_kl_penalty * (rewards[1::2] - rewards[0::2])), inputs)

    nll = -of_policy
    if options.sft_average_log_probs:
        nll = nll / zeros.index_add(0, inputs.sequence, mask.float()).clamp(min=1)
    sft = _of_pairs(nll[0::2] + nll[1::2] if bug == "both responses" else nll[0::2], inputs)
    loss = options.preference_loss_weight * preference + options.sft_loss_weight * sft
    metrics = {"preference_loss": preference.detach()}
    return lossgate.Outputs(loss=loss, metrics=metrics)


_WITH_SFT: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp",),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(
        (
            "reference_policy_kl_penalty",
            "preference_loss_weight",
            "sft_loss_weight",
            "sft_average_log_probs",
            "reference_layout",
        ),
        lossgate.ANY,
    ),
}


@lossgate.candidate("dpo", **_WITH_SFT)
def right_dpo_with_sft(inputs, options, mesh):
    """Brings the reference to the predictions of the policy, and fits chosen responses."""
    return _with_sft(inputs, options)


@lossgate.candidate("dpo", **_WITH_SFT)
def reference_rolled_to_the_right(inputs, options, mesh):
    """A reference in the layout of tokens is rolled by one to the right instead of to the left."""
    return _with_sft(inputs, options, bug="rolled right")


@lossgate.candidate("dpo", **_WITH_SFT)
def sft_term_of_both_responses(inputs, options, mesh):
    """The SFT term fits rejected responses as well as chosen ones."""
    return _with_sft(inputs, options, bug="both responses")


# DPO from hidden states, with the head applied to chosen and to rejected responses in turn


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, halves, temperature, bug):
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        for half in halves:
            log_p = (hidden[half].float() @ weight.float().T / temperature).log_softmax(-1)
            logprobs[half] = log_p.gather(1, labels[half, None])[:, 0]
        ctx.save_for_backward(hidden, weight, labels, *halves)
        ctx.temperature, ctx.bug = temperature, bug
        return logprobs

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, labels, *halves = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for half in halves:
            rows = hidden[half].float()
            of_logits = -(rows @ weight.float().T / ctx.temperature).softmax(-1)
            of_logits[torch.arange(len(half)), labels[half]] += 1
            of_logits *= upstream[half, None] / ctx.temperature
            of_hidden[half] = (of_logits @ weight.float()).to(hidden.dtype)
            if ctx.bug == "last pass alone":
                of_weight = of_logits.T @ rows
            else:
                of_weight += of_logits.T @ rows
        return of_hidden, of_weight.to(weight.dtype), *(None,) * 4


def _two_passes(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    halves = [(inputs.sequence % 2 == side).nonzero()[:, 0] for side in (0, 1)]
    logprobs = _HeadLogprobs.apply(inputs.hidden, inputs.weight, inputs.labels, halves, options.temperature, bug)
    differences = torch.where(inputs.mask, logprobs - inputs.reference_logprobs, 0.0)
    rewards = differences.new_zeros(len(inputs.sample_mask)).index_add(0, inputs.sequence, differences)
    margins = rewards[0::2] - rewards[1::2]
    loss = _of_pairs(F.softplus(-options.reference_policy_kl_penalty * margins), inputs)
    return lossgate.Outputs(loss=loss, logprobs=logprobs)


_TWO_PASSES: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp",),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(("reference_policy_kl_penalty", "temperature"), lossgate.ANY),
}


@lossgate.candidate("dpo", **_TWO_PASSES)
def right_dpo_in_two_passes(inputs, options, mesh):
    """Adds up the gradients that both passes give the head."""
    return _two_passes(inputs, options)


@lossgate.candidate("dpo", **_TWO_PASSES)
def head_gradient_of_rejected_alone(inputs, options, mesh):
    """The gradient of the head from the rejected responses overwrites that from the chosen ones."""
    return _two_passes(inputs, options, bug="last pass alone")


# A reward model


def _rewards(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    rewards, count = inputs.rewards.float(), len(inputs.rewards) // 2
    if bug == "halves":
        chosen, rejected, gate = rewards[:count], rewards[count:], inputs.sample_mask[:count]
    else:
        chosen, rejected, gate = rewards[0::2], rewards[1::2], inputs.sample_mask[0::2]
    pairs = (inputs.valid_sequences / 2).clamp(min=1)
    loss = torch.where(gate, F.softplus(rejected - chosen), 0.0).sum() / pairs
    right = chosen > rejected
    if bug != "accuracy of all":
        right = right & gate
    return lossgate.Outputs(loss=loss, metrics={"accuracy": right.sum() / pairs})


@lossgate.candidate("preference", head="rewards", axes=("dp",), dtypes=FLOAT32)
def right_rewards_in_turn(inputs, options, mesh):
    """Takes chosen and rejected responses in turn."""
    return _rewards(inputs, options)


@lossgate.candidate("preference", head="rewards", axes=("dp",), dtypes=FLOAT32)
def pairs_from_two_halves(inputs, options, mesh):
    """The first half of the batch is taken for the chosen responses and the second for the
    rejected ones, which come in turn.
    """
    return _rewards(inputs, options, bug="halves")


@lossgate.candidate("preference", head="rewards", axes=("dp",), dtypes=FLOAT32)
def accuracy_of_dropped_pairs_too(inputs, options, mesh):
    """The accuracy counts right pairs that the sample mask leaves out."""
    return _rewards(inputs, options, bug="accuracy of all")


BUGS = {
    "reward_is_mean_of_parts_means": ("cp=2", "dp=2,cp=2"),
    "both_means_by_length_of_chosen": ("single", "cp=2"),
    "rejected_reward_detached": ("single", "cp=2"),
    "reference_rolled_to_the_right": ("single", "dp=2"),
    "sft_term_of_both_responses": ("single",),
    "head_gradient_of_rejected_alone": ("single", "dp=2"),
    "pairs_from_two_halves": ("single", "dp=2"),
    "accuracy_of_dropped_pairs_too": ("single",),
}
RIGHT = ("right_gathered_dpo", "right_dpo_with_sft", "right_dpo_in_two_passes", "right_rewards_in_turn")
