# SPDX-License-Identifier: Apache-2.0
"""The bank of known bugs: each wraps a correct kernel and makes it wrong.

A bug changes what a kernel is given, what it returns, or the gradients that flow back through
either. The few that only the inside of a kernel can have are switches of
``kernel_bank.cross_entropy``.
Those of kernels that shift and split themselves are in ``kernel_bank.whole_sequences``.
(Errors in whole results, which every comparison plants in its own result as a check of itself, are
in ``judge.tolerance``.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernel_bank.cross_entropy import Style, Switch, make
from lossgate.declaration.candidate import Candidate, Kernel, Outputs
from lossgate.specs.option import Option
from lossgate.specs.spec import Spec

Wrap = Callable[[Kernel], Kernel]


@dataclass(frozen=True)
class Bug:
    """One known bug."""

    name: str
    sentence: str
    """What a kernel with this bug does, for people."""
    wrap: Wrap

    def put_into(self, candidate: Candidate) -> Candidate:
        """Returns a candidate with this bug, declared as the correct one."""
        return replace(candidate, kernel=self.wrap(candidate.kernel), name=f"{candidate.name}; {self.name}")


# Building blocks


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return (gradient.float() * ctx.factor).to(gradient.dtype), None


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Returns the same values, through which gradients come back multiplied by a factor."""
    return _ScaleGradient.apply(tensor, factor)  # type: ignore[return-value]


def on_inputs(change: Callable[..., Any]) -> Wrap:
    """Returns a wrapper that changes the inputs: ``change(inputs, mesh) -> inputs``."""
    return lambda kernel: lambda inputs, options, mesh: kernel(change(inputs, mesh), options, mesh)


def on_options(change: Callable[[Any], Any]) -> Wrap:
    """Returns a wrapper that changes the options."""
    return lambda kernel: lambda inputs, options, mesh: kernel(inputs, change(options), mesh)


def on_loss(change: Callable[..., Tensor]) -> Wrap:
    """Returns a wrapper that changes the loss: ``change(loss, mesh) -> loss``."""

    def wrap(kernel: Kernel) -> Kernel:
        def wrong(inputs: Any, options: Any, mesh: Any) -> Outputs:
            returned = kernel(inputs, options, mesh)
            outputs = returned if isinstance(returned, Outputs) else Outputs(loss=returned)
            return replace(outputs, loss=change(outputs.loss, mesh))

        return wrong

    return wrap


def lose_label(labels: Tensor, row: int, instead: int) -> Tensor:
    """Returns labels in which one row of the vocabulary is taken for another."""
    return torch.where(labels == row, instead, labels)


def temper_logprobs(logprobs: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities divided by the temperature, which belongs to the logits."""
    return logprobs / temperature


def _without_middle(mask: Tensor) -> Tensor:
    trained = mask.nonzero().squeeze(1)
    return mask if not len(trained) else mask.index_fill(0, trained[len(trained) // 2], False)


# The bank


def _all(*bugs: Bug) -> Mapping[str, Bug]:
    return {bug.name: bug for bug in bugs}


BUGS: Mapping[str, Bug] = _all(
    Bug(
        "dX x1.01",
        "the gradient of the hidden states is 1% too large",
        on_inputs(lambda inputs, mesh: replace(inputs, hidden=scale_gradient(inputs.hidden, 1.01))),
    ),
    Bug(
        "dW x0.99",
        "the gradient of the weight is 1% too small",
        on_inputs(lambda inputs, mesh: replace(inputs, weight=scale_gradient(inputs.weight, 0.99))),
    ),
    Bug(
        "loss x1.01",
        "the loss is 1% too large, and its gradient is right",
        on_loss(lambda loss, mesh: loss + 0.01 * loss.detach()),
    ),
    Bug(
        "denominator n+1",
        "the loss is divided by one token too many",
        on_inputs(lambda inputs, mesh: replace(inputs, valid_tokens=inputs.valid_tokens.clamp(min=1) + 1)),
    ),
    Bug(
        "one token dropped",
        "one trained token, the middle one of each rank, does not count",
        on_inputs(lambda inputs, mesh: replace(inputs, mask=_without_middle(inputs.mask))),
    ),
    Bug(
        "mask shifted by one",
        "the neighbours of the trained tokens are trained in their place",
        on_inputs(lambda inputs, mesh: replace(inputs, mask=inputs.mask.roll(1))),
    ),
    Bug(
        "cp gradient x cp",
        "gradients are cp times too large: every cp rank's part comes back from all of them",
        on_loss(lambda loss, mesh: scale_gradient(loss, mesh["cp"].size())),
    ),
    Bug(
        "label at a shard boundary lost",
        "no rank owns the first row of its shard of the vocabulary (``>`` in place of ``>=``)",
        on_inputs(
            lambda inputs, mesh: (
                replace(inputs, labels=lose_label(inputs.labels, inputs.vocab_start, inputs.vocab_size))
                if mesh["tp"].size() > 1
                else inputs
            )
        ),
    ),
    Bug(
        "local denominator",
        "the loss is divided by the rank's own trained tokens, not by the whole batch's",
        on_inputs(lambda inputs, mesh: replace(inputs, valid_tokens=inputs.mask.sum())),
    ),
)
"""Bugs that can be put into any candidate that has the inputs in question."""

SWITCHES: Mapping[Switch, tuple[str, str]] = {
    "drop vocab tile": ("one vocab tile dropped", "the last 16 rows of each rank's vocabulary take no part"),
    "skip temperature in backward": (
        "temperature missing in backward",
        "the gradient lacks its factor 1 / temperature",
    ),
    "skip tp all-reduce": (
        "tp all-reduce missing",
        "the gradient of the hidden states is that of the rank's own vocabulary",
    ),
    "accumulate dW in bfloat16": (
        "bf16 accumulation of dW",
        "the gradient of the weight is summed token by token in bfloat16",
    ),
}
"""Bugs inside ``kernel_bank.cross_entropy``: their name and sentence."""


CROSS_ENTROPY_BUGS: Mapping[str, str] = {
    **{
        name: BUGS[name].sentence
        for name in (
            "dX x1.01",
            "dW x0.99",
            "loss x1.01",
            "denominator n+1",
            "one token dropped",
            "mask shifted by one",
            "cp gradient x cp",
        )
    },
    **dict(SWITCHES.values()),
}
"""The bugs that ``cross_entropy_with`` knows, and their sentences."""


def cross_entropy_with(style: Style, bug: str) -> Candidate:
    """Returns the cross-entropy kernel of a style with one of ``CROSS_ENTROPY_BUGS``."""
    for switch, (name, _) in SWITCHES.items():
        if name == bug:
            return replace(make(style, switch), name=f"{style.name}; {bug}")
    return BUGS[bug].put_into(make(style))


# Bugs in options and fields


def ignores(option: Option, spec: Spec) -> Bug:
    """Returns the bug of a kernel that computes with the option's default, whatever it is given."""

    def at_default(options: Any) -> Any:
        values = {o.name: getattr(options, o.name) for o in spec.options}
        changed = spec.with_choice(values, option.name, option.default)
        return options if changed is None else spec.options_type(**changed)

    return Bug(f"ignores {option.name}", f"computes every {option.name} as its default", on_options(at_default))
