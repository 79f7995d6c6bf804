# SPDX-License-Identifier: Apache-2.0
"""Which rows of an output are wrong: those of single tokens, or single rows of the vocabulary."""

import torch
from torch import Tensor

from lossgate.diagnosis.observed import Observed
from lossgate.numerics.float_formats import float_format_of
from lossgate.specs.outputs import Output

_OFF = 8.0
"""So many times its noise off, a row is wrong. This tells where a disagreement lies, not whether
there is one."""
_FLOOR = 1e-6
"""The noise of a row that has none, relative to the largest entry of the output."""


def wrong_rows(observed: Observed, output: Output, other: Tensor | None = None) -> Tensor:
    """Returns which rows of an output differ from what they should be, ``[rows]`` bool.

    Args:
        observed: what the kernel returned.
        output: one with dims; rows are those of its first.
        other: what it should be; by default the reference.
    """
    case, got = observed.case, observed.got[output]
    reference = case.oracle.reference[output]
    expected = reference if other is None else other
    difference = torch.where(got == expected, 0.0, got - expected).nan_to_num(nan=torch.inf)
    unit = float_format_of(case.result.dtypes.get(output, torch.float32)).unit
    runs = case.oracle.deviations[output].nan_to_num(0.0, 0.0, 0.0)
    largest, was = _largest(expected), _largest(reference)
    noise = _largest(runs.transpose(0, 1)) * (largest / was.clamp(min=1e-300)).clamp(min=1.0, max=1e3)
    floor = _FLOOR * float(was.max()) if len(was) else 0.0
    wrong = _largest(difference) > _OFF * (noise + unit * largest) + floor
    compared = case.oracle.compared(output)
    return wrong if compared is None else wrong & compared


def visible_rows(observed: Observed, output: Output) -> Tensor:
    """Returns which rows of the reference are not 0, ``[rows]`` bool."""
    return _largest(observed.case.oracle.reference[output]) > 0


def _largest(x: Tensor) -> Tensor:
    return x.abs().nan_to_num(0.0, 0.0, 0.0).flatten(1).amax(1) if x.dim() > 1 else x.abs().nan_to_num(0.0, 0.0, 0.0)
