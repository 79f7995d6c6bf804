# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that prints the CPU seconds of each file of tests, with those of the processes
that its tests start: ``pytest --cpu-seconds``.

What a test costs is seconds of a core: wall time tells what else the machine does. The processes of
a pool serve several files; what they do while a test runs is that test's.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_SHOWN = 15
"""Files that are named; the others are added up."""
_KEY = "cpu seconds"
_START = "(to start and to find the tests)"
_BY_FILE = Counter[str]()
"""In a worker: of the files whose tests it has run. In the process that prints: of all."""


def seconds_of_tree(pid: int) -> float:
    """Returns the CPU seconds of a process and of all that it has started, ended or not.

    They are those of this process alone where there is no ``/proc``.
    """
    try:
        # after the name, which may hold spaces: utime, stime, and those of children that have ended
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended meanwhile: its parent has its times
        return sum(os.times()[:4]) if pid == os.getpid() else 0.0
    own = sum(map(int, times)) / _TICKS
    return own + sum(seconds_of_tree(int(child)) for task in children for child in task)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", action="store_true", help="print the CPU seconds of each file of tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    if not item.config.getoption("--cpu-seconds"):
        return (yield)
    before = seconds_of_tree(os.getpid())
    try:
        return (yield)
    finally:
        _BY_FILE[item.nodeid.partition("::")[0]] += seconds_of_tree(os.getpid()) - before


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--cpu-seconds") and not session.config.getoption("collectonly"):
        _BY_FILE[_START] += seconds_of_tree(os.getpid())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = dict(_BY_FILE)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _BY_FILE.update(getattr(node, "workeroutput", {}).get(_KEY, {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _BY_FILE:
        return
    terminalreporter.section("CPU seconds of files, processes that tests start included")
    for file, seconds in _BY_FILE.most_common(_SHOWN):
        terminalreporter.write_line(f"{seconds:7.1f}  {file}")
    others = sorted(_BY_FILE.values())[:-_SHOWN]
    terminalreporter.write_line(f"{sum(others):7.1f}  {len(others)} others")
    terminalreporter.write_line(f"{_BY_FILE.total():7.1f}  in all")
