# SPDX-License-Identifier: Apache-2.0
"""Coverage goals of clipped ratios: each side of the clip, for either sign of the advantage."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lossgate.specs.coverage import CoverageGoal

_SIDES = ("inside", "below", "above")


def clip_goals(
    unit: str, unreachable_if: Mapping[str, Any], below_unreachable_if: Mapping[str, Any] | None = None
) -> dict[str, CoverageGoal]:
    """Returns a goal for each side of the clip and each sign of the advantage.

    Args:
        unit: what has a ratio, "token" or "sequence".
        unreachable_if: when no problem reaches any of these goals; see ``CoverageGoal``.
        below_unreachable_if: when none reaches those below the clip.
    """
    goals: dict[str, CoverageGoal] = {}
    for side in _SIDES:
        beside = {} if side == "inside" else {"ratios": ("inside", "on-policy")}
        unreachable = beside | {**unreachable_if, **((below_unreachable_if or {}) if side == "below" else {})}
        for sign, others in {"<": ("positive", "zero"), ">": ("negative", "zero")}.items():
            meaning = f"a {unit}'s ratio {side} the clip, with an advantage {sign} 0"
            goals[_name(unit, side, sign)] = CoverageGoal(
                meaning=meaning, unreachable_if={**unreachable, "advantages": others}
            )
    return goals


def covered_clip_goals(unit: str, log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Iterator[str]:
    """Yields the names of the ``clip_goals`` that ratios reach.

    Args:
        unit: as for ``clip_goals``.
        log_ratio: ``[n]``, in nats.
        advantage: ``[n]``.
        low, high: where the log-ratio is clipped.
    """
    sides = ((log_ratio > low) & (log_ratio < high), log_ratio < low, log_ratio > high)
    for side, there in zip(_SIDES, sides, strict=True):
        for sign, signed in {"<": advantage < 0, ">": advantage > 0}.items():
            if bool((there & signed).any()):
                yield _name(unit, side, sign)


def _name(unit: str, side: str, sign: str) -> str:
    return f"{unit} {side} the clip, A {sign} 0"
