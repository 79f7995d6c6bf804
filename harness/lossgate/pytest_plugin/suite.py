# SPDX-License-Identifier: Apache-2.0
"""Makes pytest items of a candidate, one for each of its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lossgate.base.argument import Argument
from lossgate.base.errors import UsageError
from lossgate.base.names import WORLD_NAMES
from lossgate.base.spelling import shown
from lossgate.declaration.candidate import Candidate
from lossgate.engine.settings import names_of


def suite(
    candidate: Candidate,
    *,
    profile: str = "dev",
    layouts: Iterable[str] | str | None = None,
    dtypes: Iterable[Any] | Any = None,
    examples: int | None = None,
    ranks: int | None = None,
    matrix: str | None = None,
    world: str | None = None,
) -> Callable[..., None]:
    """Returns a test function that verifies a candidate; assign it to a name that pytest collects.

    For example::

        test_my_kernel = lossgate.suite(my_kernel)

    The function has an item for each layout and dtype, which holds the candidate to every property.
    An inconclusive item fails, and so does one that breaks a promise, unless the setting
    ``numbers_only`` says that only numbers count. Items depend only on their names, so they run
    under pytest-xdist.

    Args:
        candidate: the candidate to verify.
        profile: how much to try: "dev", "quick", "ci", "nightly", "release", or one of
            ``[tool.lossgate.profiles]`` in pyproject.toml. ``pytest --lossgate-profile`` wins.
        layouts: the layouts, such as ``["single", "tp=2,cp=2"]``. By default those of ``matrix``.
        dtypes: the dtypes of inputs, such as ``["bfloat16"]``. By default all that the candidate
            takes.
        examples: the fewest problems for each layout and dtype. By default those of the profile.
        ranks: the ranks of the largest layout. By default those of the profile.
        matrix: the layouts, if ``layouts`` is left out: "covering" for a few that cover what
            differs, or "full" for all of at most ``ranks`` ranks, in every dtype. By default that
            of the profile.
        world: where ranks run: "simulated", all in this process, by default; or "gloo" or "nccl",
            one process each. ``pytest --lossgate-world`` wins.

    Raises:
        UsageError: if ``candidate`` is no candidate, or if a setting is wrong.
    """
    # A likely slip is a kernel that is not decorated.
    if not isinstance(candidate, Candidate):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"suite({shown(candidate)}): expected a candidate; decorate the kernel with @lossgate.candidate(...)"
        )
    if world is not None:
        Argument("suite(", "world", world).one_of(WORLD_NAMES)
    try:
        import pytest
    except ImportError:
        raise UsageError(
            "lossgate.suite needs pytest, which is not installed; pip install 'lossgate[pytest]'"
        ) from None

    settings = {
        "profile": profile,
        "layouts": names_of("suite(", "layouts", layouts),
        "dtypes": names_of("suite(", "dtypes", dtypes),
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
