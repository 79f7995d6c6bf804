# SPDX-License-Identifier: Apache-2.0
"""Every built-in reference holds to what is asked of users' ones.

The tests of a spec run in one worker, where ``property_tests/test_specs.py`` has drawn its decks.
"""

import pytest

from lossgate.losses import SPECS
from lossgate.spec_check.check import CHECKS, check_spec

QUICKEST = "value"
"""It stays in the first tier."""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(SPECS, key=QUICKEST.__ne__)],
)
def test_a_built_in_reference_holds(name: str) -> None:
    outcomes = list(check_spec(SPECS[name]))
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    assert [outcome.check for outcome in outcomes] == list(CHECKS)
