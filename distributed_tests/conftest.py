# SPDX-License-Identifier: Apache-2.0
"""All tests here share the processes of one pool, and so run in one worker of pytest-xdist."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lossgate.worlds.pool import close_pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_pool()
