# SPDX-License-Identifier: Apache-2.0
"""Every built-in reference holds to what is asked of users' ones.

The tests of a spec run in one worker, where ``property_tests/test_specs.py`` has drawn its decks.
"""

import pytest

from lossgate.losses import SPECS
from lossgate.spec_check.check import CHECKS, check_spec
from lossgate.spec_check.subject import Subject, ordinary_problems
from lossgate.spec_check.trial_run import judged, on_ranks

EACH_SPEC = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(SPECS)]
)
FEW = 6
"""Problems of each head, where ``lossgate check-spec`` draws 40."""


@EACH_SPEC
def test_a_built_in_reference_holds_on_a_few_problems(name: str) -> None:
    """Every check but those that run a kernel, which take longest."""
    subject = Subject(SPECS[name], tuple(ordinary_problems(SPECS[name], FEW)))
    quick = [check for check in CHECKS if check.find not in (judged, on_ranks)]
    assert {check.name: found for check in quick if (found := list(check.find(subject)))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPECS, key="value".__ne__))  # the quickest stays in the first tier
def test_a_built_in_reference_holds(name: str) -> None:
    outcomes = list(check_spec(SPECS[name]))
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    assert [outcome.check for outcome in outcomes] == list(CHECKS)
