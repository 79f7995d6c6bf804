# SPDX-License-Identifier: Apache-2.0
"""What would show more, where a verdict says too little."""

from math import ceil

from lossgate.judge.pooled_scale import LARGEST_MDE, sigmas
from lossgate.judge.pooling import Pooled

_MOST = 2000
"""Problems beyond which nobody waits for a cell."""
_FEW = 4
"""Problems of which the noise of a pool can be told."""


def to_detect(pooled: Pooled, problems: int) -> str:
    """Returns what to do about an output in whose scale too small an error would not show.

    The noise of the pool falls with the root of the number of problems. What is left of its limit
    is what rounding does to each result alike, and does not fall.

    Args:
        pooled: the output, pooled.
        problems: how many were tried. Some say nothing of the output.
    """
    if pooled.problems < _FEW:
        return f"only {pooled.problems} of {problems} problems say something about it; raise --examples"
    noise = float(sigmas(pooled.problems)) * pooled.sd
    left = LARGEST_MDE - (pooled.limit - noise)
    needed = problems * ((noise + abs(pooled.scale)) / left) ** 2 if left > 0 else float("inf")
    if needed <= _MOST:
        return f"raise --examples to about {_rounded_up(needed)}"
    finer = (
        "compute gradients in a finer dtype"
        if pooled.output.kind == "gradient"
        else f"compute or return {pooled.output} in a finer dtype"
    )
    return f"more problems hardly help, because of the rounding that Precision declares: {finer}, and declare so"


def _rounded_up(count: float) -> int:
    """Rounds a number of problems up, to two digits."""
    step = 10 ** max(0, len(str(int(count))) - 2)
    return ceil(count / step) * step
