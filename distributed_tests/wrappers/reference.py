# SPDX-License-Identifier: Apache-2.0
"""What a step must give: the dense step of one rank over the whole batch, and its noise."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from distributed_tests.wrappers.losses import DENSE_OF, WAYS
from distributed_tests.wrappers.model import RANKS, Batch, count, make_batch, make_model, trained
from fused_losses import backbone_and_lm_head
from lossgate.judge.comparison import Comparison
from lossgate.judge.tolerance import Tolerance
from lossgate.numerics.float_formats import float_format_of
from lossgate.numerics.noise import Noise
from lossgate.numerics.round_every_operation import RoundEveryOperation
from lossgate.specs.outputs import LOSS, gradient_output, metric_output

MEMBERS = 12


@dataclass(frozen=True)
class Reference:
    """Tolerances of the judge, by the name of a number or of a parameter's gradient."""

    numbers: dict[str, Tolerance]
    gradients: dict[str, Tolerance]

    def compare(self, numbers: dict[str, Tensor], gradients: dict[str, Tensor]) -> list[Comparison]:
        """Compares results with this reference. Frozen parameters must not have moved."""
        found = [self.numbers[name].compare(number) for name, number in numbers.items()]
        return found + [self.gradients[name].compare(gradient) for name, gradient in gradients.items()]


@cache
def reference(head: str, way: str, dtype: str, microbatches: int, empty: bool) -> Reference:
    """Returns the reference of a training step.

    Args:
        head: kind of lm-head.
        way: the way to the loss; the reference forms the logits.
        dtype: of the parameters and of the noise.
        microbatches: of each rank.
        empty: whether the last rank has no token that reaches the head.
    """
    rounded = float_format_of(getattr(torch, dtype))
    batches = [make_batch(r, m, empty=empty) for m in range(microbatches) for r in range(RANKS)]
    exact = _step(head, DENSE_OF.get(way, "dense"), batches)
    members = []
    for seed in range(MEMBERS):
        with RoundEveryOperation(Noise(seed), rounded):
            members.append(_step(head, DENSE_OF.get(way, "dense"), batches))
    tolerances = ({}, {})
    for kind in (0, 1):
        for name, known in exact[kind].items():
            output = gradient_output(name, ()) if kind else LOSS if name == "loss" else metric_output(name)
            # Wrappers hold the gradients in the parameters' dtype; losses and metrics are float32.
            noise = torch.stack([member[kind][name] - known for member in members])
            tolerances[kind][name] = Tolerance(
                output, known, noise, unit=rounded.unit, rounding=rounded.error, alike=rounded.error
            )
    return Reference(*tolerances)


def _step(head: str, way: str, batches: list[Batch]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the numbers and the gradients, added up over the batches of all ranks."""
    model = make_model(head, torch.float64)
    parameters = trained(model)
    numbers = dict[str, Tensor]()
    gradients = {name: torch.zeros_like(p) for name, p in parameters.items()}
    needed = {name: p for name, p in parameters.items() if p.requires_grad}
    backbone, lm_head = backbone_and_lm_head(model, check=False)  # a run would draw noise
    for batch in batches:
        hidden = backbone(batch.ids)[batch.keep]
        loss, metrics = WAYS[way](lm_head, hidden, batch, count(batches))
        for name, number in {"loss": loss, **metrics}.items():
            numbers[name] = numbers.get(name, 0) + number.detach().double()
        found = torch.autograd.grad(loss, list(needed.values()), materialize_grads=True)
        for name, gradient in zip(needed, found, strict=True):
            gradients[name] = gradients[name] + gradient
    return numbers, gradients
