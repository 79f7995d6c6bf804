# SPDX-License-Identifier: Apache-2.0
"""Preference losses: DPO and IPO from several heads, and a reward model's, right and wrong."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate import Contract
from lossgate.inputs import DpoHidden, DpoLogits, DpoLogprobs, PreferenceRewards
from lossgate.options import DpoOptions, PreferenceOptions

SPLITS = ("balanced", "even")


def _all_reduce(values: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, op=op, group=group)
    return values


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grads[0], ctx.group), None


class _SumOfRanks(torch.autograd.Function):
    """The sum over ranks; its gradient is that of every rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _DifferentiableAllReduce(torch.autograd.Function):
    """An all-reduce whose backward is an all-reduce, for ranks whose losses are added up."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grads[0], ctx.group), None


# DPO. Every cp rank has the loss of its dp rank's pairs.


def _dpo(
    logprobs: Tensor,
    inputs: DpoHidden | DpoLogits | DpoLogprobs,
    options: DpoOptions,
    mesh: DeviceMesh,
    bug: str = "",
    sft: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The loss; ``sft`` has log-probabilities and mask of its second term, if not the same."""
    group = mesh.get_group("cp")
    reduce = _DifferentiableAllReduce if bug == "reduced_in_backward" else _SumOfRanks

    def sums(values: Tensor, mask: Tensor) -> Tensor:
        parts = values.new_zeros(len(inputs.sample_mask))
        return reduce.apply(parts.index_add(0, inputs.sequence, torch.where(mask, values, 0.0)), group)

    def means(values: Tensor, mask: Tensor) -> Tensor:
        return sums(values, mask) / sums(torch.ones_like(values), mask).clamp(min=1)

    averaged = options.preference_average_log_probs
    if bug == "ipo_sums" and options.loss_type == "ipo":
        averaged = False
    of_sequences = means if averaged else sums
    logprobs = logprobs.float()
    rewards = of_sequences(logprobs, inputs.mask) - of_sequences(inputs.reference_logprobs, inputs.mask)
    margins = rewards[0::2] - rewards[1::2]
    beta = options.reference_policy_kl_penalty
    losses = (margins - 1 / (2 * beta)).square() if options.loss_type == "ipo" else -F.logsigmoid(beta * margins)
    losses = options.preference_loss_weight * losses

    if options.sft_loss_weight:
        given = sft or (logprobs, inputs.mask)
        chosen = (means if options.sft_average_log_probs else sums)(*given)[0::2]
        losses = losses - options.sft_loss_weight * chosen
    pairs = inputs.valid_sequences.float() / 2 + options.epsilon
    pairs = torch.where(pairs > 0, pairs, 1.0)
    return torch.where(inputs.sample_mask[0::2], losses, 0.0).sum() / pairs


PAIRS: dict[str, Any] = dict.fromkeys(
    (
        "reference_policy_kl_penalty",
        "preference_loss_weight",
        "preference_average_log_probs",
        "sft_loss_weight",
        "sft_average_log_probs",
        "loss_type",
        "epsilon",
    ),
    lossgate.ANY,
)
REPLICATED: dict[str, Any] = {"dtypes": ("float32",), "contract": Contract(loss={"cp": "replicate"})}
FROM_LOGPROBS: dict[str, Any] = REPLICATED | {"head": "logprobs", "axes": ("dp", "cp"), "supports": PAIRS}


@lossgate.candidate("dpo", **FROM_LOGPROBS)
def dpo_right(inputs: DpoLogprobs, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Sums each sequence over the ranks of its tokens."""
    return _dpo(inputs.logprobs, inputs, options, mesh)


@lossgate.candidate("dpo", **FROM_LOGPROBS)
def ipo_of_sums(inputs: DpoLogprobs, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """IPO takes sums of log-probabilities where it was asked for their means over a sequence."""
    return _dpo(inputs.logprobs, inputs, options, mesh, bug="ipo_sums")


@lossgate.candidate("dpo", **FROM_LOGPROBS)
def reduced_in_backward_too(inputs: DpoLogprobs, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Sums over cp are differentiated by a sum over cp, though every rank has the same loss."""
    return _dpo(inputs.logprobs, inputs, options, mesh, bug="reduced_in_backward")


# DPO from whole logits.

FROM_LOGITS: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": PAIRS | {"temperature": lossgate.ANY},
}


