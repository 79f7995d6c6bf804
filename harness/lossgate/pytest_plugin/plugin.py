# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: runs ``lossgate.suite`` items, writes their evidence, and gives tests ranks.

Torch is imported only if there is such an item, or a test that uses ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lossgate.pytest_plugin.evidence import Evidence

if TYPE_CHECKING:
    from lossgate.engine.cell import Cell
    from lossgate.engine.settings import Settings
    from lossgate.worlds.simulated_ranks import SimulatedRanks

_EVIDENCE = pytest.StashKey[Evidence]()
_EXIT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lossgate", "verification of loss kernels")
    group.addoption(
        "--lossgate-profile",
        metavar="NAME",
        help="how much to verify: dev, quick, ci, nightly, release, or one of pyproject.toml",
    )
    group.addoption(
        "--lossgate-evidence", metavar="FILE", type=Path, help="append evidence for lossgate gate to this file"
    )
    group.addoption("--lossgate-failures", metavar="DIR", default=".lossgate", help="folder for failure files")
    group.addoption(
        "--lossgate-world",
        metavar="NAME",
        help="where ranks run: simulated, gloo, nccl, or torchrun if it started pytest",
    )
    parser.addini(
        "lossgate_torchrun",
        "if torchrun started pytest: run the tests in rank 0, with all its processes as ranks",
        type="bool",
        default=False,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Serves as a rank if another process of the same torchrun runs the tests."""
    from lossgate.base.launch import is_follower

    if _world(config) != "torchrun" or not is_follower():
        return None
    from lossgate.worlds.torchrun import follow

    return follow()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lossgate(candidate, settings): an item of lossgate.suite")
    config.addinivalue_line(
        "markers",
        "world(dp=1, cp=1, tp=1, on=None, timeout=60, device='cpu'): runs the test on every rank of a world; its "
        "argument rank_context says which rank",
    )
    config.stash[_EVIDENCE] = Evidence(config, config.getoption("--lossgate-evidence"))
    config.pluginmanager.register(config.stash[_EVIDENCE], "lossgate-evidence")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("lossgate")
    if marker is None or "lossgate_cell" not in metafunc.fixturenames:
        return
    from lossgate.base.errors import UsageError
    from lossgate.engine.plan import left_out, plan

    candidate = marker.kwargs["candidate"]
    try:
        settings = _settings(metafunc.config, marker)
        cells = plan([candidate], settings)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    for line in left_out([candidate], settings):
        metafunc.definition.warn(pytest.PytestWarning(line))
    metafunc.parametrize("lossgate_cell", cells, ids=[f"{c.property}-{c.layout}-{c.dtype}" for c in cells])


def _settings(config: pytest.Config, marker: pytest.Mark) -> Settings:
    from lossgate.engine.settings import load_settings

    given = dict(marker.kwargs["settings"])
    given["world"] = _world(config) or given["world"]
    of_suite = given.pop("profile")
    return load_settings(config.getoption("--lossgate-profile") or of_suite, config.rootpath, **given)


def _world(config: pytest.Config) -> str | None:
    """Returns the world that the command line or torchrun asks for; None if neither does."""
    from lossgate.base.launch import launch_of_torchrun

    if world := config.getoption("--lossgate-world"):
        return world
    attached = config.getini("lossgate_torchrun") and launch_of_torchrun() is not None
    return "torchrun" if attached else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that has the marker ``world`` on the ranks of a world."""
    marker = pyfuncitem.get_closest_marker("world")
    if marker is None:
        return None
    from lossgate.pytest_plugin.on_ranks import run_on_ranks

    run_on_ranks(pyfuncitem, marker, _world(pyfuncitem.config) or "gloo")
    return True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the other processes of a torchrun after everything is printed."""
    if _EXIT not in config.stash or _world(config) != "torchrun":
        return
    from lossgate.worlds.torchrun import dismiss

    sys.stdout.flush()
    dismiss(config.stash[_EXIT])


@pytest.fixture
def rank_context() -> None:
    """The context of the rank in tests that have the marker ``world``. The marker fills it in."""


@pytest.fixture(scope="module")
def simulated_ranks() -> Iterator[SimulatedRanks]:
    """Calls a function on every rank of a layout: ``simulated_ranks(function, *arguments, tp=2)``.

    The fixture lasts for a whole module. So it also serves tests with ``hypothesis.given``, which
    may not use a fixture that is made for each test.
    """
    from lossgate.worlds.simulated_ranks import SimulatedRanks

    with SimulatedRanks() as ranks:
        yield ranks


@pytest.fixture
def lossgate_run(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[[Cell], None]:
    """Runs a cell, and fails the item unless it agrees, or its numbers do if only these count."""
    import os

    import torch

    from lossgate.base.errors import UsageError
    from lossgate.engine.cell_record import Verdict
    from lossgate.engine.earlier_failures import examples_of, hold_to_earlier
    from lossgate.engine.events import CellFinished
    from lossgate.engine.run_cell import run_cell
    from lossgate.reports.failures import FailureFiles
    from lossgate.reports.terminal import describe_cell

    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores
    settings = _settings(request.config, request.node.get_closest_marker("lossgate"))
    folder = Path(str(request.config.getoption("--lossgate-failures")))

    def run(cell: Cell) -> None:
        unwritten: list[str] = []
        try:
            failures = FailureFiles(folder, unwritten.append)
            result = run_cell(cell, settings)
            result, mended = hold_to_earlier(result, folder, settings.timeout, examples_of([cell]))
        except UsageError as error:
            pytest.fail(str(error), pytrace=False)
        failures(CellFinished(result, mended))
        request.config.stash[_EVIDENCE].tell(result, failures.replay(result), record_property)
        if result.record.counts_as(numbers_only=settings.numbers_only) is not Verdict.AGREE:
            whole = request.config.get_verbosity() > 0
            lines = describe_cell(result, failures.replay(result), whole=whole)
            pytest.fail("\n".join([*lines, *unwritten]), pytrace=False)

    return run
