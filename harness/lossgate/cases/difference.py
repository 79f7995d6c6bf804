# SPDX-License-Identifier: Apache-2.0
"""What two candidates gave on the same problem, compared with each other.

K is the result of one, L that of the other, R the reference, and E and F are the members of their
ensembles. The judge's statistics are those of ``judge.statistics``, with

    d = K - L                           in place of K - R
    E_m - F_(m+1)                       in place of E_m - R

The second says how far two right kernels are apart that round as the two declare: both round, so
the noise of the difference is that of both together. SCALE is then by how much K is larger than L,
relative to the reference. Members are paired with the next, because the two ensembles draw from the
same numbers: with the same precision, E_m and F_m are equal.

Two kernels that share code round alike and differ by less. That is no disagreement, so nothing is
expected of a difference but that it is not too large.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import hypot

import torch
from torch import Tensor

from lossgate.cases.case import Case
from lossgate.cases.oracle import without_overflow
from lossgate.judge.blocks import blocks_of
from lossgate.judge.comparison import Comparison
from lossgate.judge.tolerance import Tolerance
from lossgate.numerics.float_formats import float_format_of
from lossgate.specs.outputs import Output


def differences(first: Case, second: Case) -> Iterator[Comparison]:
    """Compares the outputs that both candidates give.

    A gradient that only one of them gives is a fault. Other outputs that only one returns are left
    out: they are not required.

    Args:
        first, second: two candidates on the same problem, in worlds of the same layout.

    Yields:
        The comparison of each difference. Its scale is relative to the reference.

    Raises:
        RankFailure: if a rank failed.
        CandidateError: if a candidate broke its declared interface.
    """
    given = first.result.outputs, second.result.outputs
    for output in dict.fromkeys((*given[0], *given[1])):
        if output in given[0] and output in given[1]:
            yield _difference(output, first, second)
        elif output.kind == "gradient":
            only = first if output in given[0] else second
            yield Comparison(output=output, kernels=2, faults=(f"only {only.candidate.name} gives it",))


def _difference(output: Output, first: Case, second: Case) -> Comparison:
    cases = first, second
    reference, compared = first.oracle.reference[output], first.oracle.compared(output)
    dtypes = [case.result.dtypes[output] for case in cases]
    results = [
        without_overflow(case.result.outputs[output], reference, dtype)
        for case, dtype in zip(cases, dtypes, strict=True)
    ]
    noise = first.oracle.deviations[output] - second.oracle.deviations[output].roll(1, 0)
    formats = [float_format_of(dtype) for dtype in dtypes]
    alike = [case.oracle.alike_format(output, dtype) for case, dtype in zip(cases, dtypes, strict=True)]
    alike_runs = _apart(reference, [case.oracle.alike_runs(output) for case in cases])
    if compared is not None:
        reference, noise = (x[..., compared] for x in (reference, noise))
        results, alike_runs = [result[compared] for result in results], alike_runs[..., compared]
    apart, faults = _subtract(*results)
    finite = reference.isfinite()  # where it is not, only the kind of infinity counts
    reference, noise, apart = (torch.where(finite, x, 0.0) for x in (reference, noise, apart))
    tolerance = Tolerance(
        output,
        reference,
        noise,
        unit=hypot(*(format_.unit for format_ in formats)),
        rounding=lambda x: torch.hypot(*(format_.error(x) for format_ in formats)),
        alike=lambda x: torch.stack([format_.error(x) for format_ in alike]).sum(0),
        alike_runs=torch.where(finite, alike_runs, 0.0),
        knows_noise=all(case.oracle.knows_noise(output) for case in cases),
        blocks=blocks_of(output, first.placed.partition, first.candidate.tiles, compared),
    )
    units = [format_.unit for format_ in formats]
    return replace(tolerance.compare(reference + apart, faults), unit=max(units), kernels=2)


def _apart(reference: Tensor, runs: Sequence[Tensor | None]) -> Tensor:
    """Returns how far two kernels are apart that round equal numbers alike, ``[n, *shape]``."""
    one, other = (torch.zeros_like(reference)[None] if each is None else each for each in runs)
    return one - other.roll(1, 0)


def _subtract(one: Tensor, other: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Returns the difference, which is 0 where both are the same infinity or both NaN; and where
    only one of them is finite, in words.
    """
    same = (one == other) | (one.isnan() & other.isnan())
    lost = ~same & ~(one.isfinite() & other.isfinite())
    faults = (f"{int(lost.sum())} of {one.numel()} entries are not both finite, nor the same",) if lost.any() else ()
    return torch.where(same | lost, 0.0, one - other), faults
