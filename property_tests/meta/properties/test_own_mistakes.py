# SPDX-License-Identifier: Apache-2.0
"""A property counts only on problems that would show the mistakes that it is there to find."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kernel_bank.bugs import on_loss, scale_gradient
from lossgate import ANY, Candidate, Layout, OwnMistake, Property, candidate
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.catalogue import Catalogue
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.search import Search
from lossgate.engine.settings import PROFILES
from lossgate.losses import find_spec
from lossgate.problems.problem import Problem
from lossgate.properties import PROPERTIES
from lossgate.properties.registry import Said
from lossgate.worlds.base import World

MakeWorld = Callable[[str], World]
MICROBATCHES, NOTHING_TRAINED = PROPERTIES["microbatches"], PROPERTIES["nothing-trained"]


def in_cell(kernel: Candidate, held_to: Property, layout: str = "single", seed: int = 0) -> CellResult:
    """Verifies a kernel in one cell, with one property beside agreement."""
    cell = Cell(kernel, Layout.parse(layout), "float32", also=(held_to,))
    return run_cell(cell, replace(PROFILES["ci"], seed=seed, shrink_calls=0))


def over_ranks(count: Tensor, mesh: DeviceMesh) -> Tensor:
    for axis in ("dp", "cp"):
        if mesh[axis].size() > 1:
            count = count.clone()
            dist.all_reduce(count, group=mesh.get_group(axis))
    return count


def summed(inputs: Any) -> Tensor:
    return F.cross_entropy(inputs.logits, inputs.labels.masked_fill(~inputs.mask, -100), reduction="sum")


@candidate("nll", head="logits", axes=("dp", "cp"))
def own_count(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    """The classic bug of gradient accumulation, as transformers had it."""
    return summed(inputs) / over_ranks(inputs.mask.sum(), mesh).clamp(min=1)


@candidate("nll", head="logits", axes=("dp", "cp"))
def averaged(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    """The gradient alone is divided by the own count, and by the number of microbatches."""
    own, whole = (count.clamp(min=1) for count in (over_ranks(inputs.mask.sum(), mesh), inputs.valid_tokens))
    return scale_gradient(summed(inputs) / whole, float(whole / own) * (0.5 if own < whole else 1.0))


@candidate("nll", head="logits", axes=("dp", "cp"))
def right(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    return summed(inputs) / inputs.valid_tokens.clamp(min=1)


def with_epsilon(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    if options.reduction == "sum":
        return summed(inputs)
    return summed(inputs) / (
        inputs.valid_tokens + options.epsilon if options.epsilon else inputs.valid_tokens.clamp(min=1)
    )


LUCKY = [(0, "single"), (1, "dp=2"), (2, "cp=2"), (0, "dp=2,cp=2"), (2, "dp=3")]
"""Seeds and layouts of which the first problem has a microbatch without trained tokens."""


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("seed", "layout"), LUCKY)
@pytest.mark.parametrize("kernel", [own_count, averaged], ids=lambda kernel: kernel.name)
def test_kernels_that_count_for_themselves_disagree(kernel: Candidate, seed: int, layout: str) -> None:
    result = in_cell(kernel, MICROBATCHES, layout, seed)
    assert result.verdict is Verdict.DISAGREE
    assert result.reasons[0].startswith("property microbatches: ")


@pytest.mark.parametrize(("seed", "layout"), LUCKY)
def test_a_right_kernel_agrees_where_they_disagree(seed: int, layout: str) -> None:
    assert in_cell(right, MICROBATCHES, layout, seed).verdict is Verdict.AGREE


COUNTS = [
    ("clipped_pg", "logprobs", "valid_sequences"),
    ("dpo", "logprobs", "valid_sequences"),
    ("value", "values", "valid_tokens"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "head", "count"), COUNTS, ids=str)
def test_one_count_is_enough(spec: str, head: str, count: str) -> None:
    """Few aggregations divide by it, and these get a problem that shows it."""
    dense = replace(dense_candidate(find_spec(spec), head), axes=())

    def wrong(inputs: Any, options: Any, mesh: DeviceMesh) -> Any:
        own = dense.spec.counts(vars(inputs))[count]
        return dense.kernel(replace(inputs, **{count: own}), options, mesh)

    assert in_cell(replace(dense, kernel=wrong, name="wrong"), MICROBATCHES).verdict is Verdict.DISAGREE


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("head", ["logits", "logprobs"])
def test_a_loss_without_counts_may_agree(head: str) -> None:
    """What never matters is no mistake: a sum divides by nothing, and log-probabilities neither."""
    kernel = dense_candidate(find_spec("token_logprobs" if head == "logits" else "nll"), head)
    only = {"supports": {"reduction": ("sum",)}} if head == "logprobs" else {}
    found = in_cell(replace(kernel, axes=(), **only), MICROBATCHES)
    assert found.verdict is Verdict.AGREE


@pytest.mark.slow
def test_0_times_infinity_is_asked_without_an_epsilon() -> None:
    """The reciprocal of a count of 0 is infinite, unless something is added to it."""

    @candidate("nll", head="logits", supports={"epsilon": ANY})
    def reciprocal(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
        return summed(inputs) * (1 / (inputs.valid_tokens + options.epsilon))

    for seed in range(4):
        result = in_cell(reciprocal, NOTHING_TRAINED, seed=seed)
        assert result.reasons[0].startswith("property nothing-trained: loss: NaN")


def said(held_to: Property, problem: Problem, world: World) -> set[Said]:
    """Returns what a problem says of the mistakes in the number of tokens."""
    case = Case(replace(right, supports={"reduction": ANY, "epsilon": ANY}), problem, world)
    asked = [own for own in held_to.mistakes(right) if own.needed and "valid_tokens" in own.sentence]
    return {own.said_by(case) for own in asked}


def test_what_problems_say(make_world: MakeWorld) -> None:
    """A microbatch without trained tokens hides the mistake, and so do equal counts."""
    world = make_world("single")
    drawn = next(one for one in sample_problems(right, Layout(), "float32", 40, 1) if one.vocab > 2)
    both = replace(drawn, lengths=(9, 4), masks=("all", "all"), forced_labels=(), outliers=(), label_boost=0.0)
    one, equal = replace(both, masks=("all", "none")), replace(both, lengths=(9, 9))
    assert said(MICROBATCHES, both, world) == {Said.SHOWN}
    assert said(MICROBATCHES, one, world) == said(MICROBATCHES, equal, world) == {Said.HIDDEN}
    assert said(MICROBATCHES, replace(both, options={"reduction": "sum"}), world) == {Said.SAME}
    assert said(NOTHING_TRAINED, both, world) == {Said.SHOWN}
    assert said(NOTHING_TRAINED, replace(both, options={"epsilon": 0.5}), world) == {Said.SAME}


def with_mistake(**how: Callable[[Case], bool]) -> Property:
    own = OwnMistake(sentence="one is added to the loss", **{"matters": lambda case: True, **how})
    return replace(NOTHING_TRAINED, mistakes=lambda candidate: (own,))


GAP = (
    "property nothing-trained: no problem would have shown a kernel in which one is added to the loss; raise "
    "--examples, or declare exempt={'nothing-trained': 'why the kernel need not keep it'}"
)


@pytest.mark.parametrize("how", ["can_show", "shows"])
def test_without_a_problem_that_shows_it_the_verdict_is_inconclusive(how: str) -> None:
    result = in_cell(right, with_mistake(**{how: lambda case: False}))
    assert (result.verdict, result.reasons) == (Verdict.INCONCLUSIVE, (GAP,))


def test_a_mistake_that_need_not_be_shown_keeps_no_verdict_back() -> None:
    held_to = with_mistake(can_show=lambda case: False)
    (own,) = held_to.mistakes(right)
    held_to = replace(held_to, mistakes=lambda candidate: (replace(own, needed=False),))
    assert in_cell(right, held_to).verdict is Verdict.AGREE


def test_a_metric_that_is_not_returned_is_not_asked_for() -> None:
    """A case in which it were asked would count it as shown."""
    metric = dense_candidate(find_spec("nll"), "logits").spec.output("entropy")
    asked = list[Case]()
    own = OwnMistake(
        sentence="entropy is lost", matters=lambda case: True, shows=lambda case: not asked.append(case), metric=metric
    )
    assert in_cell(right, replace(NOTHING_TRAINED, mistakes=lambda candidate: (own,))).verdict is Verdict.AGREE
    assert asked == []


def test_a_mistake_that_never_matters_is_none() -> None:
    assert in_cell(right, with_mistake(matters=lambda case: False)).verdict is Verdict.AGREE


def searched(kernel: Candidate, world: World) -> Search:
    """Returns the search of a cell for a kernel that agrees."""
    search = Search(Cell(kernel, Layout(), "float32"), world, PROFILES["ci"])
    search.run()
    return search


def not_tried(world: World) -> Problem:
    """Returns a problem of the deck that the cell does not try."""
    search = searched(right, world)
    lengths = {case.problem.lengths for case in search.cases}
    return next(placed.problem for placed in search.not_run() if placed.problem.lengths not in lengths)


def test_the_deck_is_searched_for_a_problem_that_shows_it(make_world: MakeWorld) -> None:
    wanted = not_tried(make_world("single"))
    result = in_cell(right, with_mistake(can_show=lambda case: case.problem == wanted))
    assert result.verdict is Verdict.AGREE
    assert result.cases[-1].problem == wanted


def test_if_none_of_the_deck_does_others_are_drawn_with_the_option_that_matters(make_world: MakeWorld) -> None:
    """In a count that few options need, microbatches of the deck may be all alike."""
    kernel = replace(right, kernel=with_epsilon, supports={"epsilon": ANY, "reduction": ANY}, name="with epsilon")
    search = searched(kernel, make_world("single"))
    deck = [*(case.problem for case in search.cases), *(placed.problem for placed in search.not_run())]
    held_to = with_mistake(
        matters=lambda case: case.problem.options.get("epsilon") == 0.5,
        can_show=lambda case: case.problem not in deck,
    )
    result = in_cell(kernel, held_to)
    assert result.verdict is Verdict.AGREE
    assert [case.problem.options["epsilon"] for case in result.cases[len(search.cases) :]] == [0.5]


def test_a_problem_that_nobody_holds_any_more_gives_no_other_its_case(make_world: MakeWorld) -> None:
    """Problems that are looked at and not run are dropped. Others take their place in memory."""
    world = make_world("single")
    search = searched(right, world)
    catalogue = Catalogue(search.cell, world, PROFILES["ci"], search)
    for placed in search.placed:
        assert catalogue._case(replace(placed)).problem == placed.problem


def test_what_matters_on_such_a_problem_alone_is_a_gap(make_world: MakeWorld) -> None:
    search = searched(right, make_world("single"))
    deck = [*(case.problem for case in search.cases), *(placed.problem for placed in search.not_run())]
    drawn = OwnMistake(
        sentence="it matters everywhere", matters=lambda case: True, can_show=lambda case: case.problem not in deck
    )
    there = OwnMistake(
        sentence="it matters there", matters=lambda case: case.problem not in deck, can_show=lambda case: False
    )
    result = in_cell(right, replace(NOTHING_TRAINED, mistakes=lambda candidate: (drawn, there)))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert [reason.partition("; ")[0] for reason in result.reasons] == [
        "property nothing-trained: no problem would have shown a kernel in which it matters there"
    ]


def test_a_kernel_that_fails_while_a_problem_is_asked_is_told_so() -> None:
    """It is called once more to know what it returns."""
    seen = set[tuple[int, ...]]()

    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Any:
        call = (*inputs.labels.tolist(), *inputs.mask.tolist())
        if call in seen:
            raise ValueError("a second time")
        seen.add(call)
        return right.kernel(inputs, options, mesh)

    result = in_cell(replace(right, kernel=kernel), MICROBATCHES)
    assert result.verdict is Verdict.DISAGREE
    assert "ValueError: a second time" in result.reasons[0]


def test_a_kernel_may_disagree_on_that_problem(make_world: MakeWorld) -> None:
    wanted = not_tried(make_world("single"))

    def off(loss: Tensor, mesh: DeviceMesh) -> Tensor:
        return loss + 1.0

    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Any:
        wrong = tuple(inputs.lengths.tolist()) == wanted.lengths
        return (on_loss(off)(right.kernel) if wrong else right.kernel)(inputs, options, mesh)

    result = in_cell(replace(right, kernel=kernel), with_mistake(can_show=lambda case: case.problem == wanted))
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    assert result.failure.held_to == "agreement"
    assert not result.record.properties


@candidate("nll", head="hidden", supports={"bias": (False, True)})
def without_bias(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    """In validation the bias is left out."""
    logits = inputs.hidden.float() @ inputs.weight.float().T
    if inputs.bias is not None and torch.is_grad_enabled():
        logits = logits + inputs.bias
    return summed(SimpleNamespace(logits=logits, labels=inputs.labels, mask=inputs.mask)) / inputs.valid_tokens.clamp(
        min=1
    )


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("seed", range(6))
def test_a_mistake_in_one_branch_is_found_with_every_seed(seed: int) -> None:
    assert in_cell(without_bias, PROPERTIES["no-grad"], seed=seed).verdict is Verdict.DISAGREE
