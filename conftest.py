# SPDX-License-Identifier: Apache-2.0
"""Tests come in two tiers: those that a change is likely to break, and slow ones, of which CI runs
one of twenty slices. CONTRIBUTING.md says which test goes where.
"""

from collections import Counter
from zlib import crc32

import pytest

pytest_plugins = ["property_tests.cpu_seconds"]

_SLICES = "none", "all", "0/20 to 19/20"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        metavar="SLICE",
        default="all",
        type=_share,
        help=f"which slow tests to run beside the others: {', '.join(_SLICES)} (default: all)",
    )
    parser.addoption("--all", action="store_const", dest="slow", const=_share("all"), help="the same as --slow all")


def _share(text: str) -> tuple[int, int]:
    """Returns which slow tests run: a slice, and of how many. No test is in number 1 of 1."""
    number, of, slices = text.partition("/")
    whole = {"none": (1, 1), "all": (0, 1)}.get(text)
    share = whole or ((int(number), int(slices)) if of and number.isdigit() and slices.isdigit() else None)
    if share is None or not (whole or 0 <= share[0] < share[1]):
        raise pytest.UsageError(f"--slow={text}: expected one of {', '.join(_SLICES)}")
    return share


@pytest.hookimpl(trylast=True)  # plugins that add groups to names come before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(map(id, _left_out(items, *config.getoption("--slow"))))
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def _left_out(items: list[pytest.Item], number: int, slices: int) -> list[pytest.Item]:
    """Returns the slow tests that are not in a slice.

    A test stays in its slice whatever else there is.
    """
    found, seen = list[pytest.Item](), Counter[str]()
    for item in items:
        marker = item.get_closest_marker("slow")
        if marker is None:
            continue
        function = item.nodeid.partition("[")[0]
        seen[function] += 1
        is_witness = seen[function] <= marker.kwargs.get("but", 0)
        if not is_witness and crc32(item.nodeid.partition("@")[0].encode()) % slices != number:
            found.append(item)
    return found
