# SPDX-License-Identifier: Apache-2.0
"""Records and pages that the tests of the HTML page share."""

from collections.abc import Sequence

import pytest
from page import real_records, synthetic_page

from lossgate.engine.cell_record import CellRecord
from lossgate.reports.page.entries import Page


@pytest.fixture(scope="session")
def real() -> Sequence[CellRecord]:
    """Returns the records of two cells that agree and of one that disagrees, verified just now."""
    return real_records(examples=3)


@pytest.fixture(scope="session")
def report(real: Sequence[CellRecord]) -> Page:
    """Returns 40 cells of three runs: one has wrong numbers, and one breaks a promise."""
    return synthetic_page(real, cells=40, runs=3)
