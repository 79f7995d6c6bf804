# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``fused_losses``, as candidates.

Chunks are small, so that small problems turn every loop.
"""

from contextlib import nullcontext
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_losses import (
    ClippedPGConfig,
    LinearCrossEntropyLoss,
    RhoCorrection,
    RhoWeights,
    SFTStatistics,
    TokenLogprobs,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    linear_sft_loss,
    rho_weights,
    tiled_grpo_loss,
    tiled_token_logprobs,
    unchecked_values,
    vocab_parallel_cross_entropy,
    vocab_parallel_logprobs,
)
from lossgate import ANY, Budgets, Contract, Outputs, Precision, candidate
from lossgate.declaration.candidate import Kernel
from lossgate.inputs import (
    ClippedPgHidden,
    DpoHidden,
    DpoLogits,
    GrpoHidden,
    Hidden,
    NllHidden,
    NllLogits,
    TokenLogprobsHidden,
    TokenLogprobsLogits,
)
from lossgate.losses import SPECS
from lossgate.options import ClippedPgOptions, DpoOptions, GrpoOptions, NllOptions, TokenLogprobsOptions
from lossgate.specs.logit_filter import FilterOptions

CHUNK = 16
TILES = 3
IGNORED = -7
"""A label to ignore, other than the default."""

HALVES: dict[str, Precision] = {
    "float32": Precision(),
    "bfloat16": Precision(logits="bfloat16", dlogits="bfloat16", reduce="bfloat16"),
    "float16": Precision(logits="float16", dlogits="float16", reduce="float16"),
}
"""Matrix products in the inputs' dtype, all else in float32."""


IN_CHUNKS = Budgets(
    largest_tensor="chunk*vocab/tp",
    peak="5*4*chunk*vocab/tp + 4*tokens*(hidden + 8)",
    saved="4*(vocab/tp + tokens)*(hidden + 8)",
    where={"chunk": CHUNK},
)
"""From hidden states: a few chunks of logits in float32. What is saved may be the gradients."""
ONE_GRADIENT = Budgets(
    largest_tensor="chunk*vocab/tp",
    peak="itemsize*tokens*vocab/tp + 3*4*chunk*vocab/tp",
    saved="4*8*tokens",
    where={"chunk": CHUNK},
)
"""From logits: their gradient, and a few chunks in float32."""
IN_TILES = Budgets(
    largest_tensor="ceil(tokens/tiles)*vocab",
    peak="5*4*ceil(tokens/tiles)*vocab",
    saved="4*(vocab + tokens)*(hidden + 8)",
    where={"tiles": TILES},
)
"""Whole logits of a tile of tokens."""


