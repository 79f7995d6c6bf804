# SPDX-License-Identifier: Apache-2.0
"""A registered property becomes a cell of every candidate to which it applies."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import lossgate
from lossgate import Layout, Property, UsageError
from lossgate.bank.dense_candidates import dense_candidate
from lossgate.cases.case import Case
from lossgate.declaration.loading import load_candidates
from lossgate.engine import search
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.failure_files import read_failure, write_failure
from lossgate.engine.plan import plan
from lossgate.engine.replay import replay_failure
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES, Checked, find_property

NLL = replace(dense_candidate(SPECS["nll"], "logprobs"), supports={})
DPO = replace(dense_candidate(SPECS["dpo"], "logprobs"), supports={})
SETTINGS = Settings(layouts=("single",), examples=4, rounds=1, shrink_calls=5)


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    """Forgets the properties that a test registers."""
    before = dict(PROPERTIES)
    yield
    PROPERTIES.clear()
    PROPERTIES.update(before)


def nothing_wrong(case: Case) -> Checked:
    """The check finds nothing, e.g. no fault.

    It says no more than that.
    """
    return Checked()


def always_wrong(case: Case) -> Checked:
    """The check finds a fault on every problem."""
    return Checked(comparisons=case.comparisons, faults=(f"{case.problem.tokens} tokens are too many",))


def test_a_property_is_registered_with_one_line_of_documentation() -> None:
    made = lossgate.property("harmless")(nothing_wrong)
    assert isinstance(made, Property)
    assert PROPERTIES["harmless"] is made is find_property("harmless")
    assert (str(made), made.summary, made.runs) == ("harmless", "The check finds nothing, e.g. no fault", 1)
    assert made.check is nothing_wrong
    assert made.applies(NLL)
    assert made.applies(DPO)


def test_a_property_says_to_whom_it_applies_and_what_it_costs() -> None:
    made = lossgate.property("sums", applies=lambda candidate: candidate.spec.name == "nll", runs=3)(nothing_wrong)
    assert made.applies(NLL)
    assert not made.applies(DPO)
    assert made.runs == 3


def test_a_second_property_of_the_same_name_is_refused() -> None:
    first = lossgate.property("harmless")(nothing_wrong)
    for name in ("harmless", "agreement"):
        with pytest.raises(UsageError, match=f"property\\('{name}'\\): there is one of that name already"):
            lossgate.property(name)(always_wrong)
    assert PROPERTIES["harmless"] is first


@pytest.mark.parametrize("docstring", [None, "", "   \n  "])
def test_a_check_without_a_docstring_is_refused(docstring: str | None) -> None:
    def check(case: Case) -> Checked:
        return Checked()

    check.__doc__ = docstring
    with pytest.raises(UsageError, match=r"property\('silent'\): the check has no docstring; say in its first line"):
        lossgate.property("silent")(check)
    assert "silent" not in PROPERTIES


def test_a_misspelt_name_gives_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown property 'agrement'; did you mean 'agreement'\?"):
        find_property("agrement")


def test_a_property_becomes_a_cell_of_the_candidates_to_which_it_applies() -> None:
    assert [str(cell) for cell in plan([NLL, DPO], SETTINGS)] == [
        "dense_nll_logprobs[agreement-single-float32]",
        "dense_dpo_logprobs[agreement-single-float32]",
    ]
    sums = lossgate.property("sums", applies=lambda candidate: candidate.spec.name == "nll")(nothing_wrong)
    cells = plan([NLL, DPO], SETTINGS)
    assert [str(cell) for cell in cells] == [
        "dense_nll_logprobs[agreement-single-float32]",
        "dense_nll_logprobs[sums-single-float32]",
        "dense_dpo_logprobs[agreement-single-float32]",
    ]
    assert cells[1].property is sums


def test_faults_of_a_property_make_its_cell_disagree() -> None:
    lossgate.property("small")(always_wrong)
    agreement, small = plan([NLL], SETTINGS)
    assert run_cell(agreement, SETTINGS).verdict is not Verdict.DISAGREE
    result = run_cell(small, SETTINGS)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    assert result.reasons == result.failure.findings == (f"{result.failure.problem.tokens} tokens are too many",)


def test_a_property_without_faults_does_not_disagree() -> None:
    harmless = lossgate.property("harmless")(nothing_wrong)
    result = run_cell(Cell(NLL, Layout(), "float32", harmless), SETTINGS)
    assert result.verdict is not Verdict.DISAGREE
    assert not result.failure


def test_a_file_that_is_imported_twice_may_register_its_property_again() -> None:
    lossgate.property("harmless")(nothing_wrong)
    again = lossgate.property("harmless", runs=2)(nothing_wrong)
    assert PROPERTIES["harmless"] is again


def test_only_a_property_that_needs_adequacy_asks_for_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with one problem agrees with a property of its own, and not with the reference.

    One problem has one reduction, and so cannot tell it from the other.
    """
    monkeypatch.setattr(search, "choose", lambda placed, *_: placed[:1])
    settings = replace(SETTINGS, examples=1)
    own = lossgate.property("harmless", runs=0)(nothing_wrong)
    nll = replace(NLL, supports={"reduction": lossgate.ANY})
    assert run_cell(Cell(nll, Layout(), "float32", own), settings).verdict is Verdict.AGREE
    assert run_cell(Cell(nll, Layout(), "float32"), settings).verdict is Verdict.INCONCLUSIVE


def test_a_failure_of_another_property_replays_as_what_it_is(tmp_path: Path) -> None:
    """Replay must not hold the candidate to agreement, which it keeps."""
    wrong = lossgate.property("harmful")(always_wrong)
    (candidate,) = load_candidates("lossgate.bank.dense_candidates:dense_nll_logprobs")
    result = run_cell(Cell(candidate, Layout(), "float32", wrong), SETTINGS)
    assert result.failure is not None
    assert result.failure.symptoms == result.failure.faults
    file = write_failure(result, tmp_path)
    assert "harmful" in file.name
    again = replay_failure(read_failure(file))
    assert again.disagrees
    assert again.exact
