# SPDX-License-Identifier: Apache-2.0
"""Wrong policy losses from logits and hidden states, on split tokens, batches and vocabularies."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate

FLOAT32 = ("float32",)


def _dapo(logprobs: Tensor, inputs: Any, options: Any) -> Tensor:
    """Returns the loss of each token, and 0 for those that are not trained."""
    mask = inputs.mask
    logprobs, old, reference, advantages = (
        torch.where(mask, x.float(), 0.0)
        for x in (logprobs, inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages)
    )
    ratio = (logprobs - old).exp()
    clamped = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
    policy = torch.maximum(-advantages * ratio, -advantages * clamped)
    d = (logprobs - reference).clamp(-40, 40)
    return torch.where(mask, policy + options.beta * (torch.expm1(-d) + d), 0.0)


_DAPO = dict.fromkeys(("clip_lower", "clip_higher", "beta", "temperature"), lossgate.ANY)
_DAPO["use_rho_correction"] = False

# Whole logits, with labels from the ids


def _of_logits(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    if bug == "shift of the shard":
        labels = F.pad(inputs.input_ids[1:], (0, min(1, len(inputs.input_ids))))
    else:
        labels = inputs.labels  # The data loader shifts before it splits.
    log_p = (inputs.logits.float() / options.temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, labels[:, None])[:, 0]
    loss = _dapo(logprobs, inputs, options).sum() / inputs.valid_tokens.clamp(min=1)
    return lossgate.Outputs(loss=loss, logprobs=logprobs)


@lossgate.candidate("grpo", head="logits", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DAPO)
def right_grpo_of_logits(inputs, options, mesh):
    """Takes labels that were shifted before the split."""
    return _of_logits(inputs, options)


@lossgate.candidate("grpo", head="logits", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DAPO)
def labels_shifted_within_shard(inputs, options, mesh):
    """Labels are the ids of this context-parallel rank moved by one, so the last token of each
    of its chunks is off.
    """
    return _of_logits(inputs, options, bug="shift of the shard")


# A trainer that averages losses and gradients over data-parallel ranks


def _averaged(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    logits = F.linear(inputs.hidden.float(), inputs.weight.float()) / options.temperature
    logprobs = -F.cross_entropy(logits, inputs.labels, reduction="none")
    loss = _dapo(logprobs, inputs, options).sum() / inputs.valid_tokens.clamp(min=1)
    return loss if bug == "no factor" else loss * mesh.get_group("dp").size()


_AVERAGE = {"dp": "avg"}
_AVERAGED = lossgate.Contract(loss=_AVERAGE, grads={"hidden": _AVERAGE, "weight": _AVERAGE})


@lossgate.candidate("grpo", head="hidden", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DAPO, contract=_AVERAGED)
def right_averaged_grpo(inputs, options, mesh):
    """Multiplies by the number of data-parallel ranks, over which the trainer averages."""
    return _averaged(inputs, options, mesh)


@lossgate.candidate("grpo", head="hidden", axes=("dp", "cp"), dtypes=FLOAT32, supports=_DAPO, contract=_AVERAGED)
def batch_count_without_dp_factor(inputs, options, mesh):
    """The loss is divided by the tokens of the batch, but not multiplied by the ranks over
    which it is averaged.
    """
    return _averaged(inputs, options, mesh, bug="no factor")


# A linear head whose vocabulary is split


class _VocabParallelLogprobs(torch.autograd.Function):
    """Computes log-probabilities of labels from hidden states and this rank's rows of the lm-
    head."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, start, temperature, group, bug):
        logits = hidden.float() @ weight.float().T / temperature
        peak = logits.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        logits = logits - peak[:, None]
        own = (labels >= start) & (labels < start + len(weight))
        column = torch.where(own, labels - start, 0)
        label = torch.where(own, logits[torch.arange(len(labels)), column], 0.0)
        sums = torch.stack([label, logits.exp().sum(-1)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(hidden, weight, logits.exp() / sums[1][:, None], own, column)
        ctx.temperature, ctx.group, ctx.bug = temperature, group, bug
        return sums[0] - sums[1].log()

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, softmax, own, column = ctx.saved_tensors
        dlogits = -softmax
        dlogits[torch.arange(len(column)), column] += own.to(softmax.dtype)
        dlogits = dlogits * (upstream / ctx.temperature)[:, None]
        grad_hidden = dlogits @ weight.float()
        dist.all_reduce(grad_hidden, group=ctx.group)
        if ctx.bug == "mean over tp":
            grad_hidden /= ctx.group.size()
        return grad_hidden.to(hidden.dtype), (dlogits.T @ hidden.float()).to(weight.dtype), *(None,) * 5


def _reinforce(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    logprobs = _VocabParallelLogprobs.apply(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        inputs.vocab_start,
        options.temperature,
        mesh.get_group("tp"),
        bug,
    )
    counted = inputs.mask & inputs.sample_mask[inputs.sequence]
    policy = torch.where(counted, -inputs.advantages * logprobs, 0.0)
    return policy.sum() / inputs.valid_tokens.clamp(min=1)


_REINFORCE = {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0, "temperature": lossgate.ANY}


@lossgate.candidate("clipped_pg", head="hidden", axes=("dp", "tp"), dtypes=FLOAT32, supports=_REINFORCE)
def right_vocab_parallel_reinforce(inputs, options, mesh):
    """Adds up the gradients of hidden states over the tensor-parallel ranks."""
    return _reinforce(inputs, options, mesh)


@lossgate.candidate("clipped_pg", head="hidden", axes=("dp", "tp"), dtypes=FLOAT32, supports=_REINFORCE)
def hidden_gradient_averaged_over_tp(inputs, options, mesh):
    """The gradient of the hidden states is averaged over tensor-parallel ranks, where it must
    be added up.

    A division by a size that includes tensor parallelism.
    """
    return _reinforce(inputs, options, mesh, bug="mean over tp")


BUGS = {
    "labels_shifted_within_shard": ("cp=2",),
    "batch_count_without_dp_factor": ("dp=2",),
    "hidden_gradient_averaged_over_tp": ("tp=2", "dp=2,tp=2"),
}
RIGHT = ("right_grpo_of_logits", "right_averaged_grpo", "right_vocab_parallel_reinforce")
