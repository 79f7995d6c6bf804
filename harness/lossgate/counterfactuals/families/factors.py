# SPDX-License-Identifier: Apache-2.0
"""Mistakes of factors and of upstream gradients.

A factor is a number of the problem that multiplies the loss, its gradient, or single outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from lossgate.base.layout import AXES, Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Outputs
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import LOSS
from lossgate.specs.spec import Spec

Number = Callable[[Setting], float]
"""A number of a problem on a layout."""


def _sizes(axes: tuple[Axis, ...], setting: Setting) -> float:
    return float(prod(setting.size(axis) for axis in axes)) if all(setting.size(a) > 1 for a in axes) else 1.0


def _upstream(setting: Setting) -> float:
    return float(setting.batch.cotangents.get("loss", torch.tensor(1.0)))


def fixed(number: float, setting: Setting) -> float:
    """Returns the same number for every problem."""
    return number


def numbers(spec: Spec, head: str) -> Mapping[str, Number]:
    """Returns the numbers that may be a factor, by name."""
    found: dict[str, Number] = {}
    for how_many in (1, 2, 3):
        found |= {" * ".join(axes): partial(_sizes, axes) for axes in combinations(AXES, how_many)}
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


_LEFT_OUT = "leave this factor out; the backward of an all-reduce may bring it in"


def in_words(name: str) -> str:
    """Returns the words for a multiplication by a factor, given its name."""
    return f"divided by {name[5:-1]}" if name.startswith("1 / (") else f"multiplied by {name}"


def _todo(name: str) -> str:
    """Returns the advice about a factor, given its name; "" if the name is enough."""
    divides, factor = name.startswith("1 / ("), name.removeprefix("1 / (").removesuffix(")")
    if factor == "the temperature":
        if divides:
            return "divide by the temperature once, not twice"
        return "divide the gradient of the logits by the temperature, too"
    if not set(factor.split(" * ")) <= set(AXES):
        return ""
    if divides or "tp" in factor:
        return _LEFT_OUT
    averaged = ", ".join(f'"{axis}": "avg"' for axis in factor.split(" * "))
    return f"{_LEFT_OUT}. Or, if the caller takes the mean over {factor}, declare Contract(loss={{{averaged}}})"


def constants(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of a factor too many, and of a backward that ignores the gradient of the
    sum over tokens.
    """
    if "logprobs" in spec.uses and spec.reference is not None:
        yield mistake(
            "all above the sum ignored",
            "{outputs}: backward takes 1 for the gradient of the sum over tokens, so it ignores the upstream gradient "
            "and the divisor of the sum",
            lambda setting: _above_the_sum(setting) != 1.0,
            "multiply by the upstream gradient, and divide by the divisor, in backward, too",
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
                upstream=partial(_scaled_upstream, number, "loss"),
                outputs=partial(_scaled_loss, number),
            )
            yield mistake(
                f"gradient of the loss times {name}",
                f"the gradient of the loss is {by}, but its value is not",
                when,
                todo,
                upstream=partial(_scaled_upstream, number, "loss"),
            )
        for token_value in [value for value in spec.outputs if value != "loss"]:
            yield mistake(
                f"gradient of {token_value} times {name}",
                f"the gradient of {token_value} is {by}, but its value is not",
                partial(_matters_to, token_value, number),
                upstream=partial(_scaled_upstream, number, token_value),
            )
        yield mistake(
            f"outputs times {name}",
            f"{{outputs}}: {by}",
            when,
            todo,
            outputs=partial(scaled_outputs, number),
        )


