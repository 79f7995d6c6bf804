# SPDX-License-Identifier: Apache-2.0
"""What the tests on processes share."""

from collections.abc import Iterator

import pytest
import torch

from lossgate.worlds.pool import close_pool


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_pool()
