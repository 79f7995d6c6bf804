# SPDX-License-Identifier: Apache-2.0
"""Distillation, preferences, log-probabilities and critics, right and wrong."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import DivergenceHidden, DpoHidden, TokenLogprobsLogits, ValueValues
from lossgate.options import DivergenceOptions, DpoOptions, TokenLogprobsOptions, ValueOptions

# The Jensen-Shannon divergence of students in mixed precision: products are in bfloat16.

MIXED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("bfloat16",),
    "precision": lossgate.Precision(logits="bfloat16", dlogits="bfloat16", reduce="bfloat16"),
    "supports": {"divergence_type": "jsd", "beta": lossgate.ANY},
}


def _jsd(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: DivergenceHidden, options: DivergenceOptions, mesh: DeviceMesh) -> Tensor:
        student = inputs.hidden @ inputs.weight.T
        teacher = inputs.teacher_logits
        if bug == "no_upcast":
            teacher = teacher.to(student.dtype)
        else:
            student = student.float()
        log_q, log_p = torch.log_softmax(student, dim=-1), torch.log_softmax(teacher, dim=-1)
        beta = torch.tensor(options.beta, dtype=log_q.dtype)
        log_r = torch.logaddexp(log_p + beta.log(), log_q + (1 - beta).log())
        of_teacher = (log_p.exp() * (log_p - log_r)).sum(dim=-1)
        of_student = (log_q.exp() * (log_q - log_r)).sum(dim=-1)
        losses = (beta * of_teacher + (1 - beta) * of_student).float()
        return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


jsd_right = lossgate.candidate("divergence", **MIXED, name="jsd_right")(_jsd())

# The student's logits come out of the product in bfloat16, and the whole divergence is computed in
# that dtype. They must be cast to float32 before the softmax.
# (Liger)
jsd_in_product_dtype = lossgate.candidate("divergence", **MIXED, name="jsd_in_product_dtype")(_jsd("no_upcast"))


# DPO from hidden states, as with a fused linear head: pairs are interleaved.

PAIRS: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"reference_policy_kl_penalty": lossgate.ANY},
}
IGNORE = -100


def _linear_dpo(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh) -> Tensor:
        labels = inputs.labels
        if bug == "raw_labels":
            begins, lengths = inputs.cu_seqlens_padded[:-1], inputs.cu_seqlens.diff()
            ends = (begins + lengths)[inputs.sequence] - 1
            labels = labels.masked_fill(torch.arange(len(labels)) >= ends, IGNORE)
        else:
            labels = labels.masked_fill(~inputs.mask, IGNORE)
        logits = F.linear(inputs.hidden, inputs.weight).float()
        policy = -F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        reference = torch.where(inputs.mask, inputs.reference_logprobs, 0.0)
        rewards = policy.new_zeros(len(inputs.sample_mask)).index_add(0, inputs.sequence, policy - reference)
        margins = options.reference_policy_kl_penalty * (rewards[::2] - rewards[1::2])
        losses = torch.where(inputs.sample_mask[::2], -F.logsigmoid(margins), 0.0)
        pairs = inputs.valid_sequences / 2
        return losses.sum() / torch.where(pairs == 0, 1, pairs)

    return kernel


linear_dpo_right = lossgate.candidate("dpo", **PAIRS, name="linear_dpo_right")(_linear_dpo())

# The fused path gets the token ids themselves for labels, so the log-probabilities of prompts are
# added to those of the responses. Labels must be set to the ignored index where the mask is false.
# (TRL with Liger)
prompt_in_rewards = lossgate.candidate("dpo", **PAIRS, name="prompt_in_rewards")(_linear_dpo("raw_labels"))


# Log-probabilities from a vocabulary that is split over ranks.

SPLIT: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "cp", "tp"),
    "dtypes": ("float32",),
    "supports": {"temperature": lossgate.ANY},
}


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: Any) -> Tensor:
        tokens, rows = logits.shape
        top = logits.amax(dim=-1) if rows else logits.new_full((tokens,), -torch.inf)
        dist.all_reduce(top, op=ReduceOp.MAX, group=group)
        exps = (logits - top[:, None]).exp()
        total = exps.sum(dim=-1)
        dist.all_reduce(total, group=group)
        own = (labels >= first) & (labels < first + rows)
        local = torch.where(own, labels - first, 0)
        picked = (logits - top[:, None]).gather(1, local[:, None])[:, 0] if rows else torch.zeros_like(top)
        picked = torch.where(own, picked, 0.0)
        dist.all_reduce(picked, group=group)
        ctx.save_for_backward(exps / total[:, None], own, local)
        return picked - total.log()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs, own, local = ctx.saved_tensors
        grad = -probs
        if grad.shape[1]:
            grad.scatter_add_(1, local[:, None], own[:, None].to(grad.dtype))
        return grad * grads[0][:, None], None, None, None


def _split_logprobs(bug: str | None = None) -> Callable[..., lossgate.Outputs]:
    def engine_logits(logits: Tensor, temperature: float) -> Tensor:
        return logits / temperature

    def kernel(inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, mesh: DeviceMesh) -> lossgate.Outputs:
        logits = engine_logits(inputs.logits.float(), options.temperature)
        if bug == "scaled_again":
            logits = logits / options.temperature
        given = (logits, inputs.labels, inputs.vocab_start, mesh.get_group("tp"))
        return lossgate.Outputs(logprobs=_VocabParallelLogprobs.apply(*given))

    return kernel


split_logprobs_right = lossgate.candidate("token_logprobs", **SPLIT, name="split_logprobs_right")(_split_logprobs())

# The engine has divided the logits by the temperature, and the worker divides them again, so they
# are those of the temperature's square. One of the two divisions must go.
# (NeMo-RL)
temperature_applied_twice = lossgate.candidate("token_logprobs", **SPLIT, name="temperature_applied_twice")(
    _split_logprobs("scaled_again")
)


# A critic whose metrics are pooled over ranks before they are logged.

CRITIC: dict[str, Any] = {
    "head": "values",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"cliprange": lossgate.ANY},
}


def _critic(bug: str | None = None) -> Callable[..., lossgate.Outputs]:
    def kernel(inputs: ValueValues, options: ValueOptions, mesh: DeviceMesh) -> lossgate.Outputs:
        kept, count = inputs.mask, inputs.valid_tokens.clamp(min=1)
        values, old, returns = (torch.where(kept, x, 0.0) for x in (inputs.values, inputs.old_values, inputs.returns))
        errors = (values - returns).square()
        if options.cliprange is not None:
            near = torch.clamp(values, old - options.cliprange, old + options.cliprange)
            errors = torch.maximum(errors, (near - returns).square())
        loss = 0.5 * errors.sum() / count

        values = values.detach()
        edge = values.new_full((1,), torch.inf)
        smallest = torch.cat((torch.where(kept, values, torch.inf), edge)).amin()
        largest = torch.cat((torch.where(kept, values, -torch.inf), -edge)).amax()
        mean = values.sum() / count
        if bug == "rank_averages":
            mean = values.sum() / kept.sum().clamp(min=1)
            pooled = torch.stack((mean, smallest, largest))
            dist.all_reduce(pooled, group=mesh.get_group("dp"))
            mean, smallest, largest = pooled / mesh["dp"].size()
            mean = mean / mesh["dp"].size()
        metrics = {"values_mean": mean, "values_min": smallest, "values_max": largest}
        return lossgate.Outputs(loss=loss, metrics=metrics)

    return kernel


critic_right = lossgate.candidate("value", **CRITIC, name="critic_right")(_critic())

# Every rank's mean, minimum and maximum are averaged over the ranks. The mean needs the sums and
# counts of all ranks, and the extremes a minimum and a maximum over them.
# (TRL)
metrics_averaged_over_ranks = lossgate.candidate("value", **CRITIC, name="metrics_averaged_over_ranks")(
    _critic("rank_averages")
)

BUGS = {
    "jsd_in_product_dtype": ("single",),
    "prompt_in_rewards": ("single",),
    "temperature_applied_twice": ("single",),
    "metrics_averaged_over_ranks": ("dp=2",),
}
RIGHT = ("jsd_right", "linear_dpo_right", "split_logprobs_right", "critic_right")
