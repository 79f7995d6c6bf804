# SPDX-License-Identifier: Apache-2.0
"""What single ranks add to the whole: dropped, added twice, or not summed at all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.seams import Part, scaled_gradient
from lossgate.counterfactuals.setting import Setting
from lossgate.counterfactuals.shares import masks_of
from lossgate.specs.spec import Spec

Weights = Callable[[int], list[float]]
"""The weight of each of so many ranks."""


def _first_only(ranks: int) -> list[float]:
    return [1.0] + [0.0] * (ranks - 1)


def _last_only(ranks: int) -> list[float]:
    return [0.0] * (ranks - 1) + [1.0]


def _but_last(ranks: int) -> list[float]:
    return [1.0] * (ranks - 1) + [0.0]


def _but_first(ranks: int) -> list[float]:
    return [0.0] + [1.0] * (ranks - 1)


def _last_twice(ranks: int) -> list[float]:
    return [1.0] * (ranks - 1) + [2.0]


def _first_twice(ranks: int) -> list[float]:
    return [2.0] + [1.0] * (ranks - 1)


_WEIGHTS: Mapping[str, tuple[Weights, str]] = {
    "of the first rank alone": (_first_only, "is that of the first rank of {axis} alone: it is not summed over {axis}"),
    "of the last rank alone": (_last_only, "is that of the last rank of {axis} alone: it is not summed over {axis}"),
    "without the last rank": (_but_last, "lacks the part of the last rank of {axis}"),
    "without the first rank": (_but_first, "lacks the part of the first rank of {axis}"),
    "with the last rank twice": (_last_twice, "counts the part of the last rank of {axis} twice"),
    "with the first rank twice": (_first_twice, "counts the part of the first rank of {axis} twice"),
}


def ranks(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields what is wrong with the parts that ranks add to gradients and loss."""
    axes: tuple[Axis, ...] = ("dp", "cp")
    for what, (weights, words) in _WEIGHTS.items():
        if head == "hidden":
            yield mistake(
                f"gradient of hidden {what} of tp",
                f"the gradient of hidden {words.format(axis='tp')}",
                "ranks",
                split("tp"),
                'sum it over tp, or declare Contract(grads={"hidden": {"tp": "sum"}}) and leave the sum to the caller',
                project=partial(_over_vocab, weights),
            )
        for axis in axes:
            if head == "hidden":
                yield mistake(
                    f"gradient of weight {what} of {axis}",
                    f"the gradient of the weight {words.format(axis=axis)}",
                    "ranks",
                    split(axis),
                    f'sum it over {axis}, or declare Contract(grads={{"weight": {{"{axis}": "sum"}}}}) and leave the '
                    "sum to the caller",
                    project=partial(_over_tokens, weights, axis),
                )
            if spec.reference is not None and spec.trained_dim == "token":
                yield mistake(
                    f"loss {what} of {axis}",
                    f"the loss {words.format(axis=axis)}",
                    "ranks",
                    split(axis),
                    f"add up the parts of all ranks over {axis}",
                    parts=partial(_parts, weights, axis),
                )
        if spec.reference is not None and spec.trained_dim == "sequence":
            yield mistake(
                f"loss {what} of dp",
                f"the loss {words.format(axis='dp')}",
                "ranks",
                split("dp"),
                "add up the parts of all ranks over dp",
                parts=partial(_parts, weights, "dp"),
            )
    if head in ("hidden", "logits"):
        yield mistake(
            "gradient of the logits of the first tp rank alone",
            "only the first tp rank's columns of the logits get a gradient",
            "ranks",
            split("tp"),
            project=partial(_over_columns, _first_only),
        )
    if head == "hidden":
        yield mistake(
            "bias ignored",
            "the bias of the lm-head is ignored",
            "bias",
            _has_bias,
            leaves=lambda s, leaves: {**leaves, "bias": 0 * leaves["bias"]},
        )
        yield mistake(
            "bias without a gradient",
            "the bias of the lm-head gets no gradient",
            "bias",
            _has_bias,
            leaves=lambda s, leaves: {**leaves, "bias": leaves["bias"].detach()},
        )


def _has_bias(setting: Setting) -> bool:
    return "bias" in setting.batch.leaves


def _parts(weights: Weights, axis: Axis, setting: Setting) -> Sequence[Part]:
    at = _coordinates(setting)
    of = weights(setting.size(axis))
    return [(of[at[rank][axis]], masks_of(setting, [rank])) for rank in range(len(setting.token_shards))]


def _coordinates(setting: Setting) -> list[dict[Axis, int]]:
    cp = setting.size("cp")
    return [{"dp": rank // cp, "cp": rank % cp} for rank in range(len(setting.token_shards))]


def _over_vocab(weights: Weights, setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    """Multiplies each tp rank's part in the gradient of hidden by its weight."""
    parts: list[Tensor] = []
    for shard, factor in zip(setting.vocab_shards, weights(setting.size("tp")), strict=True):
        own = {name: leaf[shard.start : shard.end] for name, leaf in leaves.items() if name != "hidden"}
        parts.append(setting.head.logits({"hidden": scaled_gradient(leaves["hidden"], factor), **own}))
    return torch.cat(parts, 1)


def _over_columns(weights: Weights, setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    logits = setting.head.logits(leaves)
    shards = zip(setting.vocab_shards, weights(setting.size("tp")), strict=True)
    return torch.cat([scaled_gradient(logits[:, s.start : s.end], factor) for s, factor in shards], 1)


def _over_tokens(weights: Weights, axis: Axis, setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    """Multiplies each rank's part in the gradients of weight and bias by its weight."""
    of, at = weights(setting.size(axis)), _coordinates(setting)
    logits = [torch.zeros(0, setting.partition.vocab, dtype=torch.float64)]
    for rank, tokens in enumerate(setting.token_shards):
        factor = of[at[rank][axis]]
        shared = {n: scaled_gradient(leaf, factor) for n, leaf in leaves.items() if n != "hidden"}
        logits.append(setting.head.logits({"hidden": leaves["hidden"][tokens], **shared}))
    order = torch.cat(setting.token_shards)
    return torch.cat(logits)[order.argsort()]
