# SPDX-License-Identifier: Apache-2.0
"""A disagreement in words: what differs, and by how much against its limit."""

from collections.abc import Iterator

from lossgate.judge.comparison import Comparison
from lossgate.judge.pooling import Pooled
from lossgate.judge.statistics import NOISE, SCALE, WORST

_TOLD = 2
"""Statistics of an output that are told; where the scale is wrong, the others are wrong with it."""


def explain(comparison: Comparison) -> Iterator[str]:
    """A line for each thing that is wrong, the scale first; none if the comparison agrees."""
    output = comparison.output
    for fault in comparison.faults:
        yield f"{output}: {fault}"
    excess = comparison.excess
    for name in sorted((n for n, share in excess.items() if share > 1), key=lambda n: (n != SCALE, -excess[n]))[:_TOLD]:
        value, limit = comparison.values[name], comparison.limits[name]
        if name == SCALE:
            yield f"{output}: {1 + value:.7g} times the reference, where rounding explains 1 +- {limit:.2g}"
        elif name == NOISE:
            yield f"{output}: errors are {value:.3g} times the declared precision's on average, where {limit:.2g} times is explained"
        else:
            what = "entry" if name == WORST else name
            where = f" (number {comparison.places[name]})" if name in comparison.places else ""
            yield f"{output}: the worst {what}{where} is off by {value:.3g} times its noise, where {limit:.2g} times is explained"


def explain_pooled(pooled: Pooled) -> str:
    return (
        f"{pooled.output}: over {pooled.problems} problems together {1 + pooled.scale:.7g} times the reference, "
        f"where rounding explains 1 +- {pooled.limit:.2g}"
    )
