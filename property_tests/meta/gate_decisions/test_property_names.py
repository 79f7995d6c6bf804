# SPDX-License-Identifier: Apache-2.0
"""Tests of the names of properties in a policy: a misspelt one is an error of the policy."""

from collections.abc import Sequence

import pytest

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import CellRecord, PropertyRecord
from lossgate.gate.gate_verdict import GateCode, GateReason
from lossgate.gate.kept_properties import BUILT_IN
from lossgate.properties import PROPERTIES
from property_tests.meta.gate_decisions.decided import CELLS, RULES, Gate, reported
from property_tests.meta.made_evidence import cell, disagreeing, whole_run


def keeping(*names: str) -> str:
    """Returns a policy that has names of properties in ``keeps``, each on its own line."""
    return RULES + "keeps = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"


def held_to(name: str, problems: int = 2) -> Sequence[CellRecord]:
    found = (PropertyRecord(name=name, problems=problems),)
    return [cell(properties=found), cell(layout="tp=2", properties=found)]


def test_the_built_in_names_are_those_of_the_registry() -> None:
    own = [one.name for one in PROPERTIES.values() if one.check.__module__.startswith("lossgate.")]
    assert list(BUILT_IN) == own


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temperatur", "did you mean 'temperature'? (expected one of agreement, bad-inputs, "),
        ("nograd", "did you mean 'no-grad'?"),
        ("my-propperty", "did you mean 'my-property'?"),
        ("sunshine", "expected one of agreement, "),
    ],
)
def test_a_misspelt_property_is_an_error_with_the_line_of_its_rule(gate: Gate, name: str, hint: str) -> None:
    rules = keeping("my-property", name)
    with pytest.raises(UsageError) as error:
        gate.decide(whole_run(held_to("my-property")), rules=rules)
    line = rules.splitlines().index("[[require]]") + 1
    message = f"gate.toml:{line}: [[require]] keeps={name!r}: neither lossgate nor the evidence has "
    assert message + f"such a property; {hint}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_property_of_users_is_known_if_evidence_names_it(gate: Gate) -> None:
    assert gate.decide(whole_run(held_to("my-property")), rules=keeping("my-property")).passes
    for records in (
        whole_run(held_to("my-property", problems=0)),
        whole_run(CELLS, settings={"properties": ["agreement", "my-property"]}),
        whole_run([*CELLS, cell(property="my-property", needs_adequacy=False)]),
    ):
        verdict = gate.decide(records, rules=keeping("my-property"))
        assert {kind for kind, _ in reported(verdict)} == {GateReason.WEAK}


def test_a_property_of_users_hides_no_disagreement(gate: Gate) -> None:
    """A cell that disagrees is held to nothing further, so that its evidence names none."""
    cells = [disagreeing(), disagreeing(layout="tp=2")]
    assert gate.decide(whole_run(cells), rules=keeping("my-property")).code is GateCode.DISAGREE
    assert gate.decide([], rules=keeping("my-property")).code is GateCode.CLOSED