def powers_of_options(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes of outputs that are multiplied or divided by an option or its square."""
    for option in setting.bound_spec.spec.options:
        if not isinstance(option.default, float):
            continue
        for power, words in _POWERS.items():
            yield mistake(
                f"outputs {words} {option.name}",
                f"{{outputs}}: {words} {option.name}",
                outputs=partial(scaled_outputs, partial(_power, option.name, power)),
            )


_POWERS = {1: "multiplied by", 2: "multiplied by the square of", -1: "divided by", -2: "divided by the square of"}
"""The powers of an option that may be a factor, in words."""


def _power(option: str, power: int, setting: Setting) -> float:
    value = getattr(setting.bound_spec.options, option)
    return float(value) ** power if isinstance(value, float) and value > 0 else 1.0


def _above_the_sum(setting: Setting) -> float:
    """Returns the size of the gradient that the loss gives to each log-probability, with the
    upstream gradient. It is 1 unless all trained tokens have the same size, and it is not 0.
    """
    found = setting.bound.dense.loss_stage(setting.bound_spec).upstream.get("logprobs")
    if found is None:
        return 1.0
    of_sequences = HEADS[setting.bound.problem.head].gives == "sequence"
    is_trained = found != 0 if of_sequences else setting.batch.fields["mask"]
    sizes = found[is_trained].abs()
    if not len(sizes) or not sizes[0] or not torch.allclose(sizes, sizes[:1].expand_as(sizes), rtol=1e-9, atol=0.0):
        return 1.0
    return float(sizes[0])


def _gradients_of_the_sum(setting: Setting, outputs: Outputs) -> Outputs:
    above, sign = _above_the_sum(setting), 1.0 if _upstream(setting) > 0 else -1.0
    return {o: x * sign / above if o.kind == "gradient" else x for o, x in outputs.items()}


def _matters(number: Number, setting: Setting) -> bool:
    return number(setting) != 1.0


def _matters_to(output: str, number: Number, setting: Setting) -> bool:
    """Returns whether an output has an upstream gradient, and the number is not 1."""
    return output in setting.batch.cotangents and number(setting) != 1.0


def _scaled_loss(number: Number, setting: Setting, outputs: Outputs) -> Outputs:
    return {**outputs, LOSS: outputs[LOSS] * number(setting)}


def _scaled_upstream(number: Number, of: str, setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return gradient * number(setting) if name == of else gradient


def scaled_outputs(number: Number, setting: Setting, outputs: Outputs) -> Outputs:
    """Returns outputs whose finite entries are multiplied by a number of the problem."""
    factor = number(setting)
    return {output: torch.where(x.isfinite(), x * factor, x) for output, x in outputs.items()}


OfUpstream = Callable[[Setting, Tensor], Tensor]


def upstreams(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of reading upstream gradients."""
    for name in spec.outputs:
        changes = _OF_LOSS if name == "loss" else _OF_TOKENS
        for what, (words, change) in changes.items():
            yield mistake(
                f"upstream gradient of {name} {what}",
                f"backward {words.format(name=name)}",
                partial(_changes_gradient, name, change),
                upstream=partial(_changed, name, change),
            )
        if name == "loss":
            continue
        if name == spec.outputs[-1] and spec.outputs[0] not in ("loss", name):  # once, after several of tokens
            for what, (words, change) in changes.items():
                yield mistake(
                    f"upstream gradient of every output {what}",
                    f"backward {words.format(name='every output')}",
                    partial(_changes_any_gradient, change),
                    upstream=partial(_changed_all, change),
                )
        yield mistake(
            f"upstream gradient of {name} of two columns, read as if dense",
            f"backward reads the upstream gradients of {name} with a stride of 1, although they are one column of "
            "a tensor with two",
            _is_column,
            "make the upstream gradient contiguous, or use its stride",
            padding=True,
            upstream=partial(_strided, name),
        )


def _changes_gradient(name: str, change: OfUpstream, setting: Setting) -> bool:
    """Returns whether an output has an upstream gradient, and a mistake changes it."""
    given = setting.batch.cotangents.get(name)
    return given is not None and not torch.equal(change(setting, given), given)


def _changes_any_gradient(change: OfUpstream, setting: Setting) -> bool:
    return any(g.dim() and _changes_gradient(name, change, setting) for name, g in setting.batch.cotangents.items())


def _lost(setting: Setting, g: Tensor) -> Tensor:
    return torch.zeros_like(g)


def _changed(of: str, change: OfUpstream, setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return change(setting, gradient) if name == of else gradient


def _strided(of: str, setting: Setting, name: str, g: Tensor) -> Tensor:
    """Reads one column of a tensor with two as if it were contiguous, on each rank."""
    if name != of:
        return g
    others = (x for other_name, x in setting.batch.cotangents.items() if other_name != of)
    other = next(others, torch.zeros_like(g))
    found = torch.empty_like(g)
    for own in setting.token_shards:
        memory = torch.stack([g[own], other[own]], 1).flatten()
        found[own] = memory[: len(own)]
    return found


def _is_column(setting: Setting) -> bool:
    """Returns whether upstream gradients of tokens may be the columns of a tensor with two."""
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
    "ignored": ("takes 1 for each upstream gradient of {name}", lambda s, g: torch.ones_like(g)),
    "lost": ("takes 0 for each upstream gradient of {name}", _lost),
    "of the first token": (
        "takes the upstream gradient of {name} at the first token for all tokens",
        lambda s, g: g[:1].expand(len(g)),
    ),
    "of each rank's first token": (
        "takes the upstream gradient of {name} at each rank's first token for all tokens of the rank",
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
