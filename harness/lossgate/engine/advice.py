# SPDX-License-Identifier: Apache-2.0
"""What would show more, where a verdict says too little."""

from collections.abc import Sequence
from math import ceil, isfinite

from lossgate.engine.survivors import Tried
from lossgate.judge.pooling import LARGEST_MDE, Pooled, sigmas

_MOST = 2000
"""Problems beyond which nobody waits for a cell."""
_FEW = 4
"""Problems of which the noise of a pool can be judged."""
_ENOUGH = 20
"""Problems that tell that more hardly help: what none of 20 shows, fewer than 15% of all show, with
a confidence of 95%."""
_ROUNDS = 4
"""Rounds that draw problems for what is missing. A single one draws none."""


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


def to_compare(problems: int, *, too_noisy: bool = False) -> str:
    """Returns what to do about an output whose scale was not compared.

    Args:
        problems: how many were tried.
        too_noisy: rounding explains even a result of zero; otherwise the output was zero.
    """
    if problems < _ENOUGH:
        return f"raise --examples to {_ENOUGH}"
    if too_noisy:
        return f"more than these {problems} problems hardly help: compute in a finer dtype, and declare so"
    return f"more than these {problems} problems hardly help: add to supports a choice with which it is not zero"


def to_kill(tried: Sequence[Tried], problems: int, option: str) -> str:
    """Returns what to do about option mutants that survive.

    Args:
        tried: of each mutant of one choice, what the problems said that were given this choice.
        problems: how many problems were tried.
        option: the option.
    """
    drop = f"or drop {option} from supports"
    far = min(tried, key=lambda one: one.closest, default=None)
    given = far.problems if far is not None else 0
    if far is not None and given >= _ENOUGH and far.closest < 1:
        if not far.change:
            return f"both give the same in all {given} problems with it; support what makes them differ, {drop}"
        explained = f"{far.least:.2g}" if isfinite(far.least) else "any difference"
        return (
            f"they differ by {far.change:.2g} in the problem that showed most, out of {given} with it, and rounding "
            f"explains {explained}. More problems hardly help: compute in a finer dtype and declare so, {drop}"
        )
    needed = problems * _ENOUGH / given if 0 < given < _ENOUGH else 4 * problems
    if needed > _MOST:
        return f"none of {problems} problems showed that, and more hardly help; support what makes them differ, {drop}"
    return f"{given} of {problems} problems have it; raise --examples to about {_rounded_up(needed)}, {drop}"


def to_reach(drawn: int) -> str:
    """Returns what to do about a coverage goal that no problem reached.

    Args:
        drawn: how many problems were drawn for it, in rounds after the first.
    """
    if not drawn:
        return f"no problem was drawn for it; set rounds to {_ROUNDS} or more"
    return f"none of {drawn:,} problems that were drawn for it does, and more hardly help"


def _rounded_up(count: float) -> int:
    """Rounds a number of problems up, to two digits."""
    step = 10 ** max(0, len(str(int(count))) - 2)
    return ceil(count / step) * step
