# SPDX-License-Identifier: Apache-2.0
"""The verdict on one output of one problem: a result against the reference and the noise of correct
runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lossgate.judge.power import blind_spots, plant
from lossgate.judge.statistics import SCALE, WORST, Blocks, NoiseModel, limits, statistics
from lossgate.specs.outputs import Output


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output of one problem, compared with the reference."""

    output: Output
    values: Mapping[str, float] = field(default_factory=dict)
    """The statistics; SCALE has a sign."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """The limit of each statistic."""
    where: Mapping[str, str] = field(default_factory=dict)
    """The number of the worst entry or block, by statistic."""
    sd: float = 0.0
    """Standard deviation of SCALE over the ensemble."""
    unit: float = 0.0
    """Unit roundoff of the output's dtype."""
    faults: tuple[str, ...] = ()
    """What is wrong whatever the noise, in words."""
    vacuous: bool = False
    """The reference is zero, or so far below its noise that no error in its scale could show."""
    rejected: Mapping[str, bool] = field(default_factory=dict)
    """For each planted error, whether the comparison rejected it."""
    blind: tuple[str, ...] = ()
    """The planted errors that it accepted although its own limits say that it rejects them."""

    @property
    def shares(self) -> dict[str, float]:
        """Each statistic as a share of its limit; over 1 is a disagreement."""
        return {name: _share(abs(value), self.limits[name]) for name, value in self.values.items()}

    @property
    def margin(self) -> float:
        """The largest share."""
        return max(self.shares.values(), default=0.0)

    @property
    def agrees(self) -> bool:
        return not self.faults and self.margin <= 1

    @property
    def mde(self) -> float:
        """The least e for which this result, scaled by 1 + e or 1 - e, is surely rejected."""
        if self.vacuous or not self.values:
            return float("inf")
        return self.limits[SCALE] + abs(self.values[SCALE])


def _share(value: float, limit: float) -> float:
    if limit:
        return value / limit
    return float("inf") if value else 0.0


def compare(
    output: Output,
    result: Tensor,
    reference: Tensor,
    members: Tensor,
    *,
    unit: float,
    allowed: float,
    blocks: Sequence[Blocks] = (),
    faults: tuple[str, ...] = (),
) -> Comparison:
    """Compares a result with the reference. All tensors are float64.

    Args:
        output: what the result is.
        result, reference: of the same shape.
        members: ``[M, *shape]``, correct but rounded runs.
        unit: unit roundoff of the output's dtype.
        allowed: what rounding may do to the whole result alike, relative to it.
        blocks: the ways to cut the output into blocks.
        faults: what is already known to be wrong, in words.
    """
    if not bool(reference.isfinite().all()):
        result, reference, members, faults = _without_infinities(result, reference, members, faults)
    if not bool(result.isfinite().all()):
        count = int((~result.isfinite()).sum())
        fault = f"{count} of {result.numel()} entries are not finite, where the reference is"
        return Comparison(output=output, faults=(*faults, fault))
    deviations = members - reference
    low, high = deviations.amin(0), deviations.amax(0)
    exactly_zero = (reference == 0) & (low == 0) & (high == 0)
    if leaks := int((result[exactly_zero] != 0).sum()):
        largest = float(result[exactly_zero].abs().max())
        fault = f"{leaks} of {result.numel()} entries should be exactly zero and are up to {largest:.3g}"
        faults = (*faults, fault)
    if bool(exactly_zero.all()):
        return Comparison(output=output, faults=faults, vacuous=True)
    size = float(torch.stack([reference.abs().max(), -low.min(), high.max()]).max())
    model = NoiseModel(reference / size, deviations.div_(size), unit)
    return _judge(output, result / size, model, allowed, blocks, faults, reference)


def _judge(
    output: Output,
    result: Tensor,
    model: NoiseModel,
    allowed: float,
    blocks: Sequence[Blocks],
    faults: tuple[str, ...],
    unscaled: Tensor,
) -> Comparison:
    """Measures a result, and with it copies in which errors are planted.

    It is scaled as the model's reference is.
    """
    limit, sd = limits(model, blocks, allowed)
    planted = plant(result, model.reference, blocks) if model.says_something else {}
    stack = torch.stack([result, *planted.values()]) - model.reference
    found = statistics(stack, model.reference, model.precision(), blocks, allowed)
    values = {name: float(statistic.values[0]) for name, statistic in found.items()}
    rejected = {
        name: any(abs(float(found[s].values[i])) > limit[s] for s in found) for i, name in enumerate(planted, 1)
    }
    scales = {name: float(found[SCALE].values[i]) for i, name in enumerate(planted, 1)}
    return Comparison(
        output=output,
        values=values,
        limits=limit,
        where={name: _number(int(s.where[0]), name, unscaled) for name, s in found.items() if s.where is not None},
        sd=sd,
        unit=model.unit,
        faults=faults,
        vacuous=not planted,
        rejected=rejected,
        blind=blind_spots(scales, rejected, values[SCALE], limit[SCALE]),
    )


def _without_infinities(
    result: Tensor, reference: Tensor, members: Tensor, faults: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Zeroes entries whose reference is infinite; adds a fault where the result differs there.

    The log-probability of a label that a filter left out is -inf.
    """
    finite = reference.isfinite()
    if wrong := int((result[~finite] != reference[~finite]).sum()):
        faults = (*faults, f"{wrong} of {result.numel()} entries should be infinite, and are not")
    zeroed = [torch.where(finite, x, 0.0) for x in (result, reference, members)]
    return zeroed[0], zeroed[1], zeroed[2], faults


def _number(index: int, statistic: str, reference: Tensor) -> str:
    """Returns an index as people write it: row and column for an entry of a matrix."""
    if statistic == WORST and reference.dim() == 2:
        return f"{index // reference.shape[1]}, {index % reference.shape[1]}"
    return str(index)
