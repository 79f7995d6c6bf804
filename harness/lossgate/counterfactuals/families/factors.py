# SPDX-License-Identifier: Apache-2.0
"""Factors: the loss, its gradient, or what comes out, times a number that the problem has; and
upstream gradients: of one token for all, of the wrong tokens, of an output that is left out.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from lossgate.base.layout import AXES, Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Outputs, Part
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.heads import HEADS
from lossgate.specs.spec import Spec

Number = Callable[[Setting], float]
"""A number of a problem on a layout."""


def _sizes(axes: tuple[Axis, ...], setting: Setting) -> float:
    return float(prod(setting.size(axis) for axis in axes)) if all(setting.size(a) > 1 for a in axes) else 1.0


def _upstream(setting: Setting) -> float:
    return float(setting.batch.cotangents.get("loss", torch.tensor(1.0)))


def fixed(number: float, setting: Setting) -> float:
    """Returns a number that no problem changes."""
    return number


def numbers(spec: Spec, head: str) -> Mapping[str, Number]:
    """Returns what a factor may be, by what people call it."""
    found: dict[str, Number] = {}
    for count in (1, 2, 3):
        found |= {" * ".join(axes): partial(_sizes, axes) for axes in combinations(AXES, count)}
    found |= {
        "the number of trained tokens": lambda s: max(float(s.fields["valid_tokens"]), 1.0),
        "the number of sequences": lambda s: max(float(len(s.lengths)), 1.0),
        "2": partial(fixed, 2.0),
    }
    if spec.reference is not None:
        found["the upstream gradient"] = _upstream
    if spec.temperature is not None and HEADS[head].has_logits:
        found["the temperature"] = lambda s: s.temperature
    if HEADS[head].has_logits:
        found["the size of the vocabulary"] = lambda s: float(s.bound.problem.vocab)
    inverse = {f"1 / ({name})": partial(_inverse, number) for name, number in found.items()}
    return {"-1": partial(fixed, -1.0), "0": partial(fixed, 0.0), **found, **inverse}


def _inverse(number: Number, setting: Setting) -> float:
    value = number(setting)
    return 1 / value if value else 1.0


def in_words(name: str) -> str:
    """Returns what a factor does, of its name."""
    return f"divided by {name[5:-1]}" if name.startswith("1 / (") else f"multiplied by {name}"


def _todo(name: str) -> str:
    """Returns what to do about a factor, of its name; "" if its name says all."""
    multiplies, factor = not name.startswith("1 / ("), name.removeprefix("1 / (").removesuffix(")")
    if factor == "the temperature":
        too_often = "divide by the temperature once, not twice"
        return "divide the gradient of the logits by the temperature, too" if multiplies else too_often
    if not set(factor.split(" * ")) <= set(AXES):
        return ""
    if multiplies and "tp" not in factor:
        return f'leave it out, or declare "avg" over {factor} in its Contract, if the caller takes the mean'
    return "leave this factor out"


def constants(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of a factor too many, and of all factors that stand above a sum."""
    if "logprobs" in spec.uses and spec.reference is not None:
        yield mistake(
            "all above the sum ignored",
            "{outputs}: what comes back to the sum over tokens is taken for 1: the upstream gradient, and what divides",
            lambda setting: _above_the_sum(setting) != 1.0,
            "multiply by the gradient that backward is given",
            outputs=_gradients_of_the_sum,
        )
    for name, number in numbers(spec, head).items():
        when, by, todo = partial(_matters, number), in_words(name), _todo(name)
        if spec.reference is not None:
            yield mistake(
                f"loss times {name}",
                f"the loss is {by}, in value and gradient",
                when,
                todo,
                parts=partial(_one_part, number),
            )
            yield mistake(
                f"gradient of the loss times {name}",
                f"the gradient of the loss is {by}, and its value is not",
                when,
                todo,
                upstream=partial(_scaled_upstream, number, "loss"),
            )
        for token_value in [value for value in spec.outputs if value != "loss"]:
            yield mistake(
                f"gradient of {token_value} times {name}",
                f"the gradient of {token_value} is {by}, and its value is not",
                partial(_matters_to, token_value, number),
                upstream=partial(_scaled_upstream, number, token_value),
            )
        yield mistake(
            f"outputs times {name}",
            f"{{outputs}}: {by}",
            when,
            todo,
            outputs=partial(_scaled_outputs, number),
        )


