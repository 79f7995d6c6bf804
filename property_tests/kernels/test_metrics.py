# SPDX-License-Identifier: Apache-2.0
"""Metrics of microbatches and ranks make those of the whole batch, for every loss."""

import pickle
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses import Metrics, unchecked_values
from lossgate import Layout
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.our_candidates import OURS

from . import losses_with_metrics
from .losses_with_metrics import LOSSES, SEQUENCES, VALID, VALID_SEQUENCES, Batch

MakeWorld = Callable[..., SimulatedWorld]
CLOSE: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}


def small(a: float = 1.0, b: float = 2.0, n: float = 4.0, low: float = -1.0, high: float = 3.0) -> Metrics:
    values = {name: torch.tensor(x) for name, x in {"a": a, "low": low, "b_avg": b, "high": high, "n": n}.items()}
    return Metrics(values, minima=["low"], maxima=["high"], means={"b_avg": "n"})


# The algebra


def test_metrics_are_a_mapping_of_this_parts_numbers() -> None:
    found = small()
    assert list(found) == ["a", "low", "b_avg", "high", "n"]
    assert {name: float(x) for name, x in found.items()} == {"a": 1, "low": -1, "b_avg": 0.5, "high": 3, "n": 4}
    assert dict(found).keys() == found.export().keys() == found.reductions.keys()
    assert all(x.dtype == torch.float32 and x.dim() == 0 for x in found.values())
    assert found.reductions == {"a": "sum", "low": "min", "b_avg": "mean over n", "high": "max", "n": "sum"}
    with pytest.raises(KeyError, match="c"):
        found["c"]


ALL = [small(), small(5, 1, 2, -4, 0), small(0, 0, 0, inf, -inf)]
WHOLE = {"a": 6, "low": -4, "b_avg": 0.5, "high": 3, "n": 6}


@pytest.mark.parametrize(
    "added",
    [
        sum(ALL),
        sum(ALL[::-1]),
        sum(ALL, Metrics()),
        ALL[0] + (ALL[1] + ALL[2]),
        Metrics() + ALL[0] + ALL[1] + Metrics(),
        pickle.loads(pickle.dumps(ALL[0])) + ALL[1],
    ],
)
def test_parts_add_up(added: Any) -> None:
    """The mean is that of the sum, not a mean of means; an extremum over nothing is neutral."""
    assert added.floats() == WHOLE
    assert added["a"].dtype == torch.float64


def test_additions_are_exact_where_float32_is_not() -> None:
    many = [Metrics({"n": torch.tensor(x)}) for x in (2.0**24, 1.0, 1.0)]
    assert float(sum(many)["n"]) == 2**24 + 2  # type: ignore[index]


def test_numbers_have_no_graph_and_integers_are_exact() -> None:
    x = torch.tensor(0.1, requires_grad=True)
    found = Metrics({"x": x * 2, "n": torch.tensor(2**24 + 1), "rate": 0.1})
    assert not found["x"].requires_grad
    assert found.floats() == {"x": float((x * 2).detach()), "n": 2**24 + 1, "rate": 0.1}


def test_nothing_is_a_mean_of_0_and_infinite_extrema() -> None:
    nothing = small(0, 0, 0, inf, -inf)
    assert nothing.floats() == {"a": 0, "low": inf, "b_avg": 0, "high": -inf, "n": 0}
    assert nothing.floats(empty=-1.0) == {"a": 0, "low": -1, "b_avg": 0, "high": -1, "n": 0}
    assert repr(small()) == "Metrics(a=1 (sum), low=-1 (min), b_avg=0.5 (mean over n), high=3 (max), n=4 (sum))"


def test_an_infinity_that_is_no_neutral_element_stays() -> None:
    assert small(low=-inf, high=inf).floats(empty=-1.0)["low"] == -inf
    assert (small() + small(low=-inf)).floats(empty=-1.0)["low"] == -inf


