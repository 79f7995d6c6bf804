# SPDX-License-Identifier: Apache-2.0
"""Compares the results of two candidates on the same problem with each other.

K is the result of the first candidate, L that of the second, and R the reference. E_m and F_m are
the members of their ensembles. The statistics are those of ``judge.statistics``, with

    d = K - L                           in place of K - R
    E_m - F_(m+1)                       in place of E_m - R

The latter is the difference of two right kernels that round as the two declare, so it has the noise
of both. SCALE is then by how much K is larger than L, relative to the reference. Each member is
paired with the next member of the other ensemble, because both ensembles draw from the same
numbers: with the same precision, E_m and F_m are equal.

Two kernels that share code round alike and differ by less. That is no disagreement: a difference
must only not be too large.
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

    A gradient that only one candidate gives is a fault. Other outputs are not required, so they are
    left out if only one candidate returns them.

    Args:
        first, second: two candidates on the same problem, in worlds of the same layout.

    Yields:
        The comparison of each difference. Its scale is relative to the reference.

    Raises:
        RankFailure: if a rank failed.
        CandidateError: if a candidate broke its declared interface.
    """
    of_first, of_second = first.result.outputs, second.result.outputs
    for output in dict.fromkeys((*of_first, *of_second)):
        if output in of_first and output in of_second:
            yield _difference(output, first, second)
        elif output.kind == "gradient":
            only = first if output in of_first else second
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

    def rounding_of_both(x: Tensor) -> Tensor:
        return torch.hypot(*(format_.error(x) for format_ in formats))

    def alike_of_both(x: Tensor) -> Tensor:
        return torch.stack([format_.error(x) for format_ in alike]).sum(0)

    tolerance = Tolerance(
        output,
        reference,
        noise,
        unit=hypot(*(format_.unit for format_ in formats)),
        rounding=rounding_of_both,
        alike=alike_of_both,
        alike_runs=torch.where(finite, alike_runs, 0.0),
        knows_noise=all(case.oracle.knows_noise(output) for case in cases),
        blocks=blocks_of(output, first.placed.partition, first.candidate.tiles, compared),
    )
    units = [format_.unit for format_ in formats]
    return replace(tolerance.compare(reference + apart, faults), unit=max(units), kernels=2)


def _apart(reference: Tensor, runs: Sequence[Tensor | None]) -> Tensor:
    """Returns the differences of the runs of two kernels that round equal numbers alike,
    ``[n, *shape]``. A kernel without such runs has no error.
    """
    one, other = (torch.zeros_like(reference)[None] if each is None else each for each in runs)
    return one - other.roll(1, 0)


def _subtract(one: Tensor, other: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Subtracts two results.

    Returns:
        The difference, and faults. The difference is 0 where both are the same infinity, or both
        NaN. It is 0, too, where they are unlike and at least one is not finite; that is a fault.
    """
    same = (one == other) | (one.isnan() & other.isnan())
    lost = ~same & ~(one.isfinite() & other.isfinite())
    difference = torch.where(same | lost, 0.0, one - other)
    if not lost.any():
        return difference, ()
    return difference, (f"{int(lost.sum())} of {one.numel()} entries are not both finite, nor the same",)