def _above_the_sum(setting: Setting) -> float:
    """Returns by what the gradient of each log-probability is multiplied, times the upstream
    gradient, if that is one number in all trained tokens; else 1.
    """
    found = setting.bound.dense.loss_stage(setting.bound_spec).upstream.get("logprobs")
    if found is None:
        return 1.0
    of_sequences = HEADS[setting.bound.problem.head].gives == "sequence"
    own = found[found != 0 if of_sequences else setting.batch.fields["mask"]].abs()
    if not len(own) or not own[0] or not torch.allclose(own, own[:1].expand_as(own), rtol=1e-9, atol=0.0):
        return 1.0
    return float(own[0])


def _gradients_of_the_sum(setting: Setting, outputs: Outputs) -> Outputs:
    above, sign = _above_the_sum(setting), 1.0 if _upstream(setting) > 0 else -1.0
    return {o: x * sign / above if o.kind == "gradient" else x for o, x in outputs.items()}


def _matters(number: Number, setting: Setting) -> bool:
    return number(setting) != 1.0


def _matters_to(output: str, number: Number, setting: Setting) -> bool:
    """Returns whether an output has an upstream gradient, and the number is not 1."""
    return output in setting.batch.cotangents and number(setting) != 1.0


def _one_part(number: Number, setting: Setting) -> list[Part]:
    return [(number(setting), {})]


def _scaled_upstream(number: Number, of: str, setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return gradient * number(setting) if name == of else gradient


def _scaled_outputs(number: Number, setting: Setting, outputs: Outputs) -> Outputs:
    factor = number(setting)
    return {output: torch.where(x.isfinite(), x * factor, x) for output, x in outputs.items()}


OfUpstream = Callable[[Setting, Tensor], Tensor]


def upstreams(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of reading what comes from above."""
    for name in spec.outputs:
        for what, (words, change) in (_OF_LOSS if name == "loss" else _OF_TOKENS).items():
            yield mistake(
                f"upstream gradient of {name} {what}",
                f"backward {words.format(name=name)}",
                partial(_changes_gradient, name, change),
                upstream=partial(_changed, name, change),
            )

        if name != "loss" and name == spec.outputs[-1] and spec.outputs[0] not in ("loss", name):
            for what, (words, change) in _OF_TOKENS.items():
                yield mistake(
                    f"upstream gradient of every output {what}",
                    f"backward {words.format(name='every output')}",
                    partial(_changes_any_gradient, change),
                    upstream=partial(_changed_all, change),
                )
        if name != "loss":
            yield mistake(
                f"upstream gradient of {name} of two columns, read as if dense",
                f"backward reads the upstream gradients of {name} with a stride of 1, where they are a column of two",
                _is_column,
                "make the upstream gradient contiguous, or use its stride",
                padding=True,
                upstream=partial(_strided, name),
            )


def _changes_gradient(name: str, change: OfUpstream, setting: Setting) -> bool:
    """Returns whether there is such a gradient, and it is changed."""
    given = setting.batch.cotangents.get(name)
    return given is not None and not torch.equal(change(setting, given), given)


def _changes_any_gradient(change: OfUpstream, setting: Setting) -> bool:
    return any(g.dim() and _changes_gradient(name, change, setting) for name, g in setting.batch.cotangents.items())


def _lost(setting: Setting, g: Tensor) -> Tensor:
    return torch.zeros_like(g)


def _changed(of: str, change: OfUpstream, setting: Setting, name: str, gradient: Tensor) -> Tensor:
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


def _changed_all(change: OfUpstream, setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return change(setting, gradient) if gradient.dim() else gradient


def _first_of_rank(setting: Setting, g: Tensor) -> Tensor:
    return setting.moved_on_each_rank(g, lambda own: own[:1].expand(len(own)))


def _by_held(setting: Setting, g: Tensor) -> Tensor:
    found = g.clone()
    for own, held in zip(setting.token_shards, setting.held_by_ranks, strict=True):
        found[own] = g[own] / max(held, 1)
    return found


_OF_LOSS: dict[str, tuple[str, OfUpstream]] = {
    "ignored": ("takes an upstream gradient of 1, whatever it is given", lambda s, g: torch.ones_like(g)),
    "twice": ("multiplies by the upstream gradient twice", lambda s, g: g * g),
    "with the other sign": ("takes the upstream gradient with the other sign", lambda s, g: -g),
    "without its sign": ("takes the upstream gradient without its sign", lambda s, g: g.abs()),
}
_OF_TOKENS: dict[str, tuple[str, OfUpstream]] = {
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
