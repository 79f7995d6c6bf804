# SPDX-License-Identifier: Apache-2.0
"""A run finds bugs that were written without a look at how properties are checked."""

import pytest

from kernel_bank.second_property_bugs import KEPT, SECOND_BUGS
from lossgate.engine.cell_record import Verdict
from lossgate.engine.plan import plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.properties import PROPERTIES

AT_TIMES = {"accuracy of training"}
"""What runs find with some seeds alone: no problem need have an accuracy that is not 0."""


def test_every_property_has_a_second_bug() -> None:
    assert {"agreement"} | {bug.property for bug in SECOND_BUGS.values()} == set(PROPERTIES)
    assert set(SECOND_BUGS) >= AT_TIMES


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", [name for name in SECOND_BUGS if name not in AT_TIMES])
def test_a_run_finds_it(name: str) -> None:
    bug = SECOND_BUGS[name]
    KEPT.clear()
    settings = Settings(layouts=(bug.layout,), properties=("agreement", bug.property), shrink_calls=0)
    (cell,) = plan([bug.candidate], settings)
    assert [held_to.name for held_to in cell.also] == [bug.property]
    assert run_cell(cell, settings).record.verdict is Verdict.DISAGREE