def test_counts_and_values_as_an_areal_tracker_takes_them() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    x = torch.tensor([[1.0, torch.nan], [2.0, -6.0]])
    found = Metrics.over({"n": mask, "none": mask & False}, {"x": (x, "n"), "y": (x, "none")})
    of_x = {"x_avg": -1, "x_min": -6, "x_max": 2}
    assert found.floats() == {"n": 3, "none": 0, **of_x, "y_avg": 0, "y_min": inf, "y_max": -inf}
    assert found.reductions["x_avg"] == "mean over n"


def test_metrics_of_two_losses_are_joined() -> None:
    joined = small().prefixed("old/") | Metrics({"loss": 2.0})
    assert (joined + joined).floats() == {
        **{f"old/{name}": x for name, x in {"a": 2, "low": -1, "b_avg": 0.5, "high": 3, "n": 8}.items()},
        "loss": 4,
    }
    assert joined.reductions["old/b_avg"] == "mean over old/n"


def of_tokens() -> Metrics:
    return Metrics({"a": 1.0}, normalisers={"a": "n"})


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "another name": (lambda: small() + Metrics({"c": 1.0}), r"a, b_avg, c, high, low, n: expected the same metrics"),
    "another reduction": (
        lambda: Metrics({"a": 1.0}) + Metrics({"a": 1.0}, minima="a"),
        "a: expected the same metrics",
    ),
    "joined twice": (lambda: small() | small(), "a, low, b_avg, high, n: expected different names on both sides"),
    "unknown minimum": (lambda: Metrics({"a": 1.0}, minima=["b"]), "b: expected one of the values in minima"),
    "two reductions": (lambda: Metrics({"a": 1.0}, minima=["a"], maxima=["a"]), "a: expected one of the values"),
    "unknown count": (lambda: Metrics({"a": 1.0}, means={"a": "n"}), "means {'a': 'n'}: expected the name of a sum"),
    "a mean as count": (lambda: Metrics({"a": 1.0}, means={"a": "a"}), "means {'a': 'a'}: expected the name of a sum"),
    "several numbers": (lambda: Metrics({"a": torch.ones(3)}), r"a \[3\]: expected one number; sum it"),
    "a normaliser of a minimum": (
        lambda: Metrics({"a": 1.0}, minima=["a"], normalisers={"a": "n"}),
        "normalisers {'a': ...}: expected the name of a sum",
    ),
    "other normalisers": (
        lambda: of_tokens() + of_tokens().divided_by(n=2),
        "a: expected the same normalisers on both sides of .; add microbatches up, and call divided_by once",
    ),
    "a count that is missing": (lambda: of_tokens().divided_by(m=2), "n is missing: expected the count of the whole"),
    "a negative count": (lambda: of_tokens().divided_by(n=-2), "n -2: expected a finite number from 0"),
    "several counts": (lambda: of_tokens().divided_by(n=torch.ones(2)), r"n \[2\]: expected a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_other_types_are_not_added() -> None:
    for other in (1, {"a": 1.0}):
        with pytest.raises(TypeError, match="unsupported operand"):
            small() + other  # type: ignore[operator]


# Over ranks


def test_one_collective_for_each_group(make_world: MakeWorld) -> None:
    """Sums, minima and maxima are sent together, in float64."""
    world = make_world("dp=2,cp=3")
    found = world.run(lambda c: by_rank(c.rank).reduce(c.mesh.get_group("cp"), None, c.mesh.get_group("dp")))
    assert [metrics.floats() for metrics in found] == [
        {"a": 15, "low": 0, "b_avg": 55 / 15, "high": 5, "n": 15},
    ] * 6
    sent = [logged.collective + " " + logged.shown.partition(" ->")[0] for logged in world.log if logged.rank == 0]
    assert sent == ["all_gather float64[64]"] * 2


def by_rank(r: int) -> Metrics:
    return small(r, r * r, r, r, r)


def test_one_rank_sends_nothing(make_world: MakeWorld) -> None:
    world = make_world("single")
    found = world.run(lambda c: small().reduce(c.mesh.get_group("cp"), None))
    assert not world.log
    assert found[0].floats() == small().floats()
    assert found[0]["a"].dtype == torch.float64


TWICE: dict[str, Callable[[Metrics, Any, Any, Any], Metrics]] = {
    "the same group in one call": lambda m, dp, cp, world: m.reduce(dp, dp),
    "the same group in two calls": lambda m, dp, cp, world: m.reduce(dp).reduce(cp).reduce(dp),
    "a group with those of another": lambda m, dp, cp, world: m.reduce(cp, world),
    "microbatches after the reduction": lambda m, dp, cp, world: m.reduce(cp) + m,
    "joined after the reduction": lambda m, dp, cp, world: m.reduce(cp) | Metrics({"loss": 1.0}),
}


@pytest.mark.parametrize("name", TWICE)
def test_no_rank_counts_twice(make_world: MakeWorld, name: str) -> None:
    def body(context: RankContext) -> str:
        dp, cp = context.mesh.get_group("dp"), context.mesh.get_group("cp")
        with pytest.raises(ValueError, match=r"would count twice|expected the same ranks on both sides") as raised:
            TWICE[name](small(), dp, cp, dist.group.WORLD)
        return str(raised.value)

    assert len(make_world("dp=2,cp=2").run(body)) == 4


@pytest.mark.parametrize(
    "other",
    [
        Metrics(),
        Metrics({"a": 1.0}),
        small().prefixed("x"),
        Metrics(small(), minima=["low"], maxima=["high"], means={"b_avg": "n"}, normalisers={"a": "n"}),
    ],
)
def test_ranks_with_other_metrics_are_refused(make_world: MakeWorld, other: Metrics) -> None:
    """Every rank raises, so none waits for another. Unchecked numbers are NaN, and never wrong."""

    def body(context: RankContext) -> None:
        own = other if context.rank else small()
        with unchecked_values():
            assert all(number.isnan() for number in own.reduce(context.mesh.get_group("dp")).values())
        with pytest.raises(ValueError, match="metrics of rank 1, 2: expected those of rank 0, with the same names"):
            own.reduce(context.mesh.get_group("dp"))

    make_world("dp=3").run(body)


# Every loss


def parts(of: Callable[[Batch, Any], Metrics], batch: Batch, cuts: list[int], group: Any = None) -> list[Metrics]:
    """Returns the metrics of microbatches, cut between pairs of sequences."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    edges = [0, *sorted(cuts), SEQUENCES // 2]
    return [of(batch.part(2 * a, 2 * b, rank, ranks), group) for a, b in pairwise(edges)]


@pytest.mark.parametrize("cuts", [[1], [0, 3], [1, 1, 2, 4]], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_make_the_whole(name: str, cuts: list[int]) -> None:
    """Empty microbatches are among them."""
    whole, found = LOSSES[name](Batch.whole(), None), sum(parts(LOSSES[name], Batch.whole(), cuts))
    torch.testing.assert_close(dict(found), dict(whole), **CLOSE)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", LOSSES)
def test_counts_may_be_known_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other counts in the calls, and division afterwards, make the same metrics."""
    whole = LOSSES[name](Batch.whole(), None)
    monkeypatch.setattr(losses_with_metrics, "VALID", 2**20)
    monkeypatch.setattr(losses_with_metrics, "VALID_SEQUENCES", 2**10)
    parts = [LOSSES[name](Batch.whole().part(a, b), None) for a, b in ((0, 2), (2, SEQUENCES))]
    assert all(part.normalisers == whole.normalisers for part in parts)
    tokens, sequences = VALID / 2**20, torch.tensor(VALID_SEQUENCES / 2**10)
    found = sum(parts).divided_by(valid_tokens=tokens, valid_sequences=sequences, others=1)
    torch.testing.assert_close(dict(found), {name: x.double() for name, x in whole.items()}, **CLOSE)
    assert found.divided_by() == found
    assert bool(whole.normalisers) == (name.partition(",")[0] != "linear_sft_loss")


def test_division_by_a_count_of_nothing() -> None:
    nothing = Metrics({"a": 0.0, "b": 3.0}, normalisers={"a": "valid_tokens"})
    assert nothing.divided_by(valid_tokens=0).floats() == {"a": 0, "b": 3}
    joined = nothing.prefixed("x/") | Metrics({"c": 6.0}, normalisers={"c": "pairs"})
    assert joined.normalisers == {"x/a": "valid_tokens", "c": "pairs"}
    assert joined.divided_by(valid_tokens=2, pairs=3).floats() == {"x/a": 0, "x/b": 3, "c": 2}


@pytest.mark.parametrize("layout", ["cp=2", "dp=2,cp=3"])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_make_the_whole(make_world: MakeWorld, name: str, layout: str) -> None:
    """The last dp rank has two microbatches, one without tokens; the other one has none at all."""
    batch = Batch.whole()

    def body(context: RankContext) -> tuple[Metrics, Metrics]:
        dp, cp = context.mesh.get_group("dp"), context.mesh.get_group("cp")
        last = dp.rank() == dp.size() - 1
        own = parts(LOSSES[name], batch, [4], cp) if last else [LOSSES[name](batch.part(0, 0), cp)]
        return own[0], sum(own, Metrics()).reduce(cp, dp)

    found = make_world(layout).run(body)
    whole = LOSSES[name](batch, None)
    for part, reduced in found:
        assert part.reductions == whole.reductions
        torch.testing.assert_close(dict(reduced), dict(whole), **CLOSE)
    torch.testing.assert_close([dict(m) for _, m in found], [dict(found[0][1])] * len(found), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in LOSSES if "sft" not in name])
