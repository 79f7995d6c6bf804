# SPDX-License-Identifier: Apache-2.0
"""Tests of what the gate says of a cell that was not held to a property of the policy."""

from typing import Any

import pytest

from lossgate.engine.cell_record import CellRecord, PropertyRecord
from lossgate.engine.settings import PROFILES
from lossgate.gate.gate_verdict import GateReason
from property_tests.meta.gate_decisions.decided import RULES, Gate, only, reported
from property_tests.meta.made_evidence import cell, whole_run

KEPT = PropertyRecord(name="no-grad", problems=2)
OTHER = PropertyRecord(name="microbatches", problems=2)
OWN = PropertyRecord(name="my-property", problems=2)
CI = {**PROFILES["ci"].values, "matrix": "full", "property_ranks": 3}
POLICY = RULES.replace('"single", "tp=2"', '"tp=8"') + 'keeps = ["agreement", "no-grad"]\n'
ALONE = cell(layout="tp=8", property="device", needs_adequacy=False)


def small(*found: PropertyRecord, **changes: Any) -> CellRecord:
    return cell(properties=found, **changes)


def large(*found: PropertyRecord) -> CellRecord:
    return cell(layout="tp=8", properties=found)


RANKS = (
    "its run checks it on at most 3 ranks on an axis. Raise property_ranks = 3 in pyproject.toml, or leave such "
    "layouts out of the rule"
)
FEW = "its run checks it on few layouts. Verify with --matrix full, or leave such layouts and dtypes out of the rule"
DOES_NOT_APPLY = "it does not apply to this candidate. Leave it out of keeps, or give the candidate its own rule"
OLD = "the evidence does not say why. Verify again with this version of lossgate"
OTHERS_WERE = "the evidence does not say why: other cells of the candidate were held to it. Verify all of them again"

CASES: dict[str, tuple[list[CellRecord], dict[str, Any], str]] = {
    "exempt": (
        [large(PropertyRecord(name="no-grad", problems=0, exempt="it trains"))],
        CI,
        "the candidate is exempt, because it trains. Remove the exemption, or the property from the policy",
    ),
    "no problem says anything": (
        [large(PropertyRecord(name="no-grad", problems=0))],
        CI,
        "none of its 8 problems says anything about it; raise --examples",
    ),
    "too many ranks": ([small(KEPT), large()], CI, RANKS),
    "too many ranks, and no other cells": ([large()], CI, RANKS),
    "too many ranks, and other candidates": ([small(OTHER, candidate="other"), large()], CI, RANKS),
    "few layouts": ([cell(layout="single", properties=(KEPT,)), large()], {**CI, "matrix": "covering"}, FEW),
    "not held to it on one rank either": (
        [cell(layout="single", properties=(OTHER,)), large()],
        {**CI, "matrix": "covering"},
        DOES_NOT_APPLY,
    ),
    "not held to it on few ranks either": ([small(OTHER), large()], CI, DOES_NOT_APPLY),
    "few ranks": ([small(OTHER), large(OTHER)], {**CI, "property_ranks": 8}, DOES_NOT_APPLY),
    "layouts that are named": ([large(OTHER)], {**CI, "layouts": ["tp=8"]}, DOES_NOT_APPLY),
    "held to it elsewhere": ([small(KEPT), large(OTHER)], {**CI, "property_ranks": 8}, OTHERS_WERE),
    "other properties are named": (
        [large()],
        {**CI, "properties": ["agreement", "device"]},
        (
            "its run checked only the properties agreement, device. Verify with --property no-grad in addition, or "
            "name none (--property, or properties in pyproject.toml)"
        ),
    ),
    "a cell of its own": (
        [ALONE],
        {**CI, "properties": ["device", "no-grad"]},
        (
            "this cell was verified for device alone; only cells of agreement are held to further "
            "properties. Verify with --property agreement --property no-grad, and write "
            'properties = ["agreement"] in the rule'
        ),
    ),
    "no settings": ([large()], {}, OLD),
    "an old version": ([large()], {"examples": 12}, OLD),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gate_says_why_a_cell_was_not_held_to_a_property(gate: Gate, case: str) -> None:
    cells, settings, why = CASES[case]
    assert gate.decide(whole_run([large(KEPT)], settings=settings), rules=POLICY).passes
    *_, (kind, message) = reported(gate.decide(whole_run(cells, settings=settings), rules=POLICY))
    assert (kind, message) == (GateReason.WEAK, f"it was not held to property no-grad, as the policy asks: {why}")


def test_a_property_of_users_may_not_have_been_loaded(gate: Gate) -> None:
    cells = [small(OWN, candidate="other"), large(), small(OTHER)]
    _, message = only(gate.decide(whole_run(cells, settings=CI), rules=POLICY.replace("no-grad", "my-property")))
    assert "it does not apply to this candidate, or the run did not load the file that registers it. Leave" in message
