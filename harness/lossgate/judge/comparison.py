# SPDX-License-Identifier: Apache-2.0
"""The verdict on one problem: each output of the candidate against the reference and the ensemble."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from lossgate.cases.execute import Result
from lossgate.cases.reference import run_reference
from lossgate.declaration.candidate import Candidate
from lossgate.judge.blocks import groupings_of
from lossgate.judge.ensemble import run_ensemble
from lossgate.judge.power import blind_spots, plant
from lossgate.judge.statistics import SCALE, WORST, Grouping, NoiseModel, limits, statistics
from lossgate.numerics.float_formats import GRIDS, grid_of
from lossgate.problems.batch import Batch
from lossgate.specs.outputs import OUTPUT_DIMS, grad_name

_ELEMENTS, _FEWEST, _MOST = 1 << 18, 12, 32


def _members(batch: Batch) -> int:
    """As many as a bounded amount of work allows: small problems, whose few numbers tell less of their noise, get more."""
    largest = max(leaf.numel() for leaf in batch.leaves.values())
    logits = batch.partition.tokens * batch.partition.vocab
    return min(max(_ELEMENTS // max(largest, logits), _FEWEST), _MOST)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output of one problem."""

    output: str
    values: Mapping[str, float] = field(default_factory=dict)
    """Statistics, SCALE with its sign."""
    limits: Mapping[str, float] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """Where the worst entry or part is, by statistic."""
    sd: float = 0.0
    """Standard deviation of SCALE over the ensemble."""
    unit: float = 0.0
    """Unit roundoff of the output's dtype."""
    faults: tuple[str, ...] = ()
    """What is wrong whatever the noise, in words."""
    vacuous: bool = False
    """The reference is zero everywhere: nothing but zero could be asked for."""
    rejected: Mapping[str, bool] = field(default_factory=dict)
    """Planted errors, and whether the comparison saw them."""
    blind: tuple[str, ...] = ()
    """Those that it should have seen, by its own limits, and did not."""

    @property
    def excess(self) -> dict[str, float]:
        """Each statistic as a share of its limit; over 1 is a disagreement."""
        return {
            name: abs(value) / self.limits[name] if self.limits[name] else (float("inf") if value else 0.0)
            for name, value in self.values.items()
        }

    @property
    def margin(self) -> float:
        return max(self.excess.values(), default=0.0)

    @property
    def agrees(self) -> bool:
        return not self.faults and self.margin <= 1

    @property
    def mde(self) -> float:
        """The minimum detectable effect: this result, scaled by 1 + e or 1 - e, is rejected for every e above this."""
        return float("inf") if self.vacuous or not self.values else self.limits[SCALE] + abs(self.values[SCALE])


class Yardstick:
    """What results on one problem are measured by: the reference and the ensemble."""

    def __init__(self, candidate: Candidate, batch: Batch, wanted: Collection[str]) -> None:
        """For the outputs ``wanted`` and every gradient that the candidate owes."""
        self.batch, self._candidate = batch, candidate
        self.reference = run_reference(batch, wanted)
        self._ensemble = run_ensemble(
            candidate, batch, _members(batch), crc32(batch.problem.to_json().encode()), wanted
        )
        self._owed = tuple(grad_name(leaf) for leaf in batch.leaves)

    def judge(self, result: Result) -> list[Comparison]:
        """Every output that was returned, and every gradient that is owed."""
        return list(self._comparisons(result))

    def _comparisons(self, result: Result) -> Iterator[Comparison]:
        for output in dict.fromkeys([*result.outputs, *result.faults, *self._owed]):
            faults = result.faults.get(output, ())
            if output in result.outputs:
                yield self.compare(output, result.outputs[output], result.dtypes[output], faults)
            else:
                yield Comparison(output=output, faults=faults)

    def compare(self, output: str, k: Tensor, dtype: torch.dtype, faults: tuple[str, ...] = ()) -> Comparison:
        """``k``, which came in ``dtype``, as the result ``output``."""
        precision = self._candidate.precision[self.batch.problem.dtype]
        keep = self.batch.fields["mask"] if OUTPUT_DIMS.get(output) == ("token",) else None
        r, e = self.reference[output], self._ensemble[output]
        if keep is not None:
            k, r, e = k[keep], r[keep], e[:, keep]
        k = _overflowed(k, r, dtype)
        unit = grid_of(dtype).unit
        on_the_way = (precision.dlogits, precision.loss) if output in self._owed else ()
        allowed = max([unit, *(GRIDS[dtype].unit for dtype in on_the_way)])
        return compare(output, k, r, e, unit, allowed, groupings_of(output, self.batch, self._candidate, keep), faults)


