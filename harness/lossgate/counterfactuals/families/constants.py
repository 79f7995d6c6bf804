# SPDX-License-Identifier: Apache-2.0
"""Factors: the loss, its gradient, or what comes out, times a number that the problem has."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Outputs, Part
from lossgate.counterfactuals.setting import Setting
from lossgate.layout import AXES, Axis
from lossgate.specs.spec import Spec

Number = Callable[[Setting], float]
"""A number of a problem on a layout."""


def _sizes(axes: tuple[Axis, ...], setting: Setting) -> float:
    return float(prod(setting.size(axis) for axis in axes)) if all(setting.size(a) > 1 for a in axes) else 1.0


def _upstream(setting: Setting) -> float:
    return float(setting.batch.cotangents.get("loss", torch.tensor(1.0)))


def _fixed(number: float, setting: Setting) -> float:
    return number


def _numbers() -> Mapping[str, Number]:
    """Returns what a factor may be, by what people call it."""
    found: dict[str, Number] = {}
    for count in (1, 2, 3):
        found |= {" * ".join(axes): partial(_sizes, axes) for axes in combinations(AXES, count)}
    found |= {
        "the number of trained tokens": lambda s: max(float(s.fields["valid_tokens"]), 1.0),
        "the number of sequences": lambda s: max(float(len(s.partition.lengths)), 1.0),
        "the temperature": lambda s: s.temperature,
        "the upstream gradient": _upstream,
        "2": partial(_fixed, 2.0),
    }
    inverse = {f"1 / ({name})": partial(_inverse, number) for name, number in found.items()}
    return {"-1": partial(_fixed, -1.0), "0": partial(_fixed, 0.0), **found, **inverse}


def _inverse(number: Number, setting: Setting) -> float:
    value = number(setting)
    return 1 / value if value else 1.0


def constants(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of a factor too many."""
    for name, number in _numbers().items():
        when = partial(_matters, number)
        if spec.reference is not None:
            yield mistake(
                f"loss times {name}",
                f"the loss is multiplied by {name}, in value and gradient",
                "factor",
                when,
                parts=partial(_one_part, number),
            )
            yield mistake(
                f"gradient of the loss times {name}",
                f"the gradient of the loss is multiplied by {name}, and its value is not",
                "factor",
                when,
                upstream=partial(_scaled_upstream, number, "loss"),
            )
        for token_value in [value for value in spec.outputs if value != "loss"]:
            yield mistake(
                f"gradient of {token_value} times {name}",
                f"the gradient of {token_value} is multiplied by {name}, and its value is not",
                "factor",
                when,
                upstream=partial(_scaled_upstream, number, token_value),
            )
        yield mistake(
            f"outputs times {name}",
            f"{{outputs}}: multiplied by {name}",
            "factor",
            when,
            outputs=partial(_scaled_outputs, number),
        )


def _matters(number: Number, setting: Setting) -> bool:
    return number(setting) != 1.0


def _one_part(number: Number, setting: Setting) -> list[Part]:
    return [(number(setting), {})]


def _scaled_upstream(number: Number, of: str, setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return gradient * number(setting) if name == of else gradient


def _scaled_outputs(number: Number, setting: Setting, outputs: Outputs) -> Outputs:
    factor = number(setting)
    return {output: torch.where(x.isfinite(), x * factor, x) for output, x in outputs.items()}
