# SPDX-License-Identifier: Apache-2.0
"""Wrong policy losses with sampler corrections, scored penalties, filters and tiles, beside right
ones."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate

FLOAT32 = ("float32",)

# GRPO with a correction for the engine that sampled


def _correction(inputs: Any, old: Tensor, options: Any, cp: dist.ProcessGroup, bug: str) -> tuple[Tensor, Tensor]:
    """Returns the weight of each token, and whether the mask on rho drops it."""
    mask = inputs.mask
    sampled = torch.where(mask, inputs.vllm_logprobs, 0.0)
    if bug == "unknown is one":
        x = old - sampled.nan_to_num(nan=1.0)
    else:
        x = torch.where(sampled.isnan(), 0.0, old - sampled)
    x = torch.where(mask, x.clamp(-10, 10), 0.0)
    if options.rho_mask_sequence_level:
        document = torch.zeros_like(inputs.sequence) if bug == "mean of the pack" else inputs.sequence
        sums = x.new_zeros(2, len(inputs.cu_seqlens))
        sums.index_add_(1, document, torch.stack([x, mask.float()]))
        dist.all_reduce(sums, group=cp)
        x = (sums[0] / sums[1].clamp(min=1))[document]
    rho = x.exp()
    dropped = torch.zeros_like(mask)
    if options.rho_mask_lower_bound:
        dropped = dropped | (rho < options.rho_mask_lower_bound)
    if options.rho_mask_upper_bound:
        dropped = dropped | (rho > options.rho_mask_upper_bound)
    weight = rho.clamp(options.rho_clamp_lower_bound, options.rho_clamp_upper_bound or None)
    return torch.where(dropped, 0.0, weight), dropped


def _grpo(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    mask = inputs.mask
    logprobs, old, reference, advantages = (
        torch.where(mask, x.float(), 0.0)
        for x in (inputs.logprobs, inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages)
    )
    weight, dropped = torch.ones_like(old), torch.zeros_like(mask)
    if options.use_rho_correction:
        weight, dropped = _correction(inputs, old, options, mesh.get_group("cp"), bug)

    low, high = 1 - options.clip_lower, 1 + options.clip_higher
    ratio = (logprobs - old).exp()
    free, bound = -advantages * ratio, -advantages * ratio.clamp(low, high)
    policy = torch.maximum(free, bound)
    d = (logprobs - reference).clamp(-40, 40)
    kl = options.beta * (d, d**2 / 2, torch.expm1(-d) + d, ratio * d)[options.kl_estimator]
    total = weight * (policy + kl) if bug == "weighted penalty" else weight * policy + kl
    total = torch.where(mask, total, 0.0).sum()

    tokens = inputs.valid_tokens.clamp(min=1)
    count = tokens if options.loss_denominator == "token" else options.loss_denominator
    if bug == "at least one":
        count = max(count, 1)
    with torch.no_grad():
        clipped = (ratio < low) | (ratio > high) if bug == "out of range" else bound > free
        metrics = {
            "clipfrac": (clipped & mask & ~dropped).sum() / tokens,
            "rho_drop_frac": (dropped & mask).sum() / tokens,
        }
    return lossgate.Outputs(loss=options.loss_scale * total / count, metrics=metrics)


_GRPO: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(
        (
            "clip_lower",
            "clip_higher",
            "beta",
            "kl_estimator",
            "loss_denominator",
            "loss_scale",
            "use_rho_correction",
            "rho_clamp_lower_bound",
            "rho_clamp_upper_bound",
            "rho_mask_lower_bound",
            "rho_mask_upper_bound",
            "rho_mask_sequence_level",
        ),
        lossgate.ANY,
    ),
}


@lossgate.candidate("grpo", **_GRPO)
def right_corrected_grpo(inputs, options, mesh):
    """Weights the policy loss by rho, of tokens or of documents that cp splits."""
    return _grpo(inputs, options, mesh)


@lossgate.candidate("grpo", **_GRPO)
def unknown_sampler_logprob_is_one(inputs, options, mesh):
    """A NaN of the sampler is read as a log-probability of 1, where it means no correction."""
    return _grpo(inputs, options, mesh, bug="unknown is one")


@lossgate.candidate("grpo", **_GRPO)
def rho_averaged_over_whole_pack(inputs, options, mesh):
    """The sequence-level rho is the mean over all documents of the pack, not over each of them."""
    return _grpo(inputs, options, mesh, bug="mean of the pack")


@lossgate.candidate("grpo", **_GRPO)
def penalty_weighted_by_rho(inputs, options, mesh):
    """The weight that corrects for the sampler multiplies the KL penalty as well as the policy
    loss.
    """
    return _grpo(inputs, options, mesh, bug="weighted penalty")


@lossgate.candidate("grpo", **_GRPO)
def denominator_of_at_least_one(inputs, options, mesh):
    """A guard against empty batches raises the denominator to 1, also a constant below it."""
    return _grpo(inputs, options, mesh, bug="at least one")


@lossgate.candidate("grpo", **_GRPO)
def clip_fraction_of_ratios_out_of_range(inputs, options, mesh):
    """The clip fraction counts every ratio out of the range, whatever the sign of its advantage."""
    return _grpo(inputs, options, mesh, bug="out of range")


# PPO with a penalty that has a backward of its own


class _ScoredKl(torch.autograd.Function):
    """Estimates the KL of each token with a weight of 1, whose gradient is that of the score."""

    @staticmethod
    def forward(ctx, logprobs, reference, kind, clamp_input, clamp_output, bug):
        distance = reference - logprobs
        d = distance if clamp_input is None else distance.clamp(-clamp_input, clamp_input)
        if kind == "k1":
            kl, slope = -d, torch.ones_like(d)
        elif kind == "k2":
            kl, slope = d**2 / 2, -d
        else:
            kl, slope = torch.expm1(d) - d, -torch.expm1(d)
        score = kl
        if clamp_input is not None:
            inside = distance.abs() <= clamp_input
            slope = torch.where(inside, slope, 0.0)
            if bug != "score beyond the clamp":
                score = torch.where(inside, score, 0.0)
        gradient = slope + score
        if clamp_output is not None:
            gradient = torch.where(kl.abs() <= clamp_output, gradient, 0.0)
            kl = kl.clamp(-clamp_output, clamp_output)
        ctx.save_for_backward(gradient)
        return kl

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, *(None,) * 5


def _ppo(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    counted = inputs.mask & inputs.sample_mask[inputs.sequence]
    current, previous, reference, advantages = (
        torch.where(counted, x.float(), 0.0)
        for x in (inputs.logprobs, inputs.prev_logprobs, inputs.reference_logprobs, inputs.advantages)
    )
    if options.force_on_policy_ratio:
        previous = current if bug == "previous attached" else current.detach()
    ratio = (current - previous).exp()
    clamped = ratio
    if not options.force_on_policy_ratio:
        clamped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    policy = torch.maximum(-advantages * ratio, -advantages * clamped)
    kl = _ScoredKl.apply(
        current,
        reference,
        options.reference_policy_kl_type,
        options.kl_input_clamp_value,
        options.kl_output_clamp_value,
        bug,
    )
    penalty = options.reference_policy_kl_penalty
    if options.use_kl_in_reward and bug != "penalty again":
        penalty = 0.0

    if options.token_level_loss:
        share = counted / inputs.valid_tokens.clamp(min=1)
    else:
        if bug == "length with prompt":
            lengths = inputs.cu_seqlens.diff()
        else:
            lengths = counted.new_zeros(len(inputs.sample_mask), dtype=torch.int64)
            lengths.index_add_(0, inputs.sequence, counted.long())
            dist.all_reduce(lengths, group=mesh.get_group("cp"))
        share = counted / lengths.clamp(min=1)[inputs.sequence] / inputs.valid_sequences.clamp(min=1)
    loss = torch.where(counted, (policy + penalty * kl) * share, 0.0).sum()
    ratios = torch.where(counted, ratio.detach(), 0.0).sum() / inputs.valid_tokens.clamp(min=1)
    return lossgate.Outputs(loss=loss, metrics={"probs_ratio": ratios})


_PPO: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(
        (
            "token_level_loss",
            "ratio_clip_min",
            "ratio_clip_max",
            "reference_policy_kl_penalty",
            "reference_policy_kl_type",
            "kl_input_clamp_value",
            "kl_output_clamp_value",
            "use_kl_in_reward",
            "force_on_policy_ratio",
        ),
        lossgate.ANY,
    ),
}


@lossgate.candidate("clipped_pg", **_PPO)
def right_ppo_with_scored_kl(inputs, options, mesh):
    """Gives a token whose distance to the reference is clamped no gradient of the penalty."""
    return _ppo(inputs, options, mesh)


@lossgate.candidate("clipped_pg", **_PPO)
def clamped_kl_keeps_score_gradient(inputs, options, mesh):
    """Where the distance to the reference is clamped, the weight of the penalty still has a
    gradient.
    """
    return _ppo(inputs, options, mesh, bug="score beyond the clamp")


@lossgate.candidate("clipped_pg", **_PPO)
def on_policy_ratio_without_detach(inputs, options, mesh):
    """A forced on-policy ratio subtracts the log-probability from itself without a detach, so
    the policy loss has no gradient.
    """
    return _ppo(inputs, options, mesh, bug="previous attached")


@lossgate.candidate("clipped_pg", **_PPO)
def sequence_mean_over_prompt_too(inputs, options, mesh):
    """The mean over a sequence divides by all of its tokens, with those of the prompt and holes
    in the mask.
    """
    return _ppo(inputs, options, mesh, bug="length with prompt")


@lossgate.candidate("clipped_pg", **_PPO)
def penalty_in_reward_and_in_loss(inputs, options, mesh):
    """The loss has a KL penalty even if the reward is said to contain it already."""
    return _ppo(inputs, options, mesh, bug="penalty again")


# Tensor-parallel logits, whose shards end with padding


class _ShardedLogprobs(torch.autograd.Function):
    """Computes log-probabilities of labels, and the softmax once more in backward."""

    @staticmethod
    def forward(ctx, logits, labels, start, rows, temperature, group, bug):
        scaled = logits.float()
        if bug != "scaled afterwards":
            scaled = scaled / temperature
        if bug != "padding counts":
            padding = torch.arange(logits.shape[-1]) >= rows
            scaled = scaled.masked_fill(padding, -torch.inf)
        peak = scaled.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        here = (labels >= start) & (labels < start + rows)
        column = torch.where(here, labels - start, 0)[:, None]
        found = torch.where(here, scaled.gather(1, column)[:, 0] - peak, 0.0)
        sums = torch.stack([found, (scaled - peak[:, None]).exp().sum(-1)], dim=1)
        dist.all_reduce(sums, group=group)
        normaliser = sums[:, 1].log()
        ctx.save_for_backward(scaled, peak + normaliser, here, column)
        ctx.dtype, ctx.temperature, ctx.bug = logits.dtype, temperature, bug
        logprobs = sums[:, 0] - normaliser
        return logprobs / temperature if bug == "scaled afterwards" else logprobs

    @staticmethod
    def backward(ctx, upstream):
        scaled, lse, here, column = ctx.saved_tensors
        gradient = -(scaled - lse[:, None]).exp()
        if ctx.bug == "label on every shard":
            here = torch.ones_like(here)
        gradient.scatter_add_(1, column, here[:, None].to(gradient.dtype))
        return (gradient * (upstream / ctx.temperature)[:, None]).to(ctx.dtype), *(None,) * 6


def _cispo(logprobs: Tensor, inputs: Any, options: Any) -> Tensor:
    """Returns this rank's part of CISPO's loss with a penalty."""
    mask = inputs.mask
    logprobs, old, reference, advantages = (
        torch.where(mask, x.float(), 0.0)
        for x in (logprobs, inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages)
    )
    weight = (logprobs.detach() - old).exp().clamp(max=1 + options.clip_higher)
    d = (logprobs - reference).clamp(-40, 40)
    losses = -advantages * weight * logprobs + options.beta * (torch.expm1(-d) + d)
    return torch.where(mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


def _sharded(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    logprobs = _ShardedLogprobs.apply(
        inputs.logits,
        inputs.labels,
        inputs.vocab_start,
        inputs.vocab_end - inputs.vocab_start,
        options.temperature,
        mesh.get_group("tp"),
        bug,
    )
    return lossgate.Outputs(loss=_cispo(logprobs, inputs, options), logprobs=logprobs)


_CISPO = {"loss_fn": "cispo", "use_rho_correction": False, **dict.fromkeys(("clip_higher", "beta"), lossgate.ANY)}
_SHARDED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "tp"),
    "dtypes": FLOAT32,
    "supports": _CISPO | {"temperature": lossgate.ANY, "vocab_split": ("balanced", "padded")},
}


@lossgate.candidate("grpo", **_SHARDED)
def right_sharded_cispo(inputs, options, mesh):
    """Leaves the rows that fill up a shard out of the softmax."""
    return _sharded(inputs, options, mesh)


@lossgate.candidate("grpo", **_SHARDED)
def padding_rows_in_softmax(inputs, options, mesh):
    """The rows that fill up the vocabulary of a tensor-parallel shard take part in the softmax."""
    return _sharded(inputs, options, mesh, bug="padding counts")


@lossgate.candidate("grpo", **_SHARDED)
def temperature_divides_logprobs(inputs, options, mesh):
    """The temperature divides log-probabilities after the softmax, where it should divide the
    logits before it.
    """
    return _sharded(inputs, options, mesh, bug="scaled afterwards")


@lossgate.candidate("grpo", **_SHARDED)
def shards_without_label_add_it_to_first_row(inputs, options, mesh):
    """In backward a tensor-parallel shard without the label adds the label's 1 to its own first
    row.
    """
    return _sharded(inputs, options, mesh, bug="label on every shard")


# Labels that a top-k filter leaves out


def _filtered(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    logits = inputs.logits.float() / options.temperature
    keep = logits > -torch.inf
    if options.top_k is not None and options.top_k < logits.shape[-1]:
        keep = logits >= logits.topk(options.top_k).values[:, -1:]
    log_p = torch.where(keep, logits, -torch.inf).log_softmax(-1)
    label = inputs.labels[:, None]
    kept = keep.gather(1, label)[:, 0]
    logprobs = torch.where(kept, log_p.gather(1, label)[:, 0], -torch.inf)

    counted = inputs.mask & inputs.sample_mask[inputs.sequence]
    current, previous = logprobs, inputs.prev_logprobs
    if bug == "zero for filtered":
        current, previous = (torch.where(x.isneginf(), 0.0, x) for x in (current, previous))
    else:
        counted = counted & kept & ~previous.isneginf()
    current, previous, advantages = (torch.where(counted, x, 0.0) for x in (current, previous, inputs.advantages))
    ratio = (current - previous).exp()
    clamped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    policy = torch.maximum(-advantages * ratio, -advantages * clamped)
    loss = torch.where(counted, policy, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
    return lossgate.Outputs(loss=loss)


_FILTERED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp",),
    "dtypes": FLOAT32,
    "supports": {
        "reference_policy_kl_penalty": 0.0,
        **dict.fromkeys(("top_k", "temperature", "ratio_clip_min", "ratio_clip_max"), lossgate.ANY),
    },
}


@lossgate.candidate("clipped_pg", **_FILTERED)
def right_filtered_pg(inputs, options, mesh):
    """Does not train a label that the filter leaves out, now or before the update."""
    return _filtered(inputs, options)


@lossgate.candidate("clipped_pg", **_FILTERED)
def filtered_label_counts_as_certain(inputs, options, mesh):
    """A label that top-k leaves out gets the log-probability 0 and stays in the loss, as if it
    were certain.
    """
    return _filtered(inputs, options, bug="zero for filtered")


# A head and its loss, tile by tile, with gradients that forward computes


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, inputs, options, size, bug):
        tiles = range(0, len(hidden), size)
        total = weight.new_zeros((), dtype=torch.float32)
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in tiles:
            tile = slice(start, start + size)
            rows, head = (x.detach().requires_grad_() for x in (hidden[tile], weight))
            with torch.enable_grad():
                log_p = (rows.float() @ head.float().T / options.temperature).log_softmax(-1)
                part = _cispo(log_p.gather(1, inputs.labels[tile, None])[:, 0], _Tile(inputs, tile), options)
            total += part.detach()
            of_rows, of_head = torch.autograd.grad(part, (rows, head))
            of_hidden[tile] = of_rows
            of_weight += of_head
        if bug == "mean of tiles":
            of_hidden /= max(len(tiles), 1)
            of_weight /= max(len(tiles), 1)
        ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, upstream):
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * upstream, of_weight * upstream, *(None,) * 4


class _Tile:
    """The part of a rank's inputs that the loss of a tile needs."""

    def __init__(self, inputs: Any, tile: slice) -> None:
        for name in ("mask", "old_logprobs", "reference_logprobs", "advantages"):
            setattr(self, name, getattr(inputs, name)[tile])
        self.valid_tokens = inputs.valid_tokens


