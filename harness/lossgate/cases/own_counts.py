# SPDX-License-Identifier: Apache-2.0
"""What callers do with kernels that divide by their own counts: they weigh the results of each call
by its share of the count of the whole batch.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.layout import Axis
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.rank_parts import masks_of_share
from lossgate.declaration.candidate import Candidate
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.outputs import LOSS, Output
from lossgate.specs.spec import Spec

LEFT_OUT = 0.0
"""The factor of a call that the caller leaves out, because nothing is trained in it."""

Weights = Mapping[Output, Sequence[float]]
"""The factor of an output on each rank, by output. Outputs that are not among them have none."""

_OfOwn = tuple[Mapping[str, Tensor], Mapping[Output, Tensor]]
"""Own counts, and the numbers of the whole batch with them."""


def weights_of_calls(
    candidate: Candidate, bound: BoundProblem, batch: GlobalBatch, returned: Collection[Output]
) -> Weights:
    """Returns the factors by which a caller multiplies what each rank returns.

    If a loss is divided by n plus an epsilon, so are the shares: they are found by asking the
    reference for the loss with either count.

    Args:
        candidate: the kernel. Over axes whose ranks all return the same, it sums its counts.
        bound: the problem.
        batch: the batch as the ranks hold it, with padding.
        returned: the outputs that the kernel returns.

    Raises:
        UsageError: if an output depends on several counts, so that no factor makes up for them.
    """
    plain, found = bound.numbers_with({}, returned), dict[Output, list[float]]()
    of_axes: dict[tuple[Axis, ...], list[_OfOwn]] = {}
    for output in returned:
        number = LOSS if output.kind == "gradient" else output
        read = [name for name in bound.spec.names_of_counts if number in bound.numbers_of(name, returned)]
        if len(read) > 1:
            raise UsageError(
                f"Conventions(counts='own'): {output} of spec {bound.spec.name!r} depends on {' and on '.join(read)}, "
                "so no weights of the caller make up for own counts; restrict supports to options of which each number "
                "has one count, or divide by the counts that are given"
            )
        if not read and number != LOSS:
            continue
        axes: list[Axis] = [axis for axis, how in candidate.placements(number).items() if how == "replicate"]
        whole = tuple(axes)
        if whole not in of_axes:
            of_axes[whole] = _with_own(whole, bound, batch, returned)
        with_own = of_axes[whole]
        if read:
            found[output] = [
                _weight(plain[number], numbers[number], own[read[0]], batch.fields[read[0]])
                for own, numbers in with_own
            ]
        else:
            found[output] = [_weight_of_zero(own, batch.fields) for own, _ in with_own]
    if candidate.conventions.untrained == "zero":  # it may be added, so that a NaN shows
        return {output: [weight or 1.0 for weight in weights] for output, weights in found.items()}
    return found


def _weight(plain: Tensor, with_own: Tensor, own: Tensor, given: Tensor) -> float:
    """Returns the factor that makes a number with a rank's own count one with the given count."""
    if not int(own):
        return LEFT_OUT
    if float(plain) and bool(torch.isfinite(plain / with_own)):
        return float(plain / with_own)
    return float(own / given)


def _weight_of_zero(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> float:
    """Returns the factor if the loss is 0 whatever its count, as of a single id, or of a student
    that is its own teacher. What is left is rounding, which has the size of the rank's share: of
    the smaller one, since nothing says which count the kernel divides by.
    """
    shares = [float(own[name] / given[name]) for name in ("valid_tokens", "valid_sequences") if name in own]
    return min(shares) if bool(own["valid_tokens"]) else LEFT_OUT


def _with_own(
    whole: Collection[Axis], bound: BoundProblem, batch: GlobalBatch, returned: Collection[Output]
) -> list[_OfOwn]:
    """Returns each rank's own counts, and the numbers of the whole batch with them.

    Args:
        whole: the axes over which own counts are summed.
        bound: the problem.
        batch: the batch as the ranks hold it.
        returned: the outputs that the kernel returns.
    """
    layout, of_part, found = batch.partition.layout, dict[tuple[int, ...], _OfOwn](), list[_OfOwn]()
    for rank in range(layout.ranks):
        at = {axis: [own] for axis, own in layout.coordinate(rank).items()}
        at |= {axis: list(range(layout.sizes[axis])) for axis in whole}
        part = tuple(dp * layout.cp + cp for dp in at["dp"] for cp in at["cp"])
        if part not in of_part:
            own = own_counts(bound.spec, batch, at["dp"], at["cp"])
            of_part[part] = own, bound.numbers_with(own, returned)
        found.append(of_part[part])
    return found


def own_counts(spec: Spec, batch: GlobalBatch, dp: Sequence[int], cp: Sequence[int]) -> dict[str, Tensor]:
    """Returns the counts of the tokens and sequences that some ranks of dp and cp hold."""
    partition = batch.partition
    tokens = torch.cat([partition.token_shards[i, j] for i in dp for j in cp])
    sequences = torch.tensor([number for i in dp for number in partition.sequences(i)], dtype=torch.long)
    return spec.counts({**batch.known, **masks_of_share(batch, (sequences, tokens))})
