# SPDX-License-Identifier: Apache-2.0
"""What rounding does to a number of which each rank computes a part.

Runs of the ensemble compute a loss or metric at once. Where that is returned, or computed, in a
coarse dtype, each of several ranks rounds its own part. If parts of either sign cancel, that is far
more than to round the sum.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.cases.placement import PlacedProblem
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.contract import Placement
from lossgate.numerics.float_formats import FLOAT32, FloatFormat, coarsest
from lossgate.numerics.noise import Noise
from lossgate.numerics.rounded_arithmetic import Stages
from lossgate.problems.partition import Partition
from lossgate.specs.outputs import LOSS, Output, metric_output

_SPLITTING: tuple[Axis, ...] = ("dp", "cp")

Share = tuple[Tensor, Tensor]
"""Numbers of the sequences of which a rank has tokens, and of these tokens."""

_EQUAL = 1e-9
"""Relative error up to which parts add up to the whole, in float64."""


@dataclass(frozen=True)
class RankParts:
    """The parts of a number that ranks round."""

    parts: Tensor
    """``[ranks]``."""
    format: FloatFormat
    """To which each is rounded."""
    own_sum: bool
    """The kernel adds them up itself, and rounds each partial sum."""
    seed: int

    def noise(self, members: int) -> Tensor:
        """Returns how far the sum of rounded parts is off in some runs, ``[members]``."""
        noise, parts = Noise(self.seed), self.parts.expand(members, -1)
        off = noise.round(parts, self.format) - parts
        if self.own_sum:
            sums = parts.cumsum(1)[:, 1:]
            off = torch.cat([off, noise.round(sums, self.format) - sums], 1)
        return off.sum(1)


def rank_parts(
    candidate: Candidate,
    placed: PlacedProblem,
    stages: Stages,
    returned: Collection[Output],
    reference: Mapping[Output, Tensor],
) -> dict[Output, RankParts]:
    """Returns the parts of numbers that ranks round.

    A loss of whole sequences, such as one of pairs, does not add up over the tokens of cp ranks.
    Each of these computes the same, so its parts are those of the dp ranks.

    Left out are numbers that are all in float32, those that no two ranks share, and those whose
    parts do not add up to the whole. These are extrema, and numbers to which tokens or sequences
    contribute whose masks are all false.

    Args:
        candidate: says how parts make the whole.
        placed: the problem on its layout.
        stages: the formats to which the kernel rounds.
        returned: the outputs that it returns.
        reference: those of the reference.
    """
    placements = {output: _over_several(candidate, placed, output) for output in reference if not output.dims}
    formats = {output: _format_of(output, over, stages) for output, over in placements.items() if over}
    coarse = {output: format_ for output, format_ in formats.items() if format_ != FLOAT32}
    found: dict[Output, RankParts] = {}
    for shares in _splits(placed.partition):
        missing = [output for output in coarse if output not in found]
        parts = _parts(placed, returned, shares) if missing else {}
        for output in missing:
            if _add_up(parts[output], reference[output]):
                seed = crc32(f"{placed.problem.to_json()} {output} parts".encode())
                own_sum = "replicate" in placements[output] and stages.loss != FLOAT32
                found[output] = RankParts(parts[output], coarse[output], own_sum, seed)
    return found


def _splits(partition: Partition) -> list[list[Share]]:
    """Returns how the ranks split the batch: the shares of all ranks, and those of the dp ranks."""
    (dp, cp), held = (partition.layout.sizes[axis] for axis in _SPLITTING), partition.real_token_shards
    sequences = [torch.tensor(partition.sequences(rank), dtype=torch.long) for rank in range(dp)]
    ranks = [(sequences[number // cp], tokens) for number, tokens in enumerate(held)]
    whole = [(sequences[rank], torch.cat(held[rank * cp : (rank + 1) * cp])) for rank in range(dp)]
    return [ranks] if cp == 1 else [ranks, whole]


def _add_up(parts: Tensor, whole: Tensor) -> bool:
    """Returns whether parts add up to the whole. An extremum without tokens is infinite."""
    return bool(parts.isfinite().all() and (parts.sum() - whole).abs() <= _EQUAL * parts.abs().sum())


def _over_several(candidate: Candidate, placed: PlacedProblem, output: Output) -> tuple[Placement, ...]:
    """Returns how an output is placed over the axes that split its tokens among several ranks."""
    sizes, placements = placed.partition.layout.sizes, candidate.placements(output)
    return tuple(placements.get(axis, "replicate") for axis in _SPLITTING if sizes[axis] > 1)


def _format_of(output: Output, over: tuple[Placement, ...], stages: Stages) -> FloatFormat:
    """Returns the format of a rank's part: that of the loss's arithmetic if the kernel adds it up,
    and otherwise that in which they are returned, if it is coarser.
    """
    own_sum = all(placement == "replicate" for placement in over)
    return stages.loss if own_sum else coarsest(stages.loss, stages.returned_in(output.name))


def _parts(placed: PlacedProblem, returned: Collection[Output], shares: Sequence[Share]) -> dict[Output, Tensor]:
    """Returns the parts of loss and metrics that come from each share of the batch, ``[shares]``.

    The masks of all other tokens and sequences are false. What counts the whole batch stays that of
    the whole batch.
    """
    parts: list[dict[Output, Tensor]] = []
    for share in shares:
        loss, metrics = placed.bound.loss_with(masks_of_share(placed, share), returned)
        parts.append({LOSS: loss, **{metric_output(name): metric for name, metric in metrics.items()}})
    return {output: torch.stack([part[output] for part in parts]).double() for output in parts[0]}


def masks_of_share(placed: PlacedProblem, share: Share) -> dict[str, Tensor]:
    """Returns the boolean fields of tokens and sequences, false outside a share."""
    batch, own = placed.bound.batch, dict(zip(("sequence", "token"), share, strict=True))
    masks: dict[str, Tensor] = {}
    for name, dims in {**batch.field_dims, "mask": ("token",)}.items():
        field = batch.fields[name]
        if field.dtype is torch.bool and dims and dims[0] in own:
            masks[name] = torch.zeros_like(field).index_copy(0, own[dims[0]], field[own[dims[0]]])
    return masks
