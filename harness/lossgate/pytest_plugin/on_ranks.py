# SPDX-License-Identifier: Apache-2.0
"""Tests that run on the ranks of a world: ``@pytest.mark.world(tp=2, cp=2)``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest

from lossgate.base.errors import LossgateError, UsageError
from lossgate.base.layout import AXES, Layout, name_ranks
from lossgate.base.spelling import nearest

if TYPE_CHECKING:
    from lossgate.worlds import RankContext, World

CONTEXT = "rank_context"
"""The name of the argument that receives the context of the rank."""
_SETTINGS = ("on", "timeout", "device")


def run_on_ranks(item: pytest.Function, marker: pytest.Mark, default: str) -> None:
    """Runs a test function on every rank. The test fails if it fails on any rank.

    Args:
        item: the test.
        marker: the marker ``world`` of the test. It has sizes of axes, and ``on`` (the world),
            ``timeout`` and ``device``.
        default: the world, if the marker names none.
    """
    given = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    failed, ends = "", list[Ended]()
    try:
        with _world_of(marker, default) as world, _pickled_by_value(item.function.__module__):
            ends = world.run(OnRank(item.obj, given))
    except LossgateError as error:
        failed = str(error)
    if failed:  # pytest would show the error twice if the test failed within the handler above
        pytest.fail(failed, pytrace=False)
    _end_as(ends)


def _end_as(ends: Sequence[Ended]) -> None:
    """Ends a test in the same way as its ranks. For example, it is skipped if they skipped it."""
    ranks_by_end: dict[str, list[int]] = {}
    for rank, end in enumerate(ends):
        ranks_by_end.setdefault(end.how, []).append(rank)
    if len(ranks_by_end) > 1:
        groups = "; ".join(f"{name_ranks(ranks)} {how}" for how, ranks in sorted(ranks_by_end.items()))
        pytest.fail(f"the ranks did not end alike: {groups}", pytrace=False)
    if "skipped" in ranks_by_end:
        pytest.skip(ends[0].reason)
    if "failed as expected" in ranks_by_end:
        pytest.xfail(ends[0].reason)


@contextmanager
def _world_of(marker: pytest.Mark, default: str) -> Generator[World]:
    from lossgate.worlds import make_world, most_ranks

    layout, settings = _read(marker)
    kind = settings.pop("on", default)
    settings.setdefault("device", "cuda" if kind == "nccl" else "cpu")
    if layout.ranks > (most := most_ranks(kind)):
        pytest.skip(f"layout {layout} has {layout.ranks} ranks, but torchrun launched only {most}")
    world = make_world(kind, layout, **settings)
    try:
        yield world
    finally:
        world.close()


@dataclass(frozen=True)
class Ended:
    """How a test ended on a rank without failing."""

    how: Literal["passed", "skipped", "failed as expected"]
    reason: str = ""


@dataclass(frozen=True)
class OnRank:
    """A test function with its arguments, as a task for ranks."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self, context: RankContext) -> Ended:
        try:
            self.function(**{name: context if name == CONTEXT else value for name, value in self.arguments.items()})
        except pytest.skip.Exception as outcome:
            return Ended("skipped", str(outcome))
        except pytest.xfail.Exception as outcome:
            return Ended("failed as expected", str(outcome))
        return Ended("passed")


def _read(marker: pytest.Mark) -> tuple[Layout, dict[str, Any]]:
    """Returns the layout and the settings of a marker.

    Raises:
        UsageError: if the marker has other arguments.
    """
    if marker.args:
        raise UsageError(f"mark.world{marker.args!r}: expected names, such as mark.world(tp=2, cp=2)")
    for name in marker.kwargs:
        if name not in (*AXES, *_SETTINGS):
            raise UsageError(f"mark.world({name}=...): {nearest(name, (*AXES, *_SETTINGS))}")
    sizes = {axis: marker.kwargs[axis] for axis in AXES if axis in marker.kwargs}
    return Layout(**sizes), {name: marker.kwargs[name] for name in _SETTINGS if name in marker.kwargs}


@contextmanager
def _pickled_by_value(module: str) -> Generator[None]:
    """Makes pickles hold the code of a test module, because other processes can't import it."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[module])
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[module])