def test_losses_compile_whole(name: str) -> None:
    """``Metrics`` causes no break of the graph."""
    batch = Batch.whole()
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend="eager")(batch, None)
    torch.testing.assert_close(dict(compiled + compiled), dict(sum([LOSSES[name](batch, None)] * 2)), **CLOSE)  # type: ignore[call-overload]


# Mutants of the reduction


def gathered(metrics: Metrics, *groups: Any) -> list[Metrics]:
    """Returns the metrics of every rank."""
    every = metrics._parts.double()[None]
    for group in groups:
        out = every.new_empty(group.size(), *every.shape)
        dist.all_gather(list(out), every, group=group)
        every = out.flatten(0, 1)
    return [metrics._with(parts) for parts in every]


def of_kind(ranks: list[Metrics], kind: str, combine: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
    """Combines the metrics with one reduction in another way."""
    names = [name for name, reduction in ranks[0].reductions.items() if reduction.startswith(kind)]
    return {**sum(ranks, Metrics()), **{name: combine(torch.stack([m[name] for m in ranks])) for name in names}}


REDUCTIONS: dict[str, tuple[Verdict, Callable[[list[Metrics]], Mapping[str, Tensor]]]] = {
    "right": (Verdict.AGREE, lambda ranks: sum(ranks, Metrics())),
    "a rank is added twice": (Verdict.DISAGREE, lambda ranks: sum([*ranks, ranks[-1]], Metrics())),
    "a rank is left out": (Verdict.DISAGREE, lambda ranks: sum(ranks[1:], Metrics())),
    "a minimum is summed": (Verdict.DISAGREE, lambda ranks: of_kind(ranks, "min", lambda x: x.sum())),
    "a maximum is summed": (Verdict.DISAGREE, lambda ranks: of_kind(ranks, "max", lambda x: x.sum())),
    "0 is neutral in a minimum": (
        Verdict.DISAGREE,
        lambda ranks: of_kind(ranks, "min", lambda x: x.where(x < inf, 0.0).amin()),
    ),
    "a mean of means": (Verdict.DISAGREE, lambda ranks: of_kind(ranks, "mean", lambda x: x.mean())),
    "divided before the reduction": (Verdict.DISAGREE, lambda ranks: of_kind(ranks, "mean", lambda x: x.sum())),
    "sums are averaged": (Verdict.DISAGREE, lambda ranks: of_kind(ranks, "sum", lambda x: x.mean())),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_judge_kills_wrong_reductions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are those of the candidate for SFT, in the words of spec ``nll``."""
    verdict, combine = REDUCTIONS[name]
    monkeypatch.setattr(Metrics, "reduce", lambda self, *groups: combine(gathered(self, *groups)))
    cell = Cell(OURS["fused_linear_sft"], Layout(dp=2, cp=2), "float32")
    assert run_cell(cell, Settings(examples=20, rounds=2, shrink_calls=0)).verdict is verdict
