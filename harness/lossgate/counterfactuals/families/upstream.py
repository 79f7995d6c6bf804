# SPDX-License-Identifier: Apache-2.0
"""Upstream gradients: of one token for all, of the wrong tokens, of an output that is left out."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec

Change = Callable[[Setting, Tensor], Tensor]


def upstreams(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of reading what comes from above."""
    for name in spec.outputs:
        for what, (words, change) in (_OF_LOSS if name == "loss" else _OF_TOKENS).items():
            yield mistake(
                f"upstream gradient of {name} {what}",
                f"backward {words.format(name=name)}",
                "upstream",
                partial(_matters, name, change),
                upstream=partial(_changed, name, change),
            )

        if name != "loss" and name == spec.outputs[-1] and spec.outputs[0] not in ("loss", name):
            for what, (words, change) in _OF_TOKENS.items():
                yield mistake(
                    f"upstream gradient of every output {what}",
                    f"backward {words.format(name='every output')}",
                    "upstream",
                    partial(_matters_to_any, change),
                    upstream=partial(_changed_all, change),
                )
        if name != "loss":
            yield mistake(
                f"upstream gradient of {name} of two columns, read as if dense",
                f"backward reads the upstream gradients of {name} with a stride of 1, where they are a column of two",
                "upstream",
                _is_column,
                "make the upstream gradient contiguous, or use its stride",
                padding=True,
                upstream=partial(_strided, name),
            )


def _matters(name: str, change: Change, setting: Setting) -> bool:
    """Returns whether there is such a gradient, and it is changed."""
    given = setting.batch.cotangents.get(name)
    return given is not None and not torch.equal(change(setting, given), given)


def _matters_to_any(change: Change, setting: Setting) -> bool:
    return any(g.dim() and _matters(name, change, setting) for name, g in setting.batch.cotangents.items())


def _lost(setting: Setting, g: Tensor) -> Tensor:
    return torch.zeros_like(g)


def _changed(of: str, change: Change, setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return change(setting, gradient) if name == of else gradient


def _strided(of: str, setting: Setting, name: str, g: Tensor) -> Tensor:
    """Reads a column of a table of two without its stride, on each rank."""
    if name != of:
        return g
    beside = (x for name_of_other, x in setting.batch.cotangents.items() if name_of_other != of)
    other = next(beside, torch.zeros_like(g))
    found = torch.empty_like(g)
    for own in setting.token_shards:
        found[own] = torch.stack([g[own], other[own]], 1).flatten()[: len(own)]
    return found


def _is_column(setting: Setting) -> bool:
    """Returns whether an output of tokens may lie beside another that has an upstream gradient."""
    of_tokens = [output for output in setting.spec.outputs if output != "loss"]
    return len(of_tokens) == 2 and "loss" not in setting.batch.cotangents


def _changed_all(change: Change, setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return change(setting, gradient) if gradient.dim() else gradient


def _first_of_rank(setting: Setting, g: Tensor) -> Tensor:
    return setting.moved_on_each_rank(g, lambda own: own[:1].expand(len(own)))


def _by_held(setting: Setting, g: Tensor) -> Tensor:
    found = g.clone()
    for own, held in zip(setting.token_shards, setting.held_by_ranks, strict=True):
        found[own] = g[own] / max(held, 1)
    return found


_OF_LOSS: dict[str, tuple[str, Change]] = {
    "ignored": ("takes an upstream gradient of 1, whatever it is given", lambda s, g: torch.ones_like(g)),
    "twice": ("multiplies by the upstream gradient twice", lambda s, g: g * g),
    "with the other sign": ("takes the upstream gradient with the other sign", lambda s, g: -g),
    "without its sign": ("takes the upstream gradient without its sign", lambda s, g: g.abs()),
}
_OF_TOKENS: dict[str, tuple[str, Change]] = {
    "ignored": ("takes upstream gradients of {name} of 1", lambda s, g: torch.ones_like(g)),
    "lost": ("takes upstream gradients of {name} of 0", _lost),
    "of the first token": (
        "takes the first token's upstream gradient of {name} for all tokens",
        lambda s, g: g[:1].expand(len(g)),
    ),
    "of each rank's first token": (
        "takes the upstream gradient of {name} of each rank's first token for all its tokens",
        _first_of_rank,
    ),
    "averaged": (
        "takes the mean of the upstream gradients of {name} for each token",
        lambda s, g: g.mean().expand(len(g)),
    ),
    "one token late": ("takes the upstream gradients of {name} one token late", lambda s, g: g.roll(1)),
    "one token early": ("takes the upstream gradients of {name} one token early", lambda s, g: g.roll(-1)),
    "twice": ("multiplies by the upstream gradients of {name} twice", lambda s, g: g * g),
    "divided by the count": (
        "divides the upstream gradients of {name} by the number of trained tokens",
        lambda s, g: g / s.fields["valid_tokens"].clamp(min=1),
    ),
    "divided by the rank's tokens": (
        "divides the upstream gradients of {name} by the number of tokens that each rank holds, padding included",
        _by_held,
    ),
}
