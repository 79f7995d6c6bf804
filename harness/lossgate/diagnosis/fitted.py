# SPDX-License-Identifier: Apache-2.0
"""A factor that nobody knew beforehand: the same number in every problem."""

from collections.abc import Iterator
from functools import partial

import torch

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Outputs
from lossgate.counterfactuals.setting import Setting
from lossgate.diagnosis.observed import Observed

_DIGITS = (2, 3, 4)
"""Significant digits to which a factor may be round."""
_WHOLE = 1e-5
"""How near a whole number a divisor must be to be that: relative to it."""
_LARGEST, _SCALE = 100, 2**20
"""The largest divisor that is looked for, and the largest power of 2. Any small factor is nearly
1 / n for some large n."""


def fitted_factors(failing: Observed) -> list[Counterfactual]:
    """Returns the factors by which the wrong outputs of a problem are too large.

    Whether it is that in other problems, too, is for them to say.
    """
    return list({one.name: one for one in _factors(failing)}.values())


def _factors(observed: Observed) -> Iterator[Counterfactual]:
    for output in sorted(observed.wrong, key=str):
        got, reference = observed.got[output], observed.case.oracle.reference[output]
        finite = got.isfinite() & reference.isfinite()
        got, reference = got[finite], reference[finite]
        size = float(reference.square().sum())
        if size == 0:
            continue
        factor = float((got * reference).sum()) / size
        if (divisor := _divisor(factor)) is not None:
            yield mistake(
                f"outputs divided by {divisor}",
                f"{{outputs}}: divided by {divisor} in every problem",
                "factor",
                outputs=partial(_times, 1 / divisor),
            )
            continue
        for digits in _DIGITS:
            rounded = float(f"{factor:.{digits}g}")
            if rounded not in (0.0, 1.0, -1.0, 2.0, 0.5):  # which are in the bank
                yield mistake(
                    f"outputs times {rounded}",
                    f"{{outputs}}: multiplied by {rounded:g} in every problem",
                    "factor",
                    outputs=partial(_times, rounded),
                )


def _divisor(factor: float) -> int | None:
    """Returns the whole number by which a factor divides; None if it does not, or by 2."""
    if not 1 / (2 * _SCALE) < factor < 0.4:
        return None
    divisor = round(1 / factor)
    is_likely = divisor <= _LARGEST or (divisor <= _SCALE and divisor & (divisor - 1) == 0)
    return divisor if is_likely and abs(1 / factor - divisor) < _WHOLE * divisor else None


def _times(factor: float, setting: Setting, outputs: Outputs) -> Outputs:
    return {output: torch.where(x.isfinite(), x * factor, x) for output, x in outputs.items()}
