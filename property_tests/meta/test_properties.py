# SPDX-License-Identifier: Apache-2.0
"""A registered property becomes a cell of every candidate to which it applies."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import lossgate
from lossgate import Budgets, Layout, Property, UsageError
from lossgate.cases.case import Case
from lossgate.declaration.loading import load_candidates
from lossgate.dense_candidates import dense_candidate
from lossgate.engine import search
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.failure_files import read_failure, write_failure
from lossgate.engine.judge_again import replay_failure
from lossgate.engine.plan import plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES, Checked, find_property
from lossgate.worlds.base import Hang, WorldLost

NLL = replace(dense_candidate(SPECS["nll"], "logprobs"), supports={})
DPO = replace(dense_candidate(SPECS["dpo"], "logprobs"), supports={})
SHARDED = replace(dense_candidate(SPECS["nll"], "hidden"), axes=("dp", "tp"), budgets=Budgets(largest_tensor="vocab"))
SETTINGS = Settings(layouts=("single",), examples=4, rounds=1, shrink_calls=5)
TOO_FEW = "4 problems are too few for AGREE; raise --examples to 8 at least"


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
        with pytest.raises(UsageError, match=f"property\\('{name}'\\): another property has this name"):
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


def test_candidates_to_which_a_property_applies_are_held_to_it_in_their_cells() -> None:
    before = [cell.also for cell in plan([NLL, DPO], SETTINGS)]
    sums = lossgate.property("sums", applies=lambda candidate: candidate.spec.name == "nll")(nothing_wrong)
    cells = plan([NLL, DPO], SETTINGS)
    assert [str(cell) for cell in cells] == [
        "dense_nll_logprobs[agreement-single-float32]",
        "dense_dpo_logprobs[agreement-single-float32]",
    ]
    assert [cell.also for cell in cells] == [(*before[0], sums), before[1]]


def test_a_property_that_a_run_names_without_agreement_has_cells_of_its_own() -> None:
    lossgate.property("sums")(nothing_wrong)
    named = replace(SETTINGS, properties=("sums", "no-grad"))
    assert [str(cell) for cell in plan([NLL], named)] == [
        "dense_nll_logprobs[sums-single-float32]",
        "dense_nll_logprobs[no-grad-single-float32]",
    ]
    (cell,) = plan([NLL], replace(SETTINGS, properties=("sums", "agreement")))
    assert (str(cell.property), *map(str, cell.also)) == ("agreement", "sums")


def test_a_property_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown property 'no-grads'; did you mean 'no-grad'\?"):
        plan([NLL], replace(SETTINGS, properties=("no-grads",)))
    exempt = replace(NLL, exempt={"no-grads": "it trains"})
    with pytest.raises(UsageError, match=r"'dense_nll_logprobs': exempt=.*unknown property 'no-grads'; did you mean"):
        plan([exempt], SETTINGS)


def test_faults_of_a_property_make_the_cell_disagree() -> None:
    lossgate.property("small", remedy="take fewer")(always_wrong)
    settings = replace(SETTINGS, properties=("agreement", "small"), shrink_calls=60)
    result = run_cell(plan([NLL], settings)[0], settings)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    tokens = result.failure.problem.tokens
    assert tokens < 3
    assert result.failure.held_to == "small"
    assert result.record.symptoms == (f"{tokens} tokens are too many", "property small")
    assert result.reasons == (
        f"property small: {tokens} tokens are too many",
        "to do: take fewer",
        TOO_FEW,
    )
    assert (result.record.numbers, result.record.outcome, result.record.broken) == (
        "INCONCLUSIVE",
        "PROMISE BROKEN",
        ("small",),
    )


def test_that_a_cell_agrees_is_told_before_its_properties_are_checked() -> None:
    order = list[str]()

    def noted(case: Case) -> Checked:
        """Notes that it is checked."""
        order.append("property")
        return Checked()

    lossgate.property("small")(noted)
    cell = plan([NLL], replace(SETTINGS, properties=("agreement", "small")))[0]
    assert run_cell(cell, Settings(), lambda: order.append("agrees")).verdict is Verdict.AGREE
    assert order[0] == "agrees"
    assert {*order[1:]} == {"property"}


def test_a_candidate_is_not_held_to_a_property_from_which_it_is_exempt() -> None:
    lossgate.property("small")(always_wrong)
    exempt = replace(NLL, exempt={"small": "it likes few tokens"})
    cell = plan([exempt], replace(SETTINGS, properties=("agreement", "small")))[0]
    (found,) = run_cell(cell, SETTINGS).record.properties
    assert (found.name, found.exempt, found.problems, found.findings) == ("small", "it likes few tokens", 0, ())
    with pytest.raises(UsageError, match="nothing to verify"):
        plan([exempt], replace(SETTINGS, properties=("small",)))


def test_a_property_without_a_problem_that_fits_is_inconclusive() -> None:
    lossgate.property("never", fits=lambda case: False)(always_wrong)
    (cell,) = plan([NLL], replace(SETTINGS, properties=("never",)))
    result = run_cell(cell, SETTINGS)
    assert result.verdict is Verdict.INCONCLUSIVE
    said = f"none of the {len(result.cases)} problems that were tried says anything about property never"
    assert result.reasons == (f"{said}; raise --examples, or choose other layouts",)


def test_only_the_first_property_that_fails_is_made_small() -> None:
    """The others are reported with the problem on which they failed."""
    lossgate.property("first")(always_wrong)
    lossgate.property("second")(always_wrong)
    (cell,) = plan([NLL], replace(SETTINGS, properties=("agreement", "first", "second")))
    first, second = (result := run_cell(cell, SETTINGS)).record.properties
    assert result.failure is not None
    assert first.on == result.failure.problem.describe() != second.on
    assert (first.problems, second.problems) == (1, 1)
    names = ["property first", "property second", "property second"]
    *reasons, too_few = result.reasons
    assert [line.split(":")[0] for line in reasons] == names
    assert reasons[-1] == f"property second: on {second.on}"
    assert too_few == TOO_FEW


def test_a_property_that_fails_once_is_told_as_that() -> None:
    """Its problem is the failure of the cell, also if it did not fail when it was tried again."""
    wrong = iter([True])

    @lossgate.property("once")
    def once(case: Case) -> Checked:
        """It is wrong once."""
        return Checked(faults=("it is wrong",) * next(wrong, False))

    (cell,) = plan([NLL], replace(SETTINGS, properties=("agreement", "once")))
    result = run_cell(cell, SETTINGS)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    assert (result.failure.held_to, result.failure.unstable) == ("once", True)
    again = "the candidate is not deterministic: the same problem, run again, gave another result"
    assert result.reasons == ("property once: it is wrong", f"property once: {again}", TOO_FEW)


def test_a_hang_is_not_made_smaller_and_survives_the_loss_of_the_ranks() -> None:
    """Each further try would cost a time-out, and ranks that torchrun has launched can be lost."""

    @lossgate.property("hangs")
    def hangs(case: Case) -> Checked:
        """It hangs."""
        raise Hang("hang: rank 0 did not return")

    @lossgate.property("later")
    def later(case: Case) -> Checked:
        """It finds no ranks."""
        raise WorldLost("the ranks are gone")

    (cell,) = plan([NLL], replace(SETTINGS, properties=("agreement", "hangs", "later")))
    result = run_cell(cell, SETTINGS)
    assert result.failure is not None
    assert (result.failure.held_to, result.failure.failure, result.run.shrink_calls) == ("hangs", "Hang", 0)
    assert [one.name for one in result.record.properties] == ["hangs"]
    (alone,) = plan([NLL], replace(SETTINGS, properties=("agreement", "later")))
    with pytest.raises(WorldLost):
        run_cell(alone, SETTINGS)


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
    (candidate,) = load_candidates("lossgate.dense_candidates:dense_nll_logprobs")
    result = run_cell(Cell(candidate, Layout(), "float32", wrong), SETTINGS)
    assert result.failure is not None
    assert result.failure.symptoms == result.failure.faults
    file = write_failure(result, tmp_path)
    assert "harmful" in file.name
    again = replay_failure(read_failure(file))
    assert again.disagrees
    assert again.exact


def test_on_layouts_of_many_ranks_only_properties_of_ranks_are_checked_beside_agreement() -> None:
    few, many = (
        {
            str(cell.layout): {*map(str, cell.also)}
            for cell in plan([SHARDED], Settings(ranks=4, matrix="full", property_ranks=ranks))
        }
        for ranks in (2, 4)
    )
    assert few["dp=2"] == few["dp=2,tp=2"] == many["dp=4"] == many["dp=2"]
    assert few["dp=3"] == few["dp=4"] == few["tp=4"] == {"idle-rank", "reduction-order", "budgets"}
    assert few["dp=3"] < few["dp=2"]


def test_few_layouts_are_one_rank_and_those_that_split_most_axes_in_one_dtype() -> None:
    def checked(ranks: int) -> set[tuple[str, str]]:
        cells = plan([replace(SHARDED, dtypes=("bfloat16", "float32"))], Settings(ranks=ranks))
        return {(str(cell.layout), cell.dtype) for cell in cells if "no-grad" in map(str, cell.also)}

    alone = {("single", "bfloat16"), ("single", "float32")}
    assert checked(1) == alone
    assert checked(2) == {*alone, ("dp=2", "float32"), ("tp=2", "float32")}
    assert checked(4) == {*alone, ("dp=2,tp=2", "float32")}


@pytest.mark.parametrize(
    "settings",
    [
        Settings(layouts=("dp=3",), property_ranks=2),
        Settings(ranks=3, properties=("agreement", "no-grad"), property_ranks=2),
    ],
)
def test_what_a_run_names_is_checked_on_layouts_of_many_ranks(settings: Settings) -> None:
    also = {str(cell.layout): {*map(str, cell.also)} for cell in plan([SHARDED], settings)}
    assert "no-grad" in also["dp=3"]
