# SPDX-License-Identifier: Apache-2.0
"""Mistakes of summing over ranks: the part of one rank is dropped, added twice, or taken alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.batch_parts import masks_of
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.seams import Part, scaled_gradient
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec

Project = Callable[[Setting, Mapping[str, Tensor]], Tensor]
"""Computes logits from differentiable inputs."""


@dataclass(frozen=True)
class _Weights:
    """The factors of the parts of ranks in a sum."""

    place: int
    """The index of the rank that differs: 0 for the first, -1 for the last."""
    own: float
    """The factor of this rank."""
    others: float
    words: str = ""

    def of(self, ranks: int) -> list[float]:
        found = [self.others] * ranks
        found[self.place] = self.own
        return found


_WEIGHTS: Mapping[str, _Weights] = {
    "of the first rank alone": _Weights(
        0, 1.0, 0.0, "is that of the first rank of {axis} alone: it is not summed over {axis}"
    ),
    "of the last rank alone": _Weights(
        -1, 1.0, 0.0, "is that of the last rank of {axis} alone: it is not summed over {axis}"
    ),
    "without the last rank": _Weights(-1, 0.0, 1.0, "lacks the part of the last rank of {axis}"),
    "without the first rank": _Weights(0, 0.0, 1.0, "lacks the part of the first rank of {axis}"),
    "with the last rank twice": _Weights(-1, 2.0, 1.0, "counts the part of the last rank of {axis} twice"),
    "with the first rank twice": _Weights(0, 2.0, 1.0, "counts the part of the first rank of {axis} twice"),
}


def ranks(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of summing gradients and losses over ranks, and those of a bias."""
    axes: tuple[Axis, ...] = ("dp", "cp")
    for what, weights in _WEIGHTS.items():
        if head == "hidden":
            yield _gradient("hidden", f"hidden {what}", "tp", weights, partial(_over_vocab, weights))
        for axis in axes:
            if head == "hidden":
                yield _gradient("weight", f"weight {what}", axis, weights, partial(_over_tokens, weights, axis))
            # A loss that trains sequences is not summed over cp, which splits tokens alone.
            if spec.reference is not None and (axis == "dp" or spec.trained_dim == "token"):
                yield mistake(
                    f"loss {what} of {axis}",
                    f"the loss {weights.words.format(axis=axis)}",
                    split(axis),
                    f"add up the parts of all ranks over {axis}",
                    parts=partial(_parts, weights, axis),
                )
    if head in ("hidden", "logits"):
        yield mistake(
            "gradient of the logits of the first tp rank alone",
            "only the columns of the logits on the first tp rank get a gradient",
            split("tp"),
            project=partial(_over_columns, _Weights(0, 1.0, 0.0)),
        )
    if head == "hidden":
        yield from _OF_BIAS


def _gradient(leaf: str, name: str, axis: Axis, weights: _Weights, project: Project) -> Counterfactual:
    declared = f'Contract(grads={{"{leaf}": {{"{axis}": "sum"}}}})'
    return mistake(
        f"gradient of {name} of {axis}",
        f"the gradient of {'the weight' if leaf == 'weight' else leaf} {weights.words.format(axis=axis)}",
        split(axis),
        f"sum it over {axis}, or declare {declared} and leave the sum to the caller",
        project=project,
    )


def _has_bias(setting: Setting) -> bool:
    return "bias" in setting.batch.leaves


def _parts(weights: _Weights, axis: Axis, setting: Setting) -> Sequence[Part]:
    of = weights.of(setting.size(axis))
    return [(of[at[axis]], masks_of(setting, [rank])) for rank, at in enumerate(setting.coordinates)]


def _over_vocab(weights: _Weights, setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    """Returns logits. The part of each tp rank in the gradient of hidden is scaled."""
    parts: list[Tensor] = []
    for shard, factor in zip(setting.vocab_shards, weights.of(setting.size("tp")), strict=True):
        own = {name: leaf[shard.start : shard.end] for name, leaf in leaves.items() if name != "hidden"}
        parts.append(setting.head.logits({"hidden": scaled_gradient(leaves["hidden"], factor), **own}))
    return torch.cat(parts, 1)


def _over_columns(weights: _Weights, setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    logits = setting.head.logits(leaves)
    shards = zip(setting.vocab_shards, weights.of(setting.size("tp")), strict=True)
    return torch.cat([scaled_gradient(logits[:, s.start : s.end], factor) for s, factor in shards], 1)


def _over_tokens(weights: _Weights, axis: Axis, setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    """Returns logits. The part of each rank in the gradients of weight and bias is scaled."""
    of, at = weights.of(setting.size(axis)), setting.coordinates
    logits = [torch.zeros(0, setting.partition.vocab, dtype=torch.float64)]
    for rank, tokens in enumerate(setting.token_shards):
        factor = of[at[rank][axis]]
        shared = {n: scaled_gradient(leaf, factor) for n, leaf in leaves.items() if n != "hidden"}
        logits.append(setting.head.logits({"hidden": leaves["hidden"][tokens], **shared}))
    order = torch.cat(setting.token_shards)
    return torch.cat(logits)[order.argsort()]


_OF_BIAS = (
    mistake(
        "bias ignored",
        "the bias of the lm-head is ignored",
        _has_bias,
        leaves=lambda s, leaves: {**leaves, "bias": 0 * leaves["bias"]},
    ),
    mistake(
        "bias without a gradient",
        "the bias of the lm-head gets no gradient",
        _has_bias,
        leaves=lambda s, leaves: {**leaves, "bias": leaves["bias"].detach()},
    ),
)
