# SPDX-License-Identifier: Apache-2.0
"""Puts a disagreement into words: which number differs, by how much, and its limit."""

from collections.abc import Iterable, Iterator, Sequence

from lossgate.judge.comparison import Comparison, Entry
from lossgate.judge.pooled_output import Pooled
from lossgate.judge.statistics import NOISE, SCALE, WORST

_SHOWN = 2
"""The most statistics that are shown for an output: if the scale is wrong, so are all others. And
the most outputs whose numbers are shown."""


def explain(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Yields a line for each fault, and lines for the numbers that are off, as plain as they are.

    The numbers of a few outputs are shown; a last line names the others. Comparisons that know no
    entries say their statistics.
    """
    named: list[str] = []
    for number, comparison in enumerate(one for one in comparisons if not one.agrees):
        output = _named(comparison)
        yield from (f"{output}: {fault}" for fault in comparison.faults)
        if not comparison.farthest:
            yield from explain_statistics(comparison)
        elif number < _SHOWN:
            yield f"{output}: {_apart(comparison.farthest)}"
        else:
            named.append(output)
    if named:
        yield f"also off: {'; '.join(named)}"


def _named(comparison: Comparison) -> str:
    return f"{comparison.output}, {comparison.called}" if comparison.called else str(comparison.output)


def _apart(farthest: Sequence[Entry]) -> str:
    """Returns the greatest differences with their numbers, in words."""
    first, last = farthest[0], farthest[-1]
    at, greatest = (f" at {first.place}", "greatest ") if first.place else ("", "")
    words = f"got {first.got:.9g}, want {first.want:.9g}{at}; {greatest}absolute difference "
    words += f"{abs(first.got - first.want):.3g}"
    if last.relative is None:
        return words
    words += f", {greatest}relative difference {last.relative:.3g}"
    return words if last == first else f"{words} (got {last.got:.3g}, want {last.want:.3g} at {last.place})"


def explain_statistics(comparison: Comparison) -> Iterator[str]:
    """Yields a line for each statistic over its limit, the scale first."""
    output = _named(comparison)
    for name in _exceeded(comparison):
        value, limit = comparison.values[name], comparison.limits[name]
        if name == SCALE:
            yield f"{output}: {1 + value:.7g} times the reference; rounding explains 1 +- {limit:.2g}"
        elif name == NOISE:
            yield (
                f"{output}: its errors are on average {value:.3g} times those of the declared precision; "
                f"rounding explains at most {limit:.2g} times"
            )
        else:
            yield (
                f"{output}: the worst {_place(comparison, name)} is off by {value:.3g} times its noise; "
                f"rounding explains at most {limit:.2g} times"
            )


def _exceeded(comparison: Comparison) -> list[str]:
    """Returns the statistics over their limit that are shown: the scale first, then the largest."""
    shares = comparison.shares
    over = [name for name, share in shares.items() if share > 1]
    over.sort(key=lambda name: (name != SCALE, -shares[name]))
    return over[:_SHOWN]


def _place(comparison: Comparison, name: str) -> str:
    """Names the worst entry or block, such as "token (number 6)"."""
    what = "entry" if name == WORST else name
    return f"{what} (number {comparison.where[name]})" if name in comparison.where else what


def explain_difference(comparison: Comparison, first: str, second: str) -> Iterator[str]:
    """Yields a line for each way in which the results of two kernels differ.

    Args:
        comparison: the comparison of their difference.
        first, second: the names of the kernels.
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
                f"{output}: {first} and {second} differ on average by {value:.3g} times the noise of both; "
                f"rounding explains at most {limit:.2g} times"
            )
        else:
            yield (
                f"{output}: the worst {_place(comparison, name)} differs by {value:.3g} times the noise of both; "
                f"rounding explains at most {limit:.2g} times"
            )


def explain_pooled_difference(pooled: Pooled, first: str, second: str) -> Iterator[str]:
    """Yields a line for each way in which two kernels differ over many problems."""
    if not pooled.scale_agrees:
        less = _less(first, second, pooled.scale, pooled.limit)
        yield f"{pooled.output}: pooled over {pooled.problems} problems, {less}"
    if pooled.noise is not None and not pooled.noise.agrees:
        yield (
            f"{pooled.output}: pooled over {pooled.noise.problems} problems, {first} and {second} differ by "
            f"{pooled.noise.noise:.3g} times the most that the noise of both explains; the limit is "
            f"{pooled.noise.limit:.3g} times"
        )


def _less(first: str, second: str, value: float, limit: float) -> str:
    return f"{first} less {second} is {value:.3g} times the reference; the rounding of both explains +- {limit:.2g}"


def explain_pooled(pooled: Pooled) -> Iterator[str]:
    """Yields a line for each thing that is wrong over many problems: the scale, and the noise."""
    if not pooled.scale_agrees:
        yield (
            f"{pooled.output}: pooled over {pooled.problems} problems, it is {1 + pooled.scale:.7g} times the "
            f"reference; rounding explains 1 +- {pooled.limit:.2g}"
        )
    if pooled.noise is not None and not pooled.noise.agrees:
        yield (
            f"{pooled.output}: pooled over {pooled.noise.problems} problems, the errors are {pooled.noise.noise:.3g} "
            "times the most that the declared precision explains; the limit is "
            f"{pooled.noise.limit:.3g} times. {_less_noise(pooled)}"
        )


def _less_noise(pooled: Pooled) -> str:
    """Returns advice for an output that is too noisy."""
    if pooled.output.kind == "gradient":
        return (
            "Add the gradient up in float32 and round it once; or declare in Precision how the kernel rounds, for "
            "example by accumulate= or grads_in_forward="
        )
    return (
        "Compute it in float32 and round it once; or declare in Precision how the kernel rounds, for example by loss="
    )
