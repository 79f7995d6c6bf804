# SPDX-License-Identifier: Apache-2.0
"""A disagreement in words: what differs, and by how much against its limit."""

from collections.abc import Iterator

from lossgate.judge.comparison import Comparison
from lossgate.judge.pooled_output import Pooled
from lossgate.judge.statistics import NOISE, SCALE, WORST

_SHOWN = 2
"""Statistics that are shown for an output. If the scale is wrong, so are all others."""


def explain(comparison: Comparison) -> Iterator[str]:
    """Yields a line for each thing that is wrong, the scale first. It yields none if all agrees."""
    output = f"{comparison.output}, {comparison.called}" if comparison.called else str(comparison.output)
    for fault in comparison.faults:
        yield f"{output}: {fault}"
    for name in _exceeded(comparison):
        value, limit = comparison.values[name], comparison.limits[name]
        if name == SCALE:
            yield f"{output}: {1 + value:.7g} times the reference, where rounding explains 1 +- {limit:.2g}"
        elif name == NOISE:
            yield (
                f"{output}: its errors are on average {value:.3g} times those of the declared precision, "
                f"where {limit:.2g} times is explained"
            )
        else:
            yield (
                f"{output}: the worst {_place(comparison, name)} is off by {value:.3g} times its noise, "
                f"where {limit:.2g} times is explained"
            )


def _exceeded(comparison: Comparison) -> list[str]:
    """Returns the statistics that are over their limit, the scale first, as many as are shown."""
    shares = comparison.shares
    over = sorted((name for name, share in shares.items() if share > 1), key=lambda n: (n != SCALE, -shares[n]))
    return over[:_SHOWN]


def _place(comparison: Comparison, name: str) -> str:
    """Returns the worst entry or block in words."""
    what = "entry" if name == WORST else name
    return f"{what} (number {comparison.where[name]})" if name in comparison.where else what


def explain_difference(comparison: Comparison, first: str, second: str) -> Iterator[str]:
    """Yields a line for each thing in which two results differ.

    Args:
        comparison: of the difference of the two.
        first, second: the names of their kernels.
    """
    output = comparison.output
    for fault in comparison.faults:
        yield f"{output}: {first} less {second}: {fault}"
    for name in _exceeded(comparison):
        value, limit = comparison.values[name], comparison.limits[name]
        if name == SCALE:
            yield f"{output}: {_less(first, second, value, limit)}"
        elif name == NOISE:
            yield (
                f"{output}: {first} and {second} differ on average by {value:.3g} times the noise of both, "
                f"where {limit:.2g} times is explained"
            )
        else:
            yield (
                f"{output}: the worst {_place(comparison, name)} differs by {value:.3g} times the noise of both, "
                f"where {limit:.2g} times is explained"
            )


def explain_pooled_difference(pooled: Pooled, first: str, second: str) -> Iterator[str]:
    """Yields a line for each thing in which two results differ over many problems."""
    if not pooled.scale_agrees:
        less = _less(first, second, pooled.scale, pooled.limit)
        yield f"{pooled.output}: pooled over {pooled.problems} problems, {less}"
    if pooled.noise is not None and not pooled.noise.agrees:
        yield (
            f"{pooled.output}: pooled over {pooled.noise.problems} problems, {first} and {second} differ by "
            f"{pooled.noise.noise:.3g} times the most that the noise of both explains, where "
            f"{pooled.noise.limit:.3g} times is allowed"
        )


def _less(first: str, second: str, value: float, limit: float) -> str:
    return (
        f"{first} less {second} is {value:.3g} times the reference, where the rounding of both explains +- {limit:.2g}"
    )


def explain_pooled(pooled: Pooled) -> Iterator[str]:
    """Yields a line for each thing that is wrong over many problems: the scale, and the noise."""
    if not pooled.scale_agrees:
        yield (
            f"{pooled.output}: pooled over {pooled.problems} problems it is {1 + pooled.scale:.7g} times the "
            f"reference, where rounding explains 1 +- {pooled.limit:.2g}"
        )
    if pooled.noise is not None and not pooled.noise.agrees:
        yield (
            f"{pooled.output}: pooled over {pooled.noise.problems} problems its errors are {pooled.noise.noise:.3g} "
            f"times the most that the declared precision explains, where {pooled.noise.limit:.3g} times is allowed; "
            f"{_less_noise(pooled)}"
        )


def _less_noise(pooled: Pooled) -> str:
    """Returns the way out for an output that is too noisy."""
    if pooled.output.kind == "gradient":
        return (
            "add it up in float32 and round it once, or declare in Precision what the kernel does, such as "
            "accumulate or grads_in_forward"
        )
    return "compute it in float32 and round it once, or declare in Precision what the kernel does, such as loss"