def _in_training(kernel: Kernel) -> Kernel:
    """Leaves out the checks of values on a device for which the host would wait, as training does
    after its first steps.
    """

    @wraps(kernel)
    def called(inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs | Tensor:
        with nullcontext() if mesh.device_type == "cpu" else unchecked_values():
            return kernel(inputs, options, mesh)

    return called


def _in_forward(precisions: dict[str, Precision]) -> dict[str, Precision]:
    """Returns the same for kernels that make gradients in forward."""
    return {dtype: replace(p, grads_in_forward=dtype != "float32") for dtype, p in precisions.items()}


REDUCED = {name: {"dp": "replicate", "cp": "replicate"} for name in SPECS["nll"].metrics}
"""Statistics that the candidate reduces over ranks itself."""


FINE = Precision()
"""Everything in float32, whatever the inputs."""


def _split(inputs: TokenLogprobsHidden | TokenLogprobsLogits, mesh: DeviceMesh) -> dict[str, Any]:
    """How the vocabulary is split, as the kernels want it."""
    return {
        "vocab_start": inputs.vocab_start,
        "vocab_rows": inputs.vocab_end - inputs.vocab_start,
        "tp_group": mesh.get_group("tp"),
    }


def _valid_tokens(inputs: NllHidden | NllLogits, options: NllOptions) -> Tensor | None:
    """The divisor of a mean. A sum has none, and the kernels refuse one."""
    return inputs.valid_tokens if options.reduction == "mean" else None


def _counted(inputs: NllHidden | NllLogits, options: NllOptions) -> dict[str, Any]:
    return {
        "mask": inputs.mask,
        "valid_tokens": _valid_tokens(inputs, options),
        "reduction": options.reduction,
        "temperature": options.temperature,
    }


@candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp", "tp"),
    precision=_in_forward(HALVES),
    dtypes=tuple(HALVES),
    supports={"temperature": ANY, "softcap": ANY, "reduction": ANY, "bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=replace(IN_CHUNKS, collectives="3*(tp > 1)", bytes="4*tokens*(hidden + 4)*(tp > 1)"),
    good_for="SFT from hidden states: no logits, and gradients made in forward",
)
@_in_training
def fused_linear_cross_entropy(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    given = _counted(inputs, options) | _split(inputs, mesh) | {"softcap": options.softcap}
    return linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, bias=inputs.bias, chunk=CHUNK, **given)


def _part(hidden: Tensor, labels: Tensor, mesh: DeviceMesh, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Returns a tp rank's part of hidden states, and the labels, padded so that parts are alike."""
    group = mesh.get_group("tp")
    fill = -len(labels) % group.size()
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, fill))
    own = padded.chunk(group.size())[group.rank()] if len(labels) else padded
    return own, torch.nn.functional.pad(labels, (0, fill), value=ignored)


@candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp", "tp"),
    dtypes=("float32",),
    contract=Contract(grads={"hidden": {"tp": "sum"}}),
    supports={"temperature": ANY, "softcap": ANY, "reduction": ANY, "bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="the same as a module, with sequence parallelism, and labels to ignore in place of a mask",
)
@_in_training
def fused_cross_entropy_module(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    given = {"temperature": options.temperature, "softcap": options.softcap, "reduction": options.reduction}
    module = LinearCrossEntropyLoss(
        ignore_index=IGNORED, sequence_parallel=True, chunk=CHUNK, **given, **_split(inputs, mesh)
    )
    own, labels = _part(inputs.hidden, torch.where(inputs.mask, inputs.labels, IGNORED), mesh, IGNORED)
    return module(own, inputs.weight, labels, inputs.bias, valid_tokens=_valid_tokens(inputs, options))


@candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp", "tp"),
    precision=HALVES,
    dtypes=tuple(HALVES),
    contract=Contract(metrics=REDUCED),
    supports={option.name: ANY for option in SPECS["nll"].options} | {"bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="SFT with its statistics from this rank's tokens alone, under context parallelism",
)
@_in_training
def fused_linear_sft(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Outputs:
    given = _sft_arguments(inputs, options, mesh)
    return _sft_outputs(*linear_sft_loss(inputs.hidden, inputs.weight, inputs.labels, **given), mesh)


@candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp", "tp"),
    dtypes=("float32",),
    contract=Contract(grads={"hidden": {"tp": "sum"}}, metrics=REDUCED),
    supports={option.name: ANY for option in SPECS["nll"].options} | {"bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="the same with sequence parallelism",
)
@_in_training
def fused_linear_sft_sequence_parallel(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Outputs:
    own, labels = _part(inputs.hidden, inputs.labels, mesh)
    fill = (0, len(labels) - len(inputs.labels))
    given = _sft_arguments(inputs, options, mesh)
    given |= {name: torch.nn.functional.pad(given[name], fill) for name in ("mask", "real", "sequence")}
    return _sft_outputs(*linear_sft_loss(own, inputs.weight, labels, sequence_parallel=True, **given), mesh)


def _sft_arguments(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "mask": inputs.mask,
        "real": inputs.real,
        "sequence": inputs.sequence,
        "sequences": len(inputs.cu_seqlens) - 1,
        "valid_tokens": inputs.valid_tokens,
        "reduction": options.reduction,
        "epsilon": options.epsilon,
        "bias": inputs.bias,
        "temperature": options.temperature,
        "softcap": options.softcap,
        "cp_group": mesh.get_group("cp"),
        "chunk": CHUNK,
        **_split(inputs, mesh),
    }


def _sft_outputs(loss: Tensor, statistics: SFTStatistics, mesh: DeviceMesh) -> Outputs:
    reported = statistics.reduce(mesh.get_group("cp"), mesh.get_group("dp"))
    metrics = {**reported, "entropy": reported["entropy_avg"]}
    return Outputs(loss=loss, metrics={name: value.to(loss.dtype) for name, value in metrics.items()})


@candidate(
    "nll",
    head="logits",
    axes=("dp", "cp", "tp"),
    dtypes=("float32",),
    contract=Contract(metrics=REDUCED),
    supports={"temperature": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=ONE_GRADIENT,
    good_for="SFT with its statistics from tensor-parallel logits",
)
@_in_training
def fused_vocab_parallel_sft(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Outputs:
    statistics: dict[str, Any] = {"temperature": options.temperature, "entropy": True, "logit_range": True}
    tokens = vocab_parallel_logprobs(inputs.logits, inputs.labels, chunk=CHUNK, **statistics, **_split(inputs, mesh))
    where: dict[str, Any] = {"mask": inputs.mask, "real": inputs.real, "sequence": inputs.sequence}
    found = SFTStatistics.of(tokens, **where, sequences=len(inputs.cu_seqlens) - 1, cp_group=mesh.get_group("cp"))
    loss = -torch.where(inputs.mask, tokens.logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
    return _sft_outputs(loss, found, mesh)


@candidate(
    "nll",
    head="logits",
    axes=("dp", "cp", "tp"),
    precision=FINE,
    dtypes=tuple(HALVES),
    supports={"temperature": ANY, "reduction": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=ONE_GRADIENT,
    good_for="SFT from tensor-parallel logits",
)
@_in_training
def fused_vocab_parallel_cross_entropy(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    return vocab_parallel_cross_entropy(
        inputs.logits, inputs.labels, chunk=CHUNK, **_counted(inputs, options), **_split(inputs, mesh)
    )


_LOGPROBS: dict[str, Any] = {
    "axes": ("dp", "cp", "tp"),
    "differentiable": ("logprobs", "token_entropy"),
}


@candidate(
    "token_logprobs",
    head="hidden",
    precision=HALVES,
    dtypes=tuple(HALVES),
    supports={"temperature": ANY, "top_k": ANY, "top_p": ANY, "softcap": ANY, "bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="any loss on log-probabilities and entropies, from hidden states: no logits",
    **_LOGPROBS,
)
@_in_training
def fused_linear_logprobs(inputs: TokenLogprobsHidden, options: TokenLogprobsOptions, mesh: DeviceMesh) -> Outputs:
    given: dict[str, Any] = {
        "bias": inputs.bias,
        "temperature": options.temperature,
        "softcap": options.softcap,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "entropy": True,
        "chunk": CHUNK,
        **_split(inputs, mesh),
    }
    found = linear_logprobs(inputs.hidden, inputs.weight, inputs.labels, **given)
    return Outputs(logprobs=found.logprobs, token_entropy=found.entropy)


@candidate(
    "token_logprobs",
    head="hidden",
    precision=FINE,
    dtypes=("bfloat16", "float16"),
    supports={"temperature": ANY, "bias": ANY, "vocab_split": ANY},
    contract=Contract(grads={"hidden": {"tp": "sum"}}),
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="the same with sequence parallelism, and float32 matrix products",
    **_LOGPROBS,
)
@_in_training
def fused_linear_logprobs_sequence_parallel(
    inputs: TokenLogprobsHidden, options: TokenLogprobsOptions, mesh: DeviceMesh
) -> Outputs:
    own, labels = _part(inputs.hidden, inputs.labels, mesh)
    tokens = len(inputs.labels)
    given: dict[str, Any] = {
        "bias": inputs.bias,
        "temperature": options.temperature,
        "entropy": True,
        "chunk": CHUNK,
        **_split(inputs, mesh),
    }
    found = linear_logprobs(own, inputs.weight, labels, sequence_parallel=True, matmul_dtype=torch.float32, **given)
    assert found.entropy is not None
    return Outputs(logprobs=found.logprobs[:tokens], token_entropy=found.entropy[:tokens])


@candidate(
    "token_logprobs",
    head="logits",
    precision=FINE,
    dtypes=tuple(HALVES),
    supports={"temperature": ANY, "top_k": ANY, "top_p": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=ONE_GRADIENT,
    good_for="the same from tensor-parallel logits",
    **_LOGPROBS,
)
@_in_training
def fused_vocab_parallel_logprobs(
    inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, mesh: DeviceMesh
) -> Outputs:
    given: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "entropy": True,
        "chunk": CHUNK,
        **_split(inputs, mesh),
    }
    found = vocab_parallel_logprobs(inputs.logits, inputs.labels, **given)
    return Outputs(logprobs=found.logprobs, token_entropy=found.entropy)


@candidate(
    "token_logprobs",
    head="hidden",
    precision=HALVES,
    dtypes=tuple(HALVES),
    supports={"temperature": ANY, "top_k": ANY, "top_p": ANY, "bias": ANY},
    refuses=("labels", "shapes"),
    budgets=IN_TILES,
    good_for="the same through an lm-head that is a module of any kind",
    **(_LOGPROBS | {"axes": ("dp", "cp")}),
)
@_in_training
def fused_tiled_token_logprobs(inputs: TokenLogprobsHidden, options: TokenLogprobsOptions, mesh: DeviceMesh) -> Outputs:
    found = tiled_token_logprobs(
        _as_module(inputs),
        inputs.hidden,
        inputs.labels,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        entropy=True,
        tiles=TILES,
    )
    return Outputs(logprobs=found.logprobs, token_entropy=found.entropy)


@candidate(
    "dpo",
    head="hidden",
    axes=("dp", "cp", "tp"),
    precision=HALVES,
    dtypes=tuple(HALVES),
    contract=Contract(loss={"cp": "replicate"}),
    supports={option.name: ANY for option in SPECS["dpo"].options}
    | {"reference_layout": ("next", "rolled"), "bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="DPO and IPO from hidden states, packed, with context parallelism",
)
@_in_training
def fused_linear_dpo(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh) -> Outputs:
    given: dict[str, Any] = {
        "bias": inputs.bias,
        "temperature": options.temperature,
        "chunk": CHUNK,
        **_split(inputs, mesh),
    }
    return _dpo(linear_logprobs(inputs.hidden, inputs.weight, inputs.labels, **given).logprobs, inputs, options, mesh)


def _dpo(logprobs: Tensor, inputs: DpoHidden | DpoLogits, options: DpoOptions, mesh: DeviceMesh) -> Outputs:
    loss, metrics = dpo_loss(
        logprobs,
        inputs.reference_logprobs,
        mask=inputs.mask,
        sequence=inputs.sequence,
        sample_mask=inputs.sample_mask,
        valid_sequences=inputs.valid_sequences,
        reference_policy_kl_penalty=options.reference_policy_kl_penalty,
        loss_type=options.loss_type,
        preference_loss_weight=options.preference_loss_weight,
        sft_loss_weight=options.sft_loss_weight,
        preference_average_log_probs=options.preference_average_log_probs,
        sft_average_log_probs=options.sft_average_log_probs,
        epsilon=options.epsilon,
        cp_group=mesh.get_group("cp"),
    )
    return Outputs(loss=loss, metrics=metrics)


@candidate(
    "clipped_pg",
    head="hidden",
    axes=("dp", "cp", "tp"),
    precision=HALVES,
    dtypes=tuple(HALVES),
    supports={option.name: ANY for option in SPECS["clipped_pg"].options} | {"bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="PPO, GRPO, REINFORCE, GSPO and CISPO from hidden states, packed, with context parallelism",
)
@_in_training
def fused_linear_clipped_pg(inputs: ClippedPgHidden, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    return _clipped_pg(_filtered_logprobs(inputs, options, mesh), inputs, options, mesh)


def _filtered_logprobs(inputs: ClippedPgHidden | GrpoHidden, options: FilterOptions, mesh: DeviceMesh) -> TokenLogprobs:
    return linear_logprobs(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        bias=inputs.bias,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        unfiltered=True,
        chunk=CHUNK,
        **_split(inputs, mesh),
    )


@candidate(
    "clipped_pg",
    head="hidden",
    axes=("dp", "cp"),
    precision=HALVES,
    dtypes=tuple(HALVES),
    supports={option.name: ANY for option in SPECS["clipped_pg"].options} | {"bias": ANY},
    refuses=("labels", "shapes"),
    budgets=IN_TILES,
    good_for="the same through an lm-head that is a module of any kind",
)
@_in_training
def fused_tiled_clipped_pg(inputs: ClippedPgHidden, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    return _clipped_pg(_tiled_logprobs(inputs, options), inputs, options, mesh)


def _tiled_logprobs(inputs: ClippedPgHidden | GrpoHidden, options: FilterOptions) -> TokenLogprobs:
    return tiled_token_logprobs(
        _as_module(inputs),
        inputs.hidden,
        inputs.labels,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        unfiltered=True,
        tiles=TILES,
    )


def _as_module(inputs: Hidden) -> torch.nn.Linear:
    """An lm-head that hands the gradients of its parameters on once they are complete."""
    head = torch.nn.Linear(inputs.weight.shape[1], inputs.weight.shape[0], bias=inputs.bias is not None, device="meta")
    for name, leaf in (("weight", inputs.weight), ("bias", inputs.bias)):
        if leaf is not None:
            parameter = torch.nn.Parameter(leaf.detach(), leaf.requires_grad)
            if leaf.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda parameter, leaf=leaf: _hand_on(parameter, leaf))
            setattr(head, name, parameter)
    return head


def _hand_on(parameter: Tensor, leaf: Tensor) -> None:
    """Adds the gradient of a parameter to that of a leaf, and takes it away."""
    leaf.grad = parameter.grad if leaf.grad is None else leaf.grad + parameter.grad
    parameter.grad = None


def _clipped_pg(tokens: TokenLogprobs, inputs: ClippedPgHidden, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    loss, metrics = clipped_pg_loss(
        tokens.logprobs,
        unfiltered_logprobs=tokens.unfiltered_logprobs,
        prev_logprobs=inputs.prev_logprobs,
        generation_logprobs=inputs.generation_logprobs,
        reference_logprobs=inputs.reference_logprobs,
        advantages=inputs.advantages,
        mask=inputs.mask,
        sequence=inputs.sequence,
        sample_mask=inputs.sample_mask,
        valid_tokens=inputs.valid_tokens,
        valid_sequences=inputs.valid_sequences,
        rewards=inputs.rewards,
        positive_tokens=inputs.positive_tokens,
        config=ClippedPGConfig(
            **{
                field.name: getattr(options, field.name)
                for field in fields(ClippedPGConfig)
                if hasattr(options, field.name)
            }
        ),
        cp_group=mesh.get_group("cp"),
    )
    return Outputs(loss=loss, metrics=metrics)


@candidate(
    "grpo",
    head="hidden",
    axes=("dp", "cp", "tp"),
    precision=HALVES,
    dtypes=tuple(HALVES),
    supports={option.name: ANY for option in SPECS["grpo"].options} | {"bias": ANY, "vocab_split": ANY},
    tiles={"token": CHUNK},
    refuses=("labels", "shapes"),
    budgets=IN_CHUNKS,
    good_for="GRPO with DAPO or CISPO from hidden states, as open-instruct's tiled lm-head loss",
)
@_in_training
def fused_linear_grpo(inputs: GrpoHidden, options: GrpoOptions, mesh: DeviceMesh) -> Outputs:
    return _grpo(_filtered_logprobs(inputs, options, mesh), inputs, options, mesh, _rho(options))


@candidate(
    "grpo",
    head="hidden",
    axes=("dp", "cp"),
    precision=HALVES,
    dtypes=tuple(HALVES),
    supports={option.name: ANY for option in SPECS["grpo"].options} | {"bias": ANY},
    refuses=("labels", "shapes"),
    budgets=IN_TILES,
    good_for="the same through an lm-head that is a module of any kind, with rho's weights computed before",
)
@_in_training
def fused_tiled_grpo(inputs: GrpoHidden, options: GrpoOptions, mesh: DeviceMesh) -> Outputs:
    weights = rho_weights(
        _rho(options),
        old_logprobs=inputs.old_logprobs,
        vllm_logprobs=inputs.vllm_logprobs,
        advantages=inputs.advantages,
        mask=inputs.mask,
        sequence=inputs.sequence,
        sequences=len(inputs.cu_seqlens) - 1,
        cp_group=mesh.get_group("cp"),
    )
    return _grpo(_tiled_logprobs(inputs, options), inputs, options, mesh, weights)


@candidate(
    "grpo",
    head="hidden",
    axes=("dp", "cp"),
    precision=_in_forward(HALVES),
    dtypes=tuple(HALVES),
    supports={option.name: ANY for option in SPECS["grpo"].options} | {"bias": ANY},
    refuses=("labels", "shapes"),
    budgets=IN_TILES,
    good_for="the same, with each tile's gradients made in forward: the head runs once, not twice",
)
@_in_training
def fused_tiled_grpo_in_one_pass(inputs: GrpoHidden, options: GrpoOptions, mesh: DeviceMesh) -> Outputs:
    given: dict[str, Any] = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    given |= {"tiles": TILES, "rho": _rho(options)}
    given |= _grpo_arguments(inputs, options, mesh)
    loss, metrics = tiled_grpo_loss(_as_module(inputs), inputs.hidden, inputs.labels, **given)
    return Outputs(loss=loss, metrics={name: value.to(loss.dtype) for name, value in metrics.items()})


def _rho(options: GrpoOptions) -> RhoCorrection:
    return RhoCorrection(**{field.name: getattr(options, field.name) for field in fields(RhoCorrection)})


def _grpo(
    tokens: TokenLogprobs,
    inputs: GrpoHidden,
    options: GrpoOptions,
    mesh: DeviceMesh,
    rho: RhoCorrection | RhoWeights,
) -> Outputs:
    given = {"unfiltered_logprobs": tokens.unfiltered_logprobs, "rho": rho}
    loss, metrics = grpo_loss(tokens.logprobs, **given, **_grpo_arguments(inputs, options, mesh))
    return Outputs(loss=loss, metrics=metrics)


def _grpo_arguments(inputs: GrpoHidden, options: GrpoOptions, mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "advantages": inputs.advantages,
        "mask": inputs.mask,
        "valid_tokens": inputs.valid_tokens,
        "old_logprobs": inputs.old_logprobs,
        "reference_logprobs": inputs.reference_logprobs,
        "vllm_logprobs": inputs.vllm_logprobs,
        "sequence": inputs.sequence,
        "sequences": len(inputs.cu_seqlens) - 1,
        "loss_fn": options.loss_fn,
        "clip_lower": options.clip_lower,
        "clip_higher": options.clip_higher,
        "beta": options.beta,
        "kl_estimator": options.kl_estimator,
        "loss_denominator": options.loss_denominator,
        "loss_scale": options.loss_scale,
        "cp_group": mesh.get_group("cp"),
    }
