# SPDX-License-Identifier: Apache-2.0
"""What ``docs/how-to/own-loss.md`` says of what a spec is given, and of what it gives.

Its code runs in ``property_tests/docs``, and in ``test_user_specs.py`` as a user runs it.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import lossgate
from lossgate import Problem, Spec, UsageError, field, option
from lossgate.adequacy.option_mutants import option_mutants
from lossgate.base.layout import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawn_problem import DrawnProblem
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.strategies import problems

PROBLEM = Problem(
    spec="mine",
    head="logits",
    dtype="float32",
    lengths=(5, 0, 4),
    masks=("all", "all", "response"),
    hidden=1,
    vocab=6,
    pad_to_multiple=8,
    layout=Layout(dp=2, cp=2),
    options={"heat": 0.5, "cap": 3.0},
    seed=3,
)


class Knobs(lossgate.Options):
    heat: float = option(1.0, "divides", choices=(1.0, 0.5))
    cap: float | None = option(None, "bounds", choices=(None, 3.0))
    count: int = option(1, "is whole", choices=(1, 2))
    wide: float = option(1.0, "is an interval", between=(0.5, 2.0))
    on: bool = option(False, "is off")


def nll(values: Any, batch: Any, options: Any) -> Tensor:
    """The sum of all NLLs."""
    return torch.where(batch.mask, -values.logprobs, 0.0).sum()


def mine(reference: Any = nll, **declared: Any) -> Spec:
    return lossgate.spec("mine", options=Knobs, temperature="heat", softcap="cap", **declared)(reference)


# What a reference gets


def test_all_tokens_on_one_rank_without_padding_in_float64() -> None:
    class Weighted(lossgate.Batch):
        weights: Tensor = field("token", "weights")

    seen: list[Any] = []

    def reference(values: Any, batch: Any, options: Any) -> Tensor:
        seen.append((len(values.logprobs), values.logprobs.dtype, len(batch.weights), batch.weights.dtype, options))
        assert int(batch.valid_tokens) == int(batch.mask.sum())
        return nll(values, batch, options)

    DrawnProblem(PROBLEM, mine(reference, batch=Weighted)).reference()
    assert set(seen) == {(9, torch.float64, 9, torch.float64, Knobs(heat=0.5, cap=3.0))}


def test_values_that_a_loss_may_use() -> None:
    names = ("logprobs", "entropy", "logsumexp", "mean_logprob", "lowest", "highest", "logits")
    bound = BoundProblem(mine(uses=names), PROBLEM)
    leaves, labels = bound.batch.leaves, bound.batch.fields["labels"]
    values = bound.bound_spec.token_values("logits", leaves, bound.batch.fields)
    capped = 3.0 * torch.tanh(leaves["logits"] / 3.0)
    logprobs = torch.log_softmax(capped / 0.5, -1)
    expected = {
        "logprobs": logprobs.gather(1, labels[:, None]).squeeze(1),
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "logsumexp": torch.logsumexp(capped / 0.5, -1),
        "mean_logprob": logprobs.mean(-1),
        "lowest": capped.amin(-1),
        "highest": capped.amax(-1),
        "logits": capped / 0.5,
    }
    assert {*values.given} == {*names}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(values, name), value, msg=name)
    assert {*values.differentiable} == {*names} - {"lowest", "highest"}


@pytest.mark.parametrize(
    ("uses", "heads"),
    [
        (("logprobs",), ("hidden", "logits", "logprobs")),
        (("logprobs", "entropy"), ("hidden", "logits")),
        (("logits",), ("hidden", "logits")),
    ],
)
def test_where_kernels_may_start(uses: tuple[str, ...], heads: tuple[str, ...]) -> None:
    assert tuple(mine(uses=uses).inputs) == heads


@pytest.mark.parametrize(("head", "leaf"), [("values", "values"), ("rewards", "rewards"), ("logprobs", "logprobs")])
def test_heads_without_logits_give_their_inputs_themselves(head: str, leaf: str) -> None:
    dim: Any = "sequence" if head == "rewards" else "token"

    def reference(values: Any, batch: Any, options: Any) -> Tensor:
        return values.logprobs.sum()

    spec = lossgate.spec("mine", heads=(head,), trained_dim=dim)(reference)
    bound = BoundProblem(spec, replace(PROBLEM, head=head, options={}))
    values = bound.bound_spec.token_values(head, bound.batch.leaves, bound.batch.fields)
    assert values.logprobs is bound.batch.leaves[leaf]


# Options


@pytest.mark.parametrize(
    ("supports", "fits"),
    [
        ({"heat": 0.8}, True),  # its choices have a decimal point
        ({"cap": (None, 20.0)}, True),
        ({"count": 3}, False),
        ({"wide": 1.7}, True),
        ({"wide": 2.5}, False),
        ({"on": True}, True),
    ],
)
def test_values_that_a_kernel_may_support(supports: dict[str, Any], fits: bool) -> None:
    def declare() -> Any:
        return lossgate.candidate(mine(), head="logits", supports=supports)

    if fits:
        declare()
    else:
        with pytest.raises(UsageError, match="does not allow"):
            declare()


def verdict_with(effect: float) -> CellResult:
    class Idle(lossgate.Options):
        twice: float = option(0.0, "does next to nothing", choices=(0.0, 1.0))

    def reference(values: Any, batch: Any, options: Any) -> Tensor:
        return nll(values, batch, options) * (1 + effect * options.twice)

    candidate = dense_candidate(lossgate.spec("mine", options=Idle, heads=("logprobs",))(reference), "logprobs")
    return run_cell(Cell(candidate, Layout(), "float32"), Settings(examples=8, rounds=1))


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [(0.0, Verdict.AGREE), (1e-9, Verdict.INCONCLUSIVE), (0.5, Verdict.AGREE)],
)
def test_a_choice_that_changes_nothing_is_excused_and_one_that_changes_little_is_not(
    effect: float, verdict: Verdict
) -> None:
    assert verdict_with(effect).verdict is verdict


# Fields


class Drawn(lossgate.Batch):
    normal: Tensor = field("token", "by default")
    coin: Tensor = field("token", "by default", dtype="bool")
    uniform: Tensor = field("sequence", "drawn", draw=lambda c: c.uniform(2.0, 3.0))
    wide: Tensor = field("token", "drawn", draw=lambda c: c.normal(10.0))
    rare: Tensor = field("token", "drawn", dtype="bool", draw=lambda c: c.coin(0.1))
    whole: Tensor = field("token", "drawn", dtype="int64", draw=lambda c: c.integers(4))
    per_row: Tensor = field("vocab", "drawn")
    near: Tensor = field("token", "drawn", draw=lambda c: c.logprobs + c.options.heat)
    ids: Tensor = field(
        "token topk", "drawn", dtype="int64", draw=lambda c: c.streams.integers("my ids", c.vocab, c.tokens, 3)
    )
    said: Tensor = field("", "drawn", draw=lambda c: torch.tensor(float(c.scenario["kind"] == "b")))
    kind_of_size: Tensor = field("", "drawn", draw=lambda c: torch.tensor(float(c.sequences * c.logits().shape[1])))
    trained_ones: Tensor = field("", "counted", dtype="int64", count=lambda batch: batch.mask.sum())


def drawn_fields(**changes: Any) -> tuple[BoundProblem, Any]:
    kind = lossgate.Option(name="kind", meaning="one of two", default="a", choices=("a", "b"))
    size = {"lengths": (400,) * 5, "masks": ("all",) * 5, "layout": Layout(), "pad_to_multiple": 1}
    bound = BoundProblem(mine(batch=Drawn, scenarios=(kind,)), replace(PROBLEM, **{**size, **changes}))
    return bound, bound.spec.batch(bound.batch.known)


class OfTokens(lossgate.Batch):
    policy_logits: Tensor = field("token vocab", "before the temperature", draw=lambda c: c.logits())
    policy: Tensor = field("token", "after the temperature", draw=lambda c: c.logprobs)
    ids: Tensor = field("token", "labels", dtype="int64", draw=lambda c: c.labels)
    trains: Tensor = field("token", "mask", dtype="bool", draw=lambda c: c.mask)
    numbers: Tensor = field("token", "sequences", dtype="int64", draw=lambda c: c.sequence)


def test_what_a_drawing_function_knows_of_tokens() -> None:
    bound = BoundProblem(mine(batch=OfTokens), replace(PROBLEM, layout=Layout(), pad_to_multiple=1))
    batch, heat = bound.spec.batch(bound.batch.known), bound.bound_spec.options.heat
    assert heat != 1
    of_labels = (batch.policy_logits / heat).log_softmax(-1).gather(1, batch.labels[:, None]).squeeze(1)
    torch.testing.assert_close(of_labels, batch.policy)
    for drawn, own in ((batch.ids, batch.labels), (batch.trains, batch.mask), (batch.numbers, batch.sequence)):
        assert torch.equal(drawn, own)


def test_references_get_the_ids_of_the_whole_batch_on_ranks_too() -> None:
    def reference(values: Any, batch: Any, options: Any) -> Tensor:
        weights = 1.0 + batch.input_ids.remainder(3).to(values.logprobs)
        return (weights * torch.where(batch.mask, -values.logprobs, 0.0)).sum()

    dense = dense_candidate(lossgate.spec("mine", heads=("logprobs",))(reference), "logprobs")
    result = run_cell(Cell(dense, Layout.parse("cp=2"), "float32"), Settings(examples=4, rounds=4))
    assert result.verdict is Verdict.AGREE, result.reasons


class ManyNumbers(lossgate.Options):
    size: float = option(1.0, "a number", choices=(1.0, 0.0, 0.5, 2.0))
    mode: str = option("a", "a word", choices=("a", "b"))


def test_numbers_are_one_choice_and_the_default_and_0_and_words_are_their_own() -> None:
    made = lossgate.spec("mine", options=ManyNumbers)(nll)
    mutants = option_mutants(dense_candidate(made, "logits")).values()
    assert len({mutant.choice for mutant in mutants if mutant.option == "size"}) == 3
    assert len({mutant.choice for mutant in mutants if mutant.option == "mode"}) == 2


def test_how_fields_are_drawn() -> None:
    bound, drawn = drawn_fields(scenario={"kind": "b"})
    assert abs(drawn.normal.mean()) < 0.1
    assert 0.9 < drawn.normal.std() < 1.1
    assert 9 < drawn.wide.std() < 11
    assert 0.6 < drawn.coin.double().mean() < 0.73
    assert 0.05 < drawn.rare.double().mean() < 0.15
    assert drawn.whole.unique().tolist() == [0, 1, 2, 3]
    assert drawn.uniform.shape == (5,)
    assert ((drawn.uniform >= 2) & (drawn.uniform <= 3)).all()
    assert drawn.per_row.shape == (6,)
    assert drawn.ids.shape == (2000, 3)
    assert (float(drawn.said), float(drawn.kind_of_size)) == (1.0, 30.0)
    assert int(drawn.trained_ones) == int(drawn.mask.sum())
    policy = bound.bound_spec.token_values("logits", bound.batch.leaves, bound.batch.fields).logprobs
    torch.testing.assert_close(drawn.near, policy.detach() + 0.5, rtol=0, atol=1e-6)  # rounded to float32


def test_the_same_problem_draws_the_same_and_another_seed_others() -> None:
    one, again, other = (drawn_fields(seed=seed)[1] for seed in (1, 1, 2))
    for name in ("normal", "coin", "uniform", "wide", "rare", "whole", "per_row", "near", "ids"):
        assert torch.equal(getattr(one, name), getattr(again, name))
        assert not torch.equal(getattr(one, name), getattr(other, name)), name


def test_counts_follow_the_mask_near_kinks() -> None:
    """One token is so near to the clip that rounding may move it to the other side."""

    class Counted(lossgate.Batch):
        mine: Tensor = field("", "counted", dtype="int64", count=lambda batch: batch.mask.sum())

    edges = [0.0]

    def reference(values: Any, batch: Any, options: Any) -> Tensor:
        return torch.where(batch.mask, -values.logprobs.clamp(max=edges[0]), 0.0).sum()

    bound = BoundProblem(mine(reference, batch=Counted, kinks=True), PROBLEM)
    values = bound.bound_spec.token_values("logits", bound.unmasked.leaves, bound.unmasked.fields)
    edges[0] = float(values.logprobs[0]) + 1e-9
    found, before = bound.batch.fields, bound.unmasked.fields
    assert (before["mask"] ^ found["mask"]).nonzero().tolist() == [[0]]
    assert int(found["mine"]) == int(found["valid_tokens"]) == int(found["mask"].sum())


def test_a_problem_in_which_nothing_is_trained_shows_nothing() -> None:
    def nothing(batch: Any) -> Tensor:
        return torch.zeros_like(batch.mask)

    goal = lossgate.CoverageGoal(meaning="a token", reached=lambda values, batch, options: batch.mask)
    kind = lossgate.Option(name="kind", meaning="one", default="a", choices=("a", "b"))
    for trained, shown in ((None, {"trained token", "kind: a"}), (nothing, set[str]())):
        spec = mine(scenarios=(kind,), goals={"mine": goal}, **({"trained": trained} if trained else {}))
        assert {"trained token", "kind: a"} & BoundProblem(spec, PROBLEM).coverage == shown


# What the page says beside


def test_help_describes_every_argument() -> None:
    described = inspect.getdoc(lossgate.spec) or ""
    for name in inspect.signature(lossgate.spec).parameters:
        assert f"\n    {name}: " in described, name


def test_a_class_for_editors_is_what_a_kernel_gets() -> None:
    class Hidden(lossgate.inputs.Hidden, Drawn):
        """What a kernel of the spec gets."""

    got = mine(batch=Drawn).inputs["hidden"]
    assert {f.name for f in fields(Hidden)} == {f.name for f in fields(got)}  # pyright: ignore[reportArgumentType]


def test_a_count_divided_by_a_count_is_float32() -> None:
    count = torch.tensor(3)
    assert (count / count).dtype is torch.float32
    assert (count.to(torch.float64) / count).dtype is torch.float64


SLIPS: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "a product with the mask": lambda v, b, o: -(v.logprobs.exp().log() * b.mask).sum(),
    "the result alone is selected": lambda v, b, o: torch.where(b.mask, -((-v.logprobs) ** 0.5), 0.0).sum(),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_what_leaves_nan_of_masked_tokens(slip: str) -> None:
    logprobs = torch.tensor([-1.0, 0.0 if "alone" in slip else -torch.inf], dtype=torch.float64, requires_grad=True)

    class Masked:
        mask = torch.tensor([True, False])

    class Values:
        pass

    values: Any = Values()
    values.logprobs = logprobs
    SLIPS[slip](values, Masked, None).backward()
    assert logprobs.grad is not None
    assert not logprobs.grad.isfinite().all()


def test_problems_reach_a_probability_of_1() -> None:
    found: list[bool] = []

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(problems("nll", head="logits"))
    def look(problem: DrawnProblem) -> None:
        logits, labels = problem.inputs().logits, problem.inputs().labels
        found.append(bool((torch.log_softmax(logits, -1).gather(1, labels[:, None]) == 0).any()))

    look()
    assert any(found)
