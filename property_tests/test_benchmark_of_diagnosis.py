# SPDX-License-Identifier: Apache-2.0
"""The script that measures diagnoses knows names that are equal in effect from wrong ones."""

import diagnosis as benchmark
import pytest

from kernel_bank.bugs import cross_entropy_with
from kernel_bank.cross_entropy import STYLES
from lossgate import Layout
from lossgate.diagnosis.cause import Cause, Diagnosis
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.worlds import make_world

SETTINGS = Settings(shrink_calls=20)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "scope", "explains"),
    [
        ("valid_tokens is one too many", "", True),
        ("valid_tokens is one too few", "", False),
        ("valid_tokens is one too many", ", in loss alone", True),
        ("a name that nothing has", "", False),
    ],
)
def test_a_name_is_equal_in_effect_if_it_explains_more_problems(name: str, scope: str, explains: bool) -> None:
    cell = Cell(cross_entropy_with(STYLES["float32"][0], "denominator n+1"), Layout(cp=2), "float32")
    failing = next(case.problem for case in run_cell(cell, SETTINGS).cases if not case.agrees)
    said = Diagnosis(causes=(Cause(name=name, words=""),), scope=scope, problems=9)
    world = make_world("simulated", cell.layout)
    assert benchmark.explains_more(said, cell, failing, world, SETTINGS) is explains
    world.close()
