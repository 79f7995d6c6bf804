# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

import gc
import os
from collections.abc import Callable, Iterator
from zlib import crc32

import jaxtyping
import pytest
import torch

from lossgate import SimulatedRanks
from lossgate.adequacy.deck import deck_key
from lossgate.diagnosis.cause import Diagnosis
from lossgate.worlds import SimulatedWorld
from property_tests.hypothesis_profiles import load_profile

load_profile()  # before modules with tests are imported: settings of a test start from the profile

os.environ["LOSSGATE_CACHE"] = ""  # tests change code in memory: what they find must not be kept

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

jaxtyping.config.update("jaxtyping_disable", True)  # it makes the references three times slower


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has cells of ``lossgate.suite`` that share a deck run in one worker, one after the other."""
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("lossgate") is not None:
            cell = item.callspec.params["lossgate_cell"]
            deck = crc32(deck_key(cell.candidate, cell.dtype).encode())
            item.add_marker(pytest.mark.xdist_group(f"deck {deck:08x}"))


def pytest_collection_finish() -> None:
    """Has Python's collector of garbage pass over what is there now, and stays there: modules and
    tests.
    """
    gc.collect()
    gc.freeze()


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


_OF_PAGES = "test_code_blocks.py"


@pytest.fixture(autouse=True)
def no_diagnosis(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for no cause of a disagreement in this process, but in the tests of causes and of what
    the docs show.

    It takes seconds for a cell, and hundreds of mutants disagree here.
    """
    if "diagnosis" not in request.path.parts and request.path.name != _OF_PAGES:
        monkeypatch.setattr("lossgate.engine.run_cell.diagnose", lambda *given, **more: Diagnosis())


@pytest.fixture(autouse=True)
def no_known_mistakes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not ask whether problems show the known mistakes, but in the tests of that and of what
    the docs show.

    It makes half as many cells in the same time, and nearly all of them ask the same.
    """
    if request.path.name not in ("test_known_mistakes.py", "test_choice.py", _OF_PAGES):
        monkeypatch.setattr("lossgate.engine.search.Search.asks_mistakes", False)