def _dense_dpo(inputs: DpoLogits, options: DpoOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    table = (inputs.logits.float() / options.temperature).log_softmax(dim=-1)
    logprobs = table.gather(1, inputs.labels[:, None])[:, 0]
    sft = None
    if bug == "sft_shifted":
        # Within each sequence, as with [:, :-1] of logits and [:, 1:] of labels.
        picked = table[:-1].gather(1, inputs.labels[1:, None])[:, 0]
        kept = inputs.mask[1:] & (inputs.sequence[1:] == inputs.sequence[:-1])
        short = len(table) - len(picked)
        sft = (F.pad(picked, (0, short)), F.pad(kept, (0, short)))
    return _dpo(logprobs, inputs, options, mesh, sft=sft)


@lossgate.candidate("dpo", **FROM_LOGITS)
def dense_right(inputs: DpoLogits, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Uses the labels as they are given in both terms."""
    return _dense_dpo(inputs, options, mesh)


@lossgate.candidate("dpo", **FROM_LOGITS)
def sft_term_shifted_again(inputs: DpoLogits, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """The NLL of chosen responses shifts labels and mask again, after the caller has done it."""
    return _dense_dpo(inputs, options, mesh, bug="sft_shifted")


# DPO from hidden states, with one pass through a column-parallel head for each half of the pairs.

FROM_HIDDEN: dict[str, Any] = REPLICATED | {
    "head": "hidden",
    "axes": ("dp", "cp", "tp"),
    "supports": PAIRS | {"temperature": lossgate.ANY, "bias": lossgate.ANY, "vocab_split": SPLITS},
}


def _head_dpo(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")

    def through_head(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, inputs.weight, inputs.bias).float() / options.temperature
        shifted = logits - _all_reduce(logits.detach().amax(dim=-1), group, dist.ReduceOp.MAX)[:, None]
        lse = _SumOfRanks.apply(shifted.exp().sum(dim=-1), group).log()
        owned = (labels >= inputs.vocab_start) & (labels < inputs.vocab_end)
        local = torch.where(owned, labels - inputs.vocab_start, 0)
        target = torch.where(owned, shifted.gather(1, local[:, None])[:, 0], 0.0)
        return _SumOfRanks.apply(target, group) - lse

    chosen = (inputs.sequence % 2 == 0).nonzero()[:, 0]
    rejected = (inputs.sequence % 2 == 1).nonzero()[:, 0]
    hidden = _CopyToRanks.apply(inputs.hidden, group)
    of_rejected = inputs.hidden if bug == "rejected_partial" else hidden
    parts = (
        through_head(hidden[chosen], inputs.labels[chosen]),
        through_head(of_rejected[rejected], inputs.labels[rejected]),
    )
    order = torch.cat((chosen, rejected)).argsort()
    return _dpo(torch.cat(parts)[order], inputs, options, mesh)


@lossgate.candidate("dpo", **FROM_HIDDEN)
def dpo_head_right(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Sums the gradient of all hidden states over the ranks of the vocabulary."""
    return _head_dpo(inputs, options, mesh)


@lossgate.candidate("dpo", **FROM_HIDDEN)
def rejected_hidden_partial(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
    """Hidden states of rejected responses miss the gradient of the other ranks' vocabulary."""
    return _head_dpo(inputs, options, mesh, bug="rejected_partial")


# The loss of a reward model, with a backward of its own.

REWARDS: dict[str, Any] = {
    "head": "rewards",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"epsilon": lossgate.ANY},
}


class _BradleyTerry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rewards: Tensor, counted: Tensor, pairs: Tensor, bug: str) -> Tensor:
        margins = rewards[0::2] - rewards[1::2]
        ctx.save_for_backward(torch.where(counted, -torch.sigmoid(-margins), 0.0) / pairs)
        ctx.bug = bug
        return torch.where(counted, -F.logsigmoid(margins), 0.0).sum() / pairs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grads
        of_margins = ctx.saved_tensors[0] * upstream
        of_rewards = torch.stack((of_margins, -of_margins), dim=1).flatten()
        if ctx.bug == "upstream_twice":
            of_rewards = of_rewards * upstream
        return of_rewards, None, None, None


def _reward_model(inputs: PreferenceRewards, options: PreferenceOptions, bug: str = "") -> Tensor:
    pairs = inputs.valid_sequences.float() / 2 + options.epsilon
    return _BradleyTerry.apply(inputs.rewards, inputs.sample_mask[0::2], torch.where(pairs > 0, pairs, 1.0), bug)


@lossgate.candidate("preference", **REWARDS)
def rewards_right(inputs: PreferenceRewards, options: PreferenceOptions, mesh: DeviceMesh) -> Tensor:
    """Multiplies the gradient by that of the loss once."""
    return _reward_model(inputs, options)


@lossgate.candidate("preference", **REWARDS)
def upstream_gradient_squared(inputs: PreferenceRewards, options: PreferenceOptions, mesh: DeviceMesh) -> Tensor:
    """Backward multiplies by the gradient of the loss at the margins, and again at the rewards."""
    return _reward_model(inputs, options, bug="upstream_twice")


BUGS = {
    "ipo_of_sums": ("single", "cp=2"),
    "reduced_in_backward_too": ("cp=2",),
    "sft_term_shifted_again": ("single",),
    "rejected_hidden_partial": ("tp=2",),
    "upstream_gradient_squared": ("dp=2", "single"),
}
RIGHT = ("dpo_right", "dense_right", "dpo_head_right", "rewards_right")
