# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

import os
from collections.abc import Callable, Iterator

import jaxtyping
import pytest
import torch

from lossgate import SimulatedRanks
from lossgate.worlds import SimulatedWorld
from property_tests.hypothesis_profiles import load_profile

load_profile()  # before modules with tests are imported: settings of a test start from the profile

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

jaxtyping.config.update("jaxtyping_disable", True)  # it makes the references three times slower


@pytest.fixture
def shape_checks() -> Iterator[None]:
    """Has the references check the shapes that they are given and that they return."""
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def make_world() -> Iterator[Callable[..., SimulatedWorld]]:
    """Returns ``make_world("tp=2", timeout=...)``, which makes a simulated world.

    It is closed after the test.
    """
    with SimulatedRanks() as ranks:
        yield ranks.world
