# SPDX-License-Identifier: Apache-2.0
"""Policy losses: GRPO, CISPO and clipped policy gradients from several heads, right and wrong."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate import Contract, Outputs
from lossgate.inputs import ClippedPgHidden, ClippedPgLogprobs, GrpoLogits, GrpoLogprobs
from lossgate.options import ClippedPgOptions, GrpoOptions

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
    """The sum over ranks, whose gradient each rank gets as it is, or ``factor`` times that."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
        ctx.factor = factor
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None, None


def _parallel_logprobs(
    logits: Tensor, labels: Tensor, start: int, end: int, group: dist.ProcessGroup, whole: str = ""
) -> Tensor:
    """Log-probabilities of labels; ``whole`` says which steps take the logits for all columns."""
    shift = logits.detach().amax(dim=-1)
    if "shift" not in whole:
        shift = _all_reduce(shift, group, dist.ReduceOp.MAX)
    shifted = logits - shift[:, None]
    normaliser = shifted.exp().sum(dim=-1)
    if "normaliser" not in whole:
        normaliser = _SumOfRanks.apply(normaliser, group, 1)
    owned = (labels >= start) & (labels < end)
    target = torch.where(owned, shifted.gather(1, torch.where(owned, labels - start, 0)[:, None])[:, 0], 0.0)
    if "target" not in whole:
        target = _SumOfRanks.apply(target, group, 1)
    return target - normaliser.log()


# GRPO.


def _selected(mask: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.where(mask, value.float(), 0.0) for value in values)


def _grpo(logprobs: Tensor, inputs: GrpoLogits | GrpoLogprobs, options: GrpoOptions, bug: str = "") -> Tensor:
    """The sum of this rank's tokens over the denominator."""
    mask = inputs.mask
    logprobs, old, reference, vllm, advantages = _selected(
        mask, logprobs, inputs.old_logprobs, inputs.reference_logprobs, inputs.vllm_logprobs, inputs.advantages
    )
    ratio = (logprobs - old).exp()
    if options.loss_fn == "cispo":
        weight = ratio.clamp(max=1 + options.clip_higher)
        if bug != "cispo_not_detached":
            weight = weight.detach()
        policy = -advantages * weight * logprobs
    else:
        clipped = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
        policy = torch.maximum(-advantages * ratio, -advantages * clipped)
    if options.use_rho_correction:
        rho = (old - vllm).nan_to_num(0.0).clamp(-10, 10).exp()
        upper = options.rho_clamp_upper_bound or None
        policy = policy * rho.clamp(options.rho_clamp_lower_bound, upper)

    with torch.set_grad_enabled(bug != "kl_without_gradient"):
        d = (logprobs - reference).clamp(-40, 40)
        kl = (
            d
            if options.kl_estimator == 0
            else d.square() / 2
            if options.kl_estimator == 1
            else torch.expm1(-d) + d
            if options.kl_estimator == 2
            else ratio * d
        )
    total = torch.where(mask, policy + options.beta * kl, 0.0).sum()
    count = inputs.valid_tokens.clamp(min=1) if options.loss_denominator == "token" else options.loss_denominator
    return options.loss_scale * total / count


GRPO_OPTIONS: dict[str, Any] = dict.fromkeys(
    (
        "loss_fn",
        "clip_lower",
        "clip_higher",
        "beta",
        "kl_estimator",
        "loss_denominator",
        "loss_scale",
        "use_rho_correction",
        "rho_clamp_lower_bound",
        "rho_clamp_upper_bound",
    ),
    lossgate.ANY,
)
GRPO: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": GRPO_OPTIONS,
}