_TILED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": _CISPO | {"temperature": lossgate.ANY},
    "tiles": {"token": 8},
    "precision": lossgate.Precision(grads_in_forward=True),
}


@lossgate.candidate("grpo", **_TILED)
def right_tiled_cispo(inputs, options, mesh):
    """Adds up the losses and the gradients of tiles."""
    return _TiledLoss.apply(inputs.hidden, inputs.weight, inputs, options, 8, "")


@lossgate.candidate("grpo", **_TILED)
def gradient_divided_by_tiles(inputs, options, mesh):
    """The gradients of a sum over tiles are divided by the number of tiles, as those of a mean."""
    return _TiledLoss.apply(inputs.hidden, inputs.weight, inputs, options, 8, "mean of tiles")


BUGS = {
    "unknown_sampler_logprob_is_one": ("single", "cp=2"),
    "rho_averaged_over_whole_pack": ("single", "dp=2"),
    "penalty_weighted_by_rho": ("single", "cp=2"),
    "denominator_of_at_least_one": ("single",),
    "clip_fraction_of_ratios_out_of_range": ("single", "dp=2"),
    "clamped_kl_keeps_score_gradient": ("single", "cp=2"),
    "on_policy_ratio_without_detach": ("single", "dp=2"),
    "sequence_mean_over_prompt_too": ("single", "cp=2"),
    "penalty_in_reward_and_in_loss": ("single",),
    "padding_rows_in_softmax": ("tp=2", "dp=2,tp=2"),
    "temperature_divides_logprobs": ("single", "tp=2"),
    "shards_without_label_add_it_to_first_row": ("tp=2", "dp=2,tp=2"),
    "filtered_label_counts_as_certain": ("single", "dp=2"),
    "gradient_divided_by_tiles": ("single", "cp=2"),
}
RIGHT = (
    "right_corrected_grpo",
    "right_ppo_with_scored_kl",
    "right_sharded_cispo",
    "right_filtered_pg",
    "right_tiled_cispo",
)
