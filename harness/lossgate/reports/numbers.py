# SPDX-License-Identifier: Apache-2.0
"""Writes the numbers of a verdict for people."""

_FAR = 10
"""A statistic that is so many times its limit is as wrong as a larger one."""


def share(margin: float, *, whole: bool = False) -> str:
    """Returns a share of a limit. How far it is above the limit says little.

    Args:
        margin: the share.
        whole: whether it is written out, however large.
    """
    return f"{margin:.2f}" if margin < _FAR else f"{margin:.2g}" if whole else f"> {_FAR}"


def percent(mde: float) -> str:
    """A pool that could be off by more than itself detects nothing."""
    return "nothing" if mde > 1 else f"{mde:.2g}" if mde < 1e-4 else f"{float(f'{100 * mde:.2g}'):g}%"
