# SPDX-License-Identifier: Apache-2.0
"""Properties of the upstream gradient. It is random in agreement, which checks that it is used."""

from dataclasses import dataclass

import torch

from lossgate.cases.case import Case
from lossgate.cases.rank_call import RankCall, RankOutputs
from lossgate.judge.comparison import Comparison
from lossgate.properties.registry import Checked, called, property
from lossgate.properties.would_show import gradients

_FACTORS = (-2.0, 4096.0)
"""They are exact in every dtype. Problems in float16 leave room for the first. The scale of mixed
precision training is as large as the second."""
_UNDERFLOW = 1e-30
"""Smaller differences may come from numbers below the least normal number of float32, which round
differently when they are doubled."""


@dataclass(frozen=True)
class _MultipliedBy:
    """Calls a kernel with upstream gradients that are multiplied by a factor."""

    factor: float
    divided_by: float = 1.0

    def __call__(self, call: RankCall) -> RankOutputs:
        outputs = call.forward()
        call.backward(outputs, self.factor)
        return call.collect(outputs, self.divided_by)


@property(
    "upstream-scaled",
    runs=2,
    mistakes=gradients("does not hang on the upstream gradient", 1 / _FACTORS[0]),
    remedy="multiply what backward computes by the upstream gradient, whatever its sign and size",
    may_explain=("gradients-add-up", "second-backward", "upstream-one", "upstream-zero"),
)
def upstream_scaled(case: Case) -> Checked:
    """Gradients are linear in the upstream gradient: -2 times it gives -2 times them.

    So does 4096 times it, unless something is rounded to float16.
    """
    found = list[Comparison]()
    for factor in _FACTORS[:1] if _rounds_to_float16(case) else _FACTORS:
        result = case.on_ranks(_MultipliedBy(factor, divided_by=factor))
        found += called(f"with {factor:g} times the upstream gradient", case.judged(result))
    return Checked(comparisons=tuple(found))


@property(
    "upstream-one",
    mistakes=gradients("is lost for an upstream gradient of 1"),
    applies=lambda candidate: candidate.differentiable == ("loss",),
    fits=lambda case: case.world.repeatable and not _rounds_to_float16(case),
    runs=2,
    remedy="treat an upstream gradient of 1 as any other",
)
def upstream_one(case: Case) -> Checked:
    """An upstream gradient of 1 gives exactly half of what 2 gives. Trainers give 1."""
    one, two = (case.whole(case.on_ranks(_Of(size))) for size in (1.0, 2.0))
    faults: list[str] = []
    for output in case.oracle.gradients:
        for size, found in (("1", one), ("2", two)):
            faults += [
                f"{output}: {fault}, with an upstream gradient of {size}" for fault in found.faults.get(output, ())
            ]
        if output in one.outputs and output in two.outputs:
            of_one, of_two = one.outputs[output], two.outputs[output]
            is_half = (2 * of_one - of_two).abs() <= _UNDERFLOW  # false for NaN
            if wrong := int((~is_half).sum()):
                which = f"{wrong} of {of_one.numel()} entries with an upstream gradient of 1"
                faults.append(f"{output}: {which} are not half of those with 2")
    return Checked(faults=tuple(faults))


def _rounds_to_float16(case: Case) -> bool:
    """Returns whether a kernel rounds anything to float16, whose small numbers do not double
    exactly.
    """
    return "float16" in (case.problem.dtype, *vars(case.candidate.precision[case.problem.dtype]).values())


@dataclass(frozen=True)
class _Of:
    """Calls a kernel with an upstream gradient of this size."""

    size: float

    def __call__(self, call: RankCall) -> RankOutputs:
        outputs = call.forward()
        (loss,) = call.roots(outputs).values()
        loss.backward(torch.full_like(loss, self.size))
        return call.collect(outputs)


@property(
    "upstream-zero",
    mistakes=gradients("does not hang on the upstream gradient"),
    remedy="multiply by the upstream gradient last, and divide by nothing that comes from it",
)
def upstream_zero(case: Case) -> Checked:
    """An upstream gradient of 0 gives gradients that are exactly 0."""
    found = case.whole(case.on_ranks(_MultipliedBy(0.0)))
    faults = [
        f"{output}: {int((whole != 0).sum())} of {whole.numel()} entries are not 0"
        for output, whole in found.outputs.items()
        if output.kind == "gradient" and bool((whole != 0).any())
    ]
    return Checked(faults=tuple(faults))
