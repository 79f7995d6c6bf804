# SPDX-License-Identifier: Apache-2.0
"""The noise of a number of which each rank rounds its own part.

Runs of the ensemble compute a loss or metric at once. If it is returned, or computed, in a coarse
dtype, each of several ranks rounds its own part. If parts of either sign cancel, these errors are
far larger than that of rounding the sum.
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
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.specs.outputs import LOSS, Output, metric_output

_SPLITTING: tuple[Axis, ...] = ("dp", "cp")

Share = tuple[Tensor, Tensor]
"""A rank's share of the batch: the numbers of its sequences, and the numbers of its tokens."""

_EQUAL = 1e-9
"""The largest relative error, in float64, of parts that add up to the whole."""


@dataclass(frozen=True)
class RankParts:
    """The parts of a number that ranks round."""

    parts: Tensor
    """The part of each rank, ``[ranks]``."""
    format: FloatFormat
    """The format to which each part is rounded."""
    own_sum: bool
    """Whether the kernel adds the parts up itself, and rounds each partial sum."""
    seed: int

    def noise(self, members: int) -> Tensor:
        """Returns the error of the sum of rounded parts, in each of ``members`` runs."""
        noise, parts = Noise(self.seed), self.parts.expand(members, -1)
        errors = noise.round(parts, self.format) - parts
        if self.own_sum:
            sums = parts.cumsum(1)[:, 1:]
            errors = torch.cat([errors, noise.round(sums, self.format) - sums], 1)
        return errors.sum(1)


def rank_parts(
    candidate: Candidate,
    placed: PlacedProblem,
    stages: Stages,
    returned: Collection[Output],
    reference: Mapping[Output, Tensor],
) -> dict[Output, RankParts]:
    """Returns the parts of numbers that ranks round.

    A loss of whole sequences, such as a loss of pairs, does not add up over the tokens of cp ranks.
    All cp ranks compute the same, so the parts are those of the dp ranks.

    Numbers are left out if they are in float32 throughout, if a single rank computes them, or if
    their parts do not add up to the whole. The latter holds for extrema, and for numbers to which
    masked tokens or sequences contribute.

    Args:
        candidate: the candidate, whose contract says how parts make the whole.
        placed: the problem on its layout.
        stages: the formats to which the kernel rounds.
        returned: the outputs that the kernel returns.
        reference: the outputs of the reference.
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
    """Returns the ways in which the batch splits: the shares of all ranks; and if cp splits it, the
    shares of the dp ranks.
    """
    (dp, cp), tokens_of = (partition.layout.sizes[axis] for axis in _SPLITTING), partition.real_token_shards
    sequences = [torch.tensor(partition.sequences(dp_rank), dtype=torch.long) for dp_rank in range(dp)]
    of_ranks = [(sequences[number // cp], tokens) for number, tokens in enumerate(tokens_of)]
    if cp == 1:
        return [of_ranks]
    of_dp_ranks = [(sequences[rank], torch.cat(tokens_of[rank * cp : (rank + 1) * cp])) for rank in range(dp)]
    return [of_ranks, of_dp_ranks]


def _add_up(parts: Tensor, whole: Tensor) -> bool:
    """Returns whether parts add up to the whole."""
    if not parts.isfinite().all():  # an extremum without tokens is infinite
        return False
    return bool((parts.sum() - whole).abs() <= _EQUAL * parts.abs().sum())


def _over_several(candidate: Candidate, placed: PlacedProblem, output: Output) -> tuple[Placement, ...]:
    """Returns the placement of an output over each axis that splits its tokens among ranks."""
    sizes, placements = placed.partition.layout.sizes, candidate.placements(output)
    return tuple(placements.get(axis, "replicate") for axis in _SPLITTING if sizes[axis] > 1)


def _format_of(output: Output, over: tuple[Placement, ...], stages: Stages) -> FloatFormat:
    """Returns the format of a rank's part.

    If the kernel adds the parts up, it is that of the loss's arithmetic. Otherwise each part is
    also returned, so it is the coarser of that format and the format of the returned output.
    """
    own_sum = all(placement == "replicate" for placement in over)
    return stages.loss if own_sum else coarsest(stages.loss, stages.returned_in(output.name))


def _parts(placed: PlacedProblem, returned: Collection[Output], shares: Sequence[Share]) -> dict[Output, Tensor]:
    """Returns the parts of loss and metrics that come from each share of the batch, ``[shares]``.

    For a part, the masks of all other tokens and sequences are false. Counts stay those of the
    whole batch.
    """
    parts: list[dict[Output, Tensor]] = []
    for share in shares:
        loss, metrics = placed.bound.loss_with(masks_of_share(placed.bound.batch, share), returned)
        parts.append({LOSS: loss, **{metric_output(name): metric for name, metric in metrics.items()}})
    return {output: torch.stack([part[output] for part in parts]).double() for output in parts[0]}


def masks_of_share(batch: GlobalBatch, share: Share) -> dict[str, Tensor]:
    """Returns the boolean fields of tokens and sequences, set to false outside a share."""
    own = dict(zip(("sequence", "token"), share, strict=True))
    masks: dict[str, Tensor] = {}
    for name, dims in {**batch.field_dims, "mask": ("token",)}.items():
        field = batch.fields[name]
        if field.dtype is torch.bool and dims and dims[0] in own:
            inside = own[dims[0]]
            masks[name] = torch.zeros_like(field).index_copy(0, inside, field[inside])
    return masks