@lossgate.candidate("grpo", **GRPO)
def grpo_right(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """Sums the losses of this rank's tokens."""
    return _grpo(inputs.logprobs, inputs, options)


@lossgate.candidate("grpo", **GRPO)
def cispo_weight_not_detached(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """The clipped ratio of CISPO, which should be a constant weight, carries a gradient."""
    return _grpo(inputs.logprobs, inputs, options, bug="cispo_not_detached")


# GRPO whose caller gets the loss of the whole batch, reduced over context parallelism.

REDUCED: dict[str, Any] = GRPO | {"contract": Contract(loss={"cp": "replicate"})}


def _grpo_reduced(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("cp")
    factor = group.size() if bug == "backward_times_cp" else 1
    return _SumOfRanks.apply(_grpo(inputs.logprobs, inputs, options), group, factor)


@lossgate.candidate("grpo", **REDUCED)
def reduced_right(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """Reduces the loss over the ranks of a sequence, and passes its gradient on to each."""
    return _grpo_reduced(inputs, options, mesh)


@lossgate.candidate("grpo", **REDUCED)
def reduce_loss_scales_backward(inputs: GrpoLogprobs, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """Backward of the loss's reduction alone multiplies by the ranks of context parallelism."""
    return _grpo_reduced(inputs, options, mesh, bug="backward_times_cp")


# GRPO from tensor-parallel logits, in a trainer that averages over data-parallel ranks.

AVERAGE = {"dp": "avg"}
AVERAGED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "tp"),
    "dtypes": ("float32",),
    "supports": GRPO_OPTIONS | {"temperature": lossgate.ANY, "vocab_split": SPLITS},
    "contract": Contract(loss=AVERAGE, grads={"logits": AVERAGE}),
}


def _grpo_averaged(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    logits = inputs.logits.float() / options.temperature
    shard = (inputs.vocab_start, inputs.vocab_end)
    logprobs = _parallel_logprobs(logits, inputs.labels, *shard, mesh.get_group("tp"))
    ranks = mesh.size() if bug == "world_size" else mesh.get_group("dp").size()
    return _grpo(logprobs, inputs, options, bug) * ranks


@lossgate.candidate("grpo", **AVERAGED)
def averaged_right(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """Undoes the average over data-parallel ranks."""
    return _grpo_averaged(inputs, options, mesh)


@lossgate.candidate("grpo", **AVERAGED)
def scaled_by_world_size(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """The factor that undoes the average over dp ranks counts tensor-parallel ones, too."""
    return _grpo_averaged(inputs, options, mesh, bug="world_size")


@lossgate.candidate("grpo", **AVERAGED)
def kl_without_gradient(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh) -> Tensor:
    """The KL penalty is computed under no_grad: the loss has it, and its gradient is missing."""
    return _grpo_averaged(inputs, options, mesh, bug="kl_without_gradient")


# Clipped policy gradients.


def _clipped_pg(
    logprobs: Tensor,
    inputs: ClippedPgHidden | ClippedPgLogprobs,
    options: ClippedPgOptions,
    mesh: DeviceMesh,
    bug: str = "",
) -> Outputs:
    trained = inputs.mask & inputs.sample_mask[inputs.sequence]
    in_kl = inputs.mask if bug == "kl_of_all_samples" else trained
    given = (logprobs, inputs.prev_logprobs, inputs.reference_logprobs, inputs.advantages)
    logprobs, prev, reference, advantages = _selected(in_kl, *given)

    ratio = (logprobs - prev).exp()
    clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    policy = torch.maximum(-advantages * ratio, -advantages * clipped)
    if options.ratio_clip_c is not None:
        bound = 3.0 if bug == "default_bound" else options.ratio_clip_c
        policy = torch.where(advantages < 0, torch.minimum(policy, -advantages * bound), policy)

    d = reference - logprobs
    score = (logprobs - logprobs.detach()).exp()
    if options.kl_input_clamp_value is not None:
        bound = options.kl_input_clamp_value
        score = torch.where(d.abs() <= bound, score, 1.0)
        d = d.clamp(-bound, bound)
    kind = options.reference_policy_kl_type
    kl = score * (-d if kind == "k1" else d.square() / 2 if kind == "k2" else torch.expm1(d) - d)
    if options.kl_output_clamp_value is not None:
        kl = kl.clamp(-options.kl_output_clamp_value, options.kl_output_clamp_value)

    if options.token_level_loss:
        counts = inputs.valid_tokens.clamp(min=1)
    else:
        sequences = len(inputs.sample_mask)
        counts = inputs.mask.new_zeros(sequences, dtype=torch.int64)
        counts.index_add_(0, inputs.sequence, inputs.mask.long())
        if bug != "own_tokens":
            counts = _all_reduce(counts, mesh.get_group("cp"))
        counts = counts.clamp(min=1)[inputs.sequence] * inputs.valid_sequences.clamp(min=1)

    policy_loss = torch.where(trained, policy / counts, 0.0).sum()
    kl_loss = torch.where(in_kl, kl / counts, 0.0).sum()
    loss = policy_loss + options.reference_policy_kl_penalty * kl_loss

    infinite = torch.full_like(ratio, float("inf"))
    lowest = torch.where(trained, ratio.detach(), infinite)
    highest = torch.where(trained, ratio.detach(), -infinite)
    lowest = lowest.amin() if len(ratio) else loss.new_tensor(float("inf"))
    highest = highest.amax() if len(ratio) else loss.new_tensor(float("-inf"))
    for axis in ("cp", "dp"):
        group = mesh.get_group(axis)
        lowest = _all_reduce(lowest, group, dist.ReduceOp.MIN)
        if bug == "maximum_averaged":
            known = highest.isfinite()
            ranks = _all_reduce(known.float(), group)
            total = _all_reduce(torch.where(known, highest, 0.0), group)
            highest = torch.where(ranks > 0, total / ranks, float("-inf"))
        else:
            highest = _all_reduce(highest, group, dist.ReduceOp.MAX)
    return Outputs(loss=loss, metrics={"probs_ratio_min": lowest, "probs_ratio_max": highest})


PG_OPTIONS: dict[str, Any] = dict.fromkeys(
    (
        "ratio_clip_min",
        "ratio_clip_max",
        "ratio_clip_c",
        "token_level_loss",
        "reference_policy_kl_penalty",
        "reference_policy_kl_type",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
    ),
    lossgate.ANY,
)
EVERYWHERE = {"dp": "replicate", "cp": "replicate"}
PG: dict[str, Any] = {
    "dtypes": ("float32",),
    "contract": Contract(metrics={"probs_ratio_min": EVERYWHERE, "probs_ratio_max": EVERYWHERE}),
}
FROM_LOGPROBS: dict[str, Any] = PG | {"head": "logprobs", "axes": ("dp", "cp"), "supports": PG_OPTIONS}


@lossgate.candidate("clipped_pg", **FROM_LOGPROBS)
def clipped_right(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    """Gives the loss and the extremes of the ratio."""
    return _clipped_pg(inputs.logprobs, inputs, options, mesh)


@lossgate.candidate("clipped_pg", **FROM_LOGPROBS)
def dual_clip_bound_not_forwarded(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    """The bound of the dual clip is always its usual 3, whatever the option says."""
    return _clipped_pg(inputs.logprobs, inputs, options, mesh, bug="default_bound")


@lossgate.candidate("clipped_pg", **FROM_LOGPROBS)
def sequence_mean_of_own_tokens(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    """A sequence's mean divides by the tokens that this rank has of it, not by all."""
    return _clipped_pg(inputs.logprobs, inputs, options, mesh, bug="own_tokens")


@lossgate.candidate("clipped_pg", **FROM_LOGPROBS)
def kl_of_dropped_samples(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    """The KL penalty uses the token mask alone, so samples that do not count are in it."""
    return _clipped_pg(inputs.logprobs, inputs, options, mesh, bug="kl_of_all_samples")


@lossgate.candidate("clipped_pg", **FROM_LOGPROBS)
def largest_ratio_averaged(inputs: ClippedPgLogprobs, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    """The largest ratio that is reported is the mean of the ranks' largest ratios."""
    return _clipped_pg(inputs.logprobs, inputs, options, mesh, bug="maximum_averaged")


# A column-parallel head whose output is gathered.

GATHERED: dict[str, Any] = PG | {
    "head": "hidden",
    "axes": ("dp", "cp", "tp"),
    "supports": PG_OPTIONS | {"temperature": lossgate.ANY, "vocab_split": SPLITS},
}


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, start: int, vocab: int, group: dist.ProcessGroup) -> Tensor:
        ctx.own = slice(start, start + part.shape[-1])
        whole = part.new_zeros(len(part), vocab)
        whole[:, ctx.own] = part
        return _all_reduce(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][:, ctx.own], None, None, None


def _gathered_pg(inputs: ClippedPgHidden, options: ClippedPgOptions, mesh: DeviceMesh, bug: str = "") -> Outputs:
    group = mesh.get_group("tp")
    local = _CopyToRanks.apply(inputs.hidden, group) @ inputs.weight.T / options.temperature
    logits = _Gather.apply(local.float(), inputs.vocab_start, inputs.vocab_size, group)
    whole = "shift target" if bug == "normaliser_again" else "shift normaliser target"
    logprobs = _parallel_logprobs(logits, inputs.labels, 0, inputs.vocab_size, group, whole)
    return _clipped_pg(logprobs, inputs, options, mesh)


@lossgate.candidate("clipped_pg", **GATHERED)
def gathered_right(inputs: ClippedPgHidden, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    """Takes the softmax of the gathered logits on every rank."""
    return _gathered_pg(inputs, options, mesh)


@lossgate.candidate("clipped_pg", **GATHERED)
def normaliser_of_gathered_logits(inputs: ClippedPgHidden, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    """The softmax's normaliser is summed over ranks that have gathered all logits already."""
    return _gathered_pg(inputs, options, mesh, bug="normaliser_again")


BUGS = {
    "cispo_weight_not_detached": ("single",),
    "reduce_loss_scales_backward": ("cp=2",),
    "scaled_by_world_size": ("tp=2", "dp=2,tp=2"),
    "kl_without_gradient": ("tp=2", "single"),
    "dual_clip_bound_not_forwarded": ("cp=2", "single"),
    "sequence_mean_of_own_tokens": ("cp=2",),
    "kl_of_dropped_samples": ("dp=2", "single"),
    "largest_ratio_averaged": ("dp=2", "cp=2"),
    "normaliser_of_gathered_logits": ("tp=2",),
}
RIGHT = ("grpo_right", "reduced_right", "averaged_right", "clipped_right", "gathered_right")
