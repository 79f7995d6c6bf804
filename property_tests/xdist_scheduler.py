# SPDX-License-Identifier: Apache-2.0
"""Which tests one worker of pytest-xdist runs, and in which order workers take them.

Cases of a test share what takes long to make: decks, baselines, imports. If each worker took a
case at a time, each would make it. So all cases of a test stay together, except where they are
long and share nothing, or share it with the same case of another test.

The marker xdist_group does not do this: pytest-xdist 3.8 adds it to the names of tests in a way
that pytest 9.2 ignores.
"""

from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

BY_WORD = {
    "property_tests/test_specs.py": 0,
    "property_tests/meta/test_whole_sequences.py": 1,
    "property_tests/docs/test_code_blocks.py": 0,
}
"""Modules whose cases belong to a spec, with its decks, or to a page; and which word of their
parameters names it. It is a part of its own."""

SLOW = (
    "distributed_tests/test_wrappers.py::test_every_wrapper_and_head",
    "distributed_tests/test_faults.py::test_200_faults_in_a_row",
    "distributed_tests/test_kernels.py",
    "property_tests/kernels/test_on_a_fake_device.py",
    "property_tests/test_specs.py",
    "property_tests/meta/test_whole_sequences.py",
    "property_tests/docs/test_code_blocks.py",
    "distributed_tests/test_torchrun.py",
    "distributed_tests/test_wrappers.py",
    "property_tests/meta/test_compare.py",
    "property_tests/meta/test_plugin.py",
    "property_tests/kernels/test_compiled.py",
)
"""What takes longest begins first, so that no worker is left with it at the end."""


def part_of(nodeid: str) -> str:
    """Returns the name of the part to which a test belongs."""
    test, _, parameters = nodeid.partition("[")
    module = test.partition("::")[0]
    if module in BY_WORD and parameters:
        words = parameters.removesuffix("]").split("-")
        return f"{module}[{words[min(BY_WORD[module], len(words) - 1)]}]"
    return test


def in_order(items: list[pytest.Item]) -> None:
    """Puts the slow tests first."""
    items.sort(key=lambda item: next((i for i, name in enumerate(SLOW) if item.nodeid.startswith(name)), len(SLOW)))


class Parts(LoadScopeScheduling):
    """Gives workers whole parts."""

    def __init__(self, config: pytest.Config, log: Callable[..., Any]) -> None:
        config.option.loadscopereorder = False  # it begins with parts of many cases
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)
