# SPDX-License-Identifier: Apache-2.0
"""A disagreement in words: what differs, and by how much against its limit."""

from collections.abc import Iterator

from lossgate.judge.comparison import Comparison
from lossgate.judge.pooling import Pooled
from lossgate.judge.statistics import NOISE, SCALE, WORST

_SHOWN = 2
"""Statistics that are shown for an output. If the scale is wrong, so are all others."""


def explain(comparison: Comparison) -> Iterator[str]:
    """Yields a line for each thing that is wrong, the scale first. It yields none if all agrees."""
    output = comparison.output
    for fault in comparison.faults:
        yield f"{output}: {fault}"
    shares = comparison.shares
    exceeded = sorted((name for name, share in shares.items() if share > 1), key=lambda n: (n != SCALE, -shares[n]))
    for name in exceeded[:_SHOWN]:
        value, limit = comparison.values[name], comparison.limits[name]
        if name == SCALE:
            yield f"{output}: {1 + value:.7g} times the reference, where rounding explains 1 +- {limit:.2g}"
        elif name == NOISE:
            yield (
                f"{output}: its errors are on average {value:.3g} times those of the declared precision, "
                f"where {limit:.2g} times is explained"
            )
        else:
            what = "entry" if name == WORST else name
            number = f" (number {comparison.where[name]})" if name in comparison.where else ""
            yield (
                f"{output}: the worst {what}{number} is off by {value:.3g} times its noise, "
                f"where {limit:.2g} times is explained"
            )


def explain_pooled(pooled: Pooled) -> str:
    """Returns a line for a scale that is wrong over many problems."""
    return (
        f"{pooled.output}: pooled over {pooled.problems} problems it is {1 + pooled.scale:.7g} times the reference, "
        f"where rounding explains 1 +- {pooled.limit:.2g}"
    )
