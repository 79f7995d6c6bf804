# SPDX-License-Identifier: Apache-2.0
"""Policy losses over sequences, packs and sequence-parallel shards, right and wrong."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import ClippedPgLogits, ClippedPgLogprobs, GrpoLogits, GrpoLogprobs
from lossgate.options import ClippedPgOptions, GrpoOptions

MICRO_BATCH = 2


def _clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


# PPO whose loss is a mean over sequences, each of which is a mean over its tokens.

SEQUENCES: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"token_level_loss": False, "reference_policy_kl_penalty": 0.0},
}


def _sequence_ppo(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
        kept = inputs.mask & inputs.sample_mask[inputs.sequence]
        log_ratio = torch.where(kept, inputs.logprobs - inputs.prev_logprobs, 0.0)
        advantages = torch.where(kept, inputs.advantages, 0.0)
        losses = _clipped(log_ratio, advantages, options.ratio_clip_min, options.ratio_clip_max)
        zeros = losses.new_zeros(len(inputs.sample_mask))
        totals = zeros.index_add(0, inputs.sequence, torch.where(kept, losses, 0.0))
        counts = zeros.index_add(0, inputs.sequence, kept.to(losses.dtype))
        means = totals / (counts if bug == "no_clamp" else counts.clamp(min=1))

        samples = inputs.valid_sequences
        if bug == "int_order":
            samples = samples // MICRO_BATCH * MICRO_BATCH
        steps = samples.clamp(min=1) / MICRO_BATCH
        loss = losses.sum() * 0
        for micro in means.split(MICRO_BATCH):
            loss = loss + micro.sum() / MICRO_BATCH / steps
        return loss

    return kernel


sequence_ppo_right = lossgate.candidate("clipped_pg", **SEQUENCES, name="sequence_ppo_right")(_sequence_ppo())

# The mean of a sequence divides by its number of trained tokens, which is 0 for a sequence that is
# masked as a whole, so that the batch is NaN. The count must be clamped to at least 1.
# (open-instruct)
masked_row_is_nan = lossgate.candidate("clipped_pg", **SEQUENCES, name="masked_row_is_nan")(_sequence_ppo("no_clamp"))

# The accumulation size is made by an integer division before the multiplication, so samples that
# do not fill a micro-batch are not counted, and the loss is too large. Multiply first.
# (OpenRLHF)
steps_rounded_down = lossgate.candidate("clipped_pg", **SEQUENCES, name="steps_rounded_down")(
    _sequence_ppo("int_order")
)


# PPO over packed samples: each sample has a range of the pack.

PACKED: dict[str, Any] = {
    "head": "logits",
    "tokens": "packed",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"reference_policy_kl_penalty": 0.0},
}


def _packed_ppo(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: ClippedPgLogits, options: ClippedPgOptions, mesh: DeviceMesh) -> Tensor:
        starts, lengths = inputs.cu_seqlens_padded.tolist(), inputs.cu_seqlens.diff().tolist()
        total = inputs.logits[:0].float().sum()
        for number, (begin, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
            end = begin + length - (1 if bug == "short_range" else 0)
            if end - begin < 2:
                continue
            after = slice(begin + 1, end)
            logprobs = torch.log_softmax(inputs.logits[begin : end - 1].float(), dim=-1)
            picked = logprobs.gather(1, inputs.input_ids[0, after, None])[:, 0]
            kept = inputs.mask[0, after] & inputs.sample_mask[number]
            log_ratio = torch.where(kept, picked - inputs.prev_logprobs[0, after], 0.0)
            advantages = torch.where(kept, inputs.advantages[0, after], 0.0)
            losses = _clipped(log_ratio, advantages, options.ratio_clip_min, options.ratio_clip_max)
            total = total + torch.where(kept, losses, 0.0).sum()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


packed_ppo_right = lossgate.candidate("clipped_pg", **PACKED, name="packed_ppo_right")(_packed_ppo())

# The range of each packed sample ends one token early, so its last label is never trained. The
# range must go up to the end of the sample.
# (OpenRLHF)
packed_range_short = lossgate.candidate("clipped_pg", **PACKED, name="packed_range_short")(_packed_ppo("short_range"))


# GRPO with sequence parallelism, which splits the pack in a zigzag.

SHARDED: dict[str, Any] = {
    "head": "logits",
    "tokens": "packed",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"use_rho_correction": False, "beta": 0.0},
}


def _zigzag(whole: Tensor, starts: list[int], rank: int, size: int) -> Tensor:
    parts = [whole[:0]]
    for begin, end in pairwise(starts):
        width = (end - begin) // (2 * size)
        for turn in (rank, 2 * size - 1 - rank) if size > 1 else ():
            parts.append(whole[begin + turn * width : begin + (turn + 1) * width])
        if size == 1:
            parts.append(whole[begin:end])
    return torch.cat(parts)


def _sharded_grpo(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
        group = mesh.get_group("cp")
        starts = inputs.cu_seqlens_padded.tolist()
        ends = torch.tensor([end - 1 for begin, end in pairwise(starts) if end > begin], dtype=torch.long)
        is_end = torch.zeros_like(inputs.mask[0]).index_fill(0, ends, True)

        def prepare(rows: Tensor) -> Tensor:
            shifted = rows[0].roll(-1).masked_fill(is_end, 0)
            return _zigzag(shifted, starts, group.rank(), group.size())

        labels, mask = prepare(inputs.input_ids), prepare(inputs.mask)
        old, weights = prepare(inputs.old_logprobs), prepare(inputs.advantages)
        if bug == "weights_whole" and group.size() > 1:
            weights = inputs.advantages[0, : len(labels)]
        logprobs = -F.cross_entropy(inputs.logits.float(), labels, reduction="none")
        log_ratio = torch.where(mask, logprobs - old, 0.0)
        losses = _clipped(log_ratio, torch.where(mask, weights, 0.0), options.clip_lower, options.clip_higher)
        return torch.where(mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


sharded_grpo_right = lossgate.candidate("grpo", **SHARDED, name="sharded_grpo_right")(_sharded_grpo())

# With sequence parallelism labels are shifted and split, but the weights of tokens are not: each
# rank takes the first ones of the pack. They must be shifted and split like the labels.
# (ms-swift)
weights_not_split = lossgate.candidate("grpo", **SHARDED, name="weights_not_split")(_sharded_grpo("weights_whole"))


# GRPO with a KL penalty, which reports the KL over micro-batches of sequences.

REPORTED: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"use_rho_correction": False, "beta": lossgate.ANY},
}


def _reported_grpo(bug: str | None = None) -> Callable[..., lossgate.Outputs]:
    def kernel(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh) -> lossgate.Outputs:
        kept, count = inputs.mask, inputs.valid_tokens.clamp(min=1)
        log_ratio = torch.where(kept, inputs.logprobs - inputs.old_logprobs, 0.0)
        advantages = torch.where(kept, inputs.advantages, 0.0)
        policy = _clipped(log_ratio, advantages, options.clip_lower, options.clip_higher)
        apart = torch.where(kept, inputs.logprobs - inputs.reference_logprobs, 0.0).clamp(-40, 40)
        kl = torch.expm1(-apart) + apart
        loss = torch.where(kept, policy + options.beta * kl, 0.0).sum() / count

        kl = torch.where(kept, kl.detach(), 0.0)
        if bug == "micro_means":
            micro = inputs.sequence // MICRO_BATCH
            numbers = max(1, -(-(len(inputs.cu_seqlens) - 1) // MICRO_BATCH))
            sums = kl.new_zeros(numbers).index_add(0, micro, kl)
            tokens = kl.new_zeros(numbers).index_add(0, micro, kept.to(kl.dtype))
            reported = (sums / tokens.clamp(min=1)).mean() / mesh["dp"].size()
        else:
            reported = kl.sum() / count
        return lossgate.Outputs(loss=loss, metrics={"kl2": reported})

    return kernel


reported_grpo_right = lossgate.candidate("grpo", **REPORTED, name="reported_grpo_right")(_reported_grpo())

# The KL that is reported is the average over micro-batches of each one's mean over tokens, so it
# changes with how samples fall into micro-batches. Sums must be divided by all tokens.
# (verl)
kl_mean_of_micro_means = lossgate.candidate("grpo", **REPORTED, name="kl_mean_of_micro_means")(
    _reported_grpo("micro_means")
)

BUGS = {
    "masked_row_is_nan": ("single",),
    "steps_rounded_down": ("dp=2",),
    "packed_range_short": ("single",),
    "weights_not_split": ("cp=2",),
    "kl_mean_of_micro_means": ("single",),
}
RIGHT = ("sequence_ppo_right", "packed_ppo_right", "sharded_grpo_right", "reported_grpo_right")