def compare(
    output: str,
    k: Tensor,
    r: Tensor,
    e: Tensor,
    unit: float,
    allowed: float,
    groupings: Sequence[Grouping] = (),
    faults: tuple[str, ...] = (),
) -> Comparison:
    """Result ``k`` against reference ``r`` and members ``e [M, *shape]``, all float64.

    unit: roundoff of the output's dtype; allowed: what rounding may do to all of it alike.
    """
    if not bool(r.isfinite().all()):
        k, r, e, faults = _without_infinities(k, r, e, faults)
    if not bool(k.isfinite().all()):
        count = int((~k.isfinite()).sum())
        return Comparison(
            output=output, faults=(*faults, f"{count} of {k.numel()} entries are not finite, where the reference is")
        )
    deviations = e - r
    low, high = deviations.amin(0), deviations.amax(0)
    dead = (r == 0) & (low == 0) & (high == 0)
    if leaks := int((k[dead] != 0).sum()):
        faults = (
            *faults,
            f"{leaks} of {k.numel()} entries should be exactly zero and are up to {float(k[dead].abs().max()):.3g}",
        )
    if bool(dead.all()):
        return Comparison(output=output, faults=faults, vacuous=True)
    size = float(torch.stack([r.abs().max(), -low.min(), high.max()]).max())
    model = NoiseModel(r / size, deviations.div_(size), unit)
    limit, sd = limits(model, groupings, allowed)
    k = k / size
    planted = plant(k, model.reference, groupings) if bool((r != 0).any()) else {}
    stack = torch.stack([k, *planted.values()]) - model.reference
    found = statistics(stack, model.reference, model.precision(), groupings, allowed)
    values = {name: float(statistic.values[0]) for name, statistic in found.items()}
    rejected = {
        name: any(abs(float(found[s].values[i])) > limit[s] for s in found) for i, name in enumerate(planted, 1)
    }
    scales = {name: float(found[SCALE].values[i]) for i, name in enumerate(planted, 1)}
    return Comparison(
        output=output,
        values=values,
        limits=limit,
        places={name: _place(int(s.where[0]), name, r) for name, s in found.items() if s.where is not None},
        sd=sd,
        unit=unit,
        faults=faults,
        vacuous=not planted,
        rejected=rejected,
        blind=blind_spots(scales, rejected, values[SCALE], limit[SCALE]),
    )


def _overflowed(k: Tensor, r: Tensor, dtype: torch.dtype) -> Tensor:
    """``k``, but the reference where that is about as large as the dtype can hold, and ``k`` infinite: perplexities of hopeless sequences."""
    huge = r.abs() > torch.finfo(dtype).max * 2.0**-20
    return torch.where(huge & k.isinf() & (k.sign() == r.sign()), r, k)


def _without_infinities(
    k: Tensor, r: Tensor, e: Tensor, faults: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Where the reference is infinite, as the log-probability of a label that a filter left out, the result must be the same; there
    is nothing else to compare."""
    finite = r.isfinite()
    if wrong := int((k[~finite] != r[~finite]).sum()):
        faults = (*faults, f"{wrong} of {k.numel()} entries should be infinite, and are not")
    return torch.where(finite, k, 0.0), torch.where(finite, r, 0.0), torch.where(finite, e, 0.0), faults


def _place(index: int, statistic: str, reference: Tensor) -> str:
    """An index as people write it: row and column for an entry of a matrix."""
    if statistic == WORST and reference.dim() == 2:
        return f"{index // reference.shape[1]}, {index % reference.shape[1]}"
    return str(index)
