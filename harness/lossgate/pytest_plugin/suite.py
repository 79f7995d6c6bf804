# SPDX-License-Identifier: Apache-2.0
"""Candidates as pytest items: one for each property, layout and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lossgate.base.argument import Argument
from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.declaration.candidate import Candidate


def suite(
    candidate: Candidate,
    *,
    profile: str = "dev",
    layouts: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    examples: int | None = None,
    ranks: int | None = None,
    matrix: str | None = None,
    world: str | None = None,
) -> Callable[..., None]:
    """Returns a test function that verifies a candidate; assign it to a name that pytest collects.

    For example::

        test_my_kernel = lossgate.suite(my_kernel)

    It is an item for each layout and dtype, which holds the candidate to every property. An
    inconclusive one fails. Items depend on nothing but their names, and so run under pytest-xdist.

    Args:
        candidate: what to verify.
        profile: how much to try: "dev", "ci", "nightly", "release", or one of
            ``[tool.lossgate.profiles]`` in pyproject.toml. ``pytest --lossgate-profile`` wins.
        layouts: such as ``["single", "tp=2,cp=2"]``. By default those of ``matrix``.
        dtypes: of inputs, such as ``["bfloat16"]``. By default all that the candidate takes.
        examples: the least problems for each layout and dtype. By default those of the profile.
        ranks: of the largest layout. By default those of the profile.
        matrix: where no layouts are given: "covering" for few that cover what differs, or "full"
            for all of at most ``ranks`` ranks, in every dtype. By default that of the profile.
        world: where ranks run: "simulated", all in this process, by default; or "gloo" or "nccl",
            one process each. ``pytest --lossgate-world`` wins.

    Raises:
        UsageError: if this is no candidate, or a setting is wrong.
    """
    if not isinstance(candidate, Candidate):  # pyright: ignore[reportUnnecessaryIsInstance]  an undecorated kernel is a likely slip
        raise UsageError(
            f"suite({shown(candidate)}): expected a candidate; decorate the kernel with @lossgate.candidate(...)"
        )
    import pytest

    settings = {
        "profile": profile,
        "layouts": _several("layouts", layouts),
        "dtypes": _several("dtypes", dtypes),
        "examples": examples,
        "ranks": ranks,
        "matrix": matrix,
        "world": world,
    }

    @pytest.mark.lossgate(candidate=candidate, settings=settings)
    def test(lossgate_cell: Any, lossgate_run: Callable[[Any], None]) -> None:
        lossgate_run(lossgate_cell)

    test.__doc__ = f"{candidate.name} keeps every property of spec {candidate.spec.name}"
    return test


def _several(argument: str, given: Iterable[str] | None) -> tuple[str, ...] | None:
    """Returns layouts or dtypes by their names; None for those of the profile."""
    return tuple(map(str, Argument("suite(", argument, given or ()).several(argument))) or None
