# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate.strategies``, as a kernel author uses them."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import lossgate
from kernel_bank.bugs import BUGS
from kernel_bank.cross_entropy import STYLES, make
from lossgate import ANY, Candidate, Layout, UsageError
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.strategies import DrawnPack, DrawnProblem

drawn = lossgate.strategies
FUSED = make(STYLES["float32"][1])
EVERY = [(spec, head) for spec in SPECS.values() for head in spec.inputs]

few = settings(deadline=None, max_examples=15, database=None, derandomize=True)
smallest = settings(
    deadline=None, max_examples=2000, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def nll_of(inputs: Any, options: Any) -> torch.Tensor:
    logits = inputs.hidden @ inputs.weight.T
    logits = logits if inputs.bias is None else logits + inputs.bias
    logits = logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)
    logprobs = F.log_softmax(logits / options.temperature, -1).gather(1, inputs.labels[:, None]).squeeze(1)
    total = -torch.where(inputs.mask, logprobs, 0.0).sum()
    return total if options.reduction == "sum" else total / (float(inputs.valid_tokens) + options.epsilon)


# Problems


@few
@given(drawn.problems("nll", head="hidden", supports=ANY))
def test_a_kernel_and_the_reference_are_called_on_the_same_inputs(problem: DrawnProblem) -> None:
    inputs, reference = problem.inputs(dtype=torch.float64), problem.reference()
    loss = nll_of(inputs, problem.options)
    if not inputs.mask.any():
        return
    loss.backward(problem.upstream()["loss"])
    for found, expected in (
        (loss, reference["loss"]),
        (inputs.hidden.grad, reference["grad of hidden"]),
        (inputs.weight.grad, reference["grad of weight"]),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12 * float(expected.abs().max()))


@few
@given(drawn.problems(FUSED, layout=drawn.layouts(4)))
def test_a_right_candidate_passes_its_check(problem: DrawnProblem) -> None:
    problem.check(FUSED)


@pytest.mark.slow
def test_a_wrong_candidate_is_reported_on_a_small_problem() -> None:
    wrong = replace(BUGS["cp gradient x cp"].put_into(FUSED), name="wrong")

    @settings(deadline=None, max_examples=100, database=None, report_multiple_bugs=False)
    @given(drawn.problems(wrong, layout=drawn.layouts(4)))
    def test(problem: DrawnProblem) -> None:
        problem.check(wrong)

    with pytest.raises(AssertionError) as raised:
        test()
    message = str(raised.value)
    assert message.startswith("wrong disagrees with the reference\n  grad of hidden: got ")
    assert "\n  on: 2 tokens in 1 sequence [2], " in message
    (shown,) = raised.value.__notes__[:1]
    assert "problem=DrawnProblem.from_json('{" in shown


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("spec", "head"), EVERY, ids=[f"{spec.name}-{head}" for spec, head in EVERY])
def test_every_spec_on_every_layout(spec: Any, head: str) -> None:
    dense = dense_candidate(spec, head)

    @settings(deadline=None, max_examples=6, database=None)
    @given(drawn.problems(dense, layout=drawn.layouts(4)))
    def test(problem: DrawnProblem) -> None:
        problem.check(dense)
        whole = problem.outputs(dense)
        for rank in range(problem.layout.ranks):
            inputs, reference = problem.inputs(rank), problem.reference(rank)
            for leaf in dense.starts_at.leaves:
                if (tensor := getattr(inputs, leaf)) is not None:
                    assert tensor.requires_grad
                    assert reference[f"grad of {leaf}"].shape == tensor.shape
            assert whole.keys() <= reference.keys()

    test()


@few
@given(drawn.problems("nll", head="logits", layout="dp=2,cp=2,tp=2", supports=ANY))
def test_the_parts_of_the_reference_are_cut_as_the_inputs_are(problem: DrawnProblem) -> None:
    """Padding has no gradient, and every other entry of the whole is on one rank."""
    whole = problem.outputs(dense_candidate(SPECS["nll"], "logits"))["grad of logits"].square().sum()
    parts = [problem.reference(rank)["grad of logits"].square().sum() for rank in range(8)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=0.0)


@few
@given(drawn.problems("grpo", head="logprobs", layout=drawn.layouts(4, axes=["dp", "cp"])))
def test_what_a_test_shows_makes_the_same_problem_again(problem: DrawnProblem) -> None:
    again = eval(repr(problem), {"DrawnProblem": DrawnProblem})
    assert again == problem
    assert str(again) == problem.problem.describe()
    assert torch.equal(again.inputs().logprobs, problem.inputs().logprobs)


def test_inputs_are_new_in_each_call() -> None:
    problem = find(drawn.problems("nll", head="hidden"), lambda p: p.problem.tokens > 2, settings=smallest)
    one, other = problem.inputs(), problem.inputs()
    one.hidden.sum().backward()
    assert other.hidden.grad is None
    assert torch.equal(one.hidden, other.hidden)


def test_a_spec_object_of_the_users_own() -> None:
    own = replace(SPECS["nll"], name="my_nll")
    problem = find(drawn.problems(own, head="hidden"), lambda p: True, settings=smallest)
    assert problem.problem.spec == "my_nll"
    assert problem.reference()["loss"].isfinite()
    assert DrawnProblem.from_json(problem.problem.to_json(), own) == problem


SMALLEST: dict[str, tuple[Any, Callable[[Any], bool], Callable[[Any], bool]]] = {
    "a problem": (
        drawn.problems("nll", head="hidden", layout=drawn.layouts(8), supports=ANY),
        lambda p: True,
        lambda p: p.problem.lengths == (1,) and p.layout == Layout() and p.problem.vocab == p.problem.hidden == 1,
    ),
    "two trained tokens": (
        drawn.problems("nll", head="hidden", layout="tp=2"),
        lambda p: int(p.inputs().mask.sum()) >= 2,
        lambda p: p.problem.tokens == 3 and p.problem.vocab == 2 and p.problem.seed == 0,
    ),
    "padding": (
        drawn.packs(cp=2),
        lambda pack: pack.tokens > sum(pack.lengths),
        lambda pack: pack == DrawnPack((1,), 2, 1),
    ),
    "an empty sequence": (drawn.lengths(), lambda cut: 0 in cut, lambda cut: sum(cut) == 1 and len(cut) == 2),
    "a layout with cp": (drawn.layouts(8), lambda at: at.cp > 1, lambda at: at == Layout(cp=2)),
    "a temperature": (drawn.temperatures(), lambda t: True, lambda t: t == 1.0),
    "a cold one": (drawn.temperatures(), lambda t: t < 1, lambda t: 0.3 <= t < 1),
    "options": (drawn.options("grpo"), lambda o: True, lambda o: o == SPECS["grpo"].options_type()),
    "a trained token": (drawn.masks((2, 3)), lambda m: bool(m.any()), lambda m: m.tolist() == [1, 0, 1, 1, 0]),
    "labels": (drawn.labels((3,), 5), lambda x: True, lambda x: len(x) == 3),
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("what", SMALLEST)
def test_shrinks(what: str) -> None:
    strategy, condition, small = SMALLEST[what]
    assert small(find(strategy, condition, settings=smallest))


def reached(strategy: st.SearchStrategy[Any], count: int = 150) -> list[Any]:
    found: list[Any] = []

    @settings(deadline=None, max_examples=count, database=None, phases=(Phase.generate,), derandomize=True)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


# Parts


def test_layouts_are_those_that_are_asked_for() -> None:
    found = reached(drawn.layouts(6, axes=("dp", "tp")))
    assert {at.cp for at in found} == {1}
    assert max(at.ranks for at in found) == 6
    assert Layout() in found


@few
@given(st.data())
def test_packs(data: st.DataObject) -> None:
    cp = data.draw(st.integers(1, 4))
    pack = data.draw(drawn.packs(cp=cp))
    unit = 2 * cp if cp > 1 else 1
    assert all(padded % unit == 0 and padded >= n for n, padded in zip(pack.lengths, pack.padded_lengths, strict=True))
    assert pack.cu_seqlens.tolist() == [0, *accumulate(pack.lengths)]
    assert pack.cu_seqlens_padded.tolist() == [0, *accumulate(pack.padded_lengths)]
    assert pack.cu_seqlens.dtype == pack.cu_seqlens_padded.dtype == torch.int32
    assert pack.real.sum() == sum(pack.lengths)
    assert len(pack.real) == pack.tokens == sum(pack.padded_lengths)
    owned = torch.cat([pack.of_rank(rank) for rank in range(cp)])
    assert owned.sort().values.tolist() == list(range(pack.tokens))


def test_a_pack_is_split_in_a_zigzag() -> None:
    pack = DrawnPack((3, 6), cp=2)
    assert pack.padded_lengths == (4, 8)
    assert pack.real.tolist() == [1, 1, 1, 0, *[1] * 6, 0, 0]
    assert pack.of_rank(0).tolist() == [0, 3, 4, 5, 10, 11]
    assert pack.of_rank(1).tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(UsageError, match=r"of_rank\(2\): expected a cp rank below 2"):
        pack.of_rank(2)


def test_lengths_are_cut_and_grouped() -> None:
    found = reached(drawn.lengths(tokens=20, sequences=5))
    assert {sum(cut) for cut in found} == {20}
    assert max(map(len, found)) == 5
    assert any(0 in cut for cut in found)
    pairs = reached(drawn.lengths(st.sampled_from([7, 9]), group_size=2))
    assert {len(cut) % 2 for cut in pairs} == {0}
    assert {sum(cut) for cut in pairs} == {7, 9}


@pytest.mark.parametrize(
    ("patterns", "possible"),
    [
        (["all"], lambda m: m.tolist() == [1, 1, 1, 0, 1, 0]),
        (["none"], lambda m: not m.any()),
        (["response"], lambda m: m[:4].tolist() in ([1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0])),
        (["holes", "all"], lambda m: not m[[3, 5]].any()),
    ],
)
def test_masks_have_their_patterns(patterns: Any, possible: Callable[[torch.Tensor], bool]) -> None:
    found = reached(drawn.masks((4, 2), patterns), 40)
    assert all(mask.dtype is torch.bool and possible(mask) for mask in found)
    assert len({tuple(mask.tolist()) for mask in found}) > (patterns[0] in ("response", "holes"))


def test_labels_reach_the_edges_of_shards() -> None:
    found = reached(drawn.labels((9, 8), vocab=1000))
    assert all(x.dtype is torch.int64 and len(x) == 17 and x.min() >= 0 and x.max() < 1000 for x in found)
    edges = torch.tensor([0, 249, 250, 333, 334, 499, 500, 667, 749, 750, 999])
    rows = torch.cat(found)
    assert torch.isin(rows, edges).sum() > 2 * len(edges) * len(rows) / 1000  # twice as often as by chance


def test_temperatures_are_exact_in_bfloat16() -> None:
    found = reached(drawn.temperatures())
    assert min(found) < 0.5 < 1.0 < 2.5 < max(found)
    assert all(float(torch.tensor(t, dtype=torch.bfloat16)) == t for t in found)


def test_options_are_valid_together() -> None:
    found = reached(drawn.options("clipped_pg"))
    assert len(set(map(repr, found))) > 50
    assert {type(o) for o in found} == {SPECS["clipped_pg"].options_type}
    some = reached(drawn.options("nll", supports={"reduction": ANY}), 20)
    assert {o.temperature for o in some} == {1.0}
    assert {o.reduction for o in some} == {"mean", "sum"}
    assert {o.epsilon for o in reached(drawn.options(FUSED), 20)} == {0.0}


def test_options_of_problems_are_at_their_default_unless_they_are_asked_for() -> None:
    def options(**asked: Any) -> set[str]:
        problems = reached(drawn.problems("nll", head="hidden", **asked), 40)
        return {name for p in problems for name in p.problem.options} | {"bias" for p in problems if p.problem.bias}

    assert options() == set()
    assert options(supports={"temperature": ANY}) == {"temperature"}
    assert options(supports=ANY) == {"temperature", "reduction", "epsilon", "softcap", "bias"}


def test_tiles_are_drawn_around() -> None:
    tokens = {p.problem.tokens for p in reached(drawn.problems("nll", head="hidden", tiles={"token": 100}))}
    assert tokens >= {99, 101}


def test_a_vocabulary_fits_its_ranks() -> None:
    even = make(STYLES["float32"][1])
    even = replace(even, supports={"vocab_split": ("even",)})
    assert {p.problem.vocab % 3 for p in reached(drawn.problems(even, layout="tp=3"), 40)} == {0}
    splits = reached(drawn.problems("nll", head="hidden", layout="tp=4", supports=ANY))
    assert {p.problem.vocab_split for p in splits} == {"balanced", "even", "chunked", "padded"}


NO_CP: Candidate = replace(FUSED, axes=("tp",))

MISUSE: dict[str, tuple[Callable[[], Any], str]] = {
    "spec": (lambda: drawn.problems("nlll", head="hidden"), "unknown spec 'nlll'; did you mean 'nll'"),
    "no spec": (lambda: drawn.problems(3, head="hidden"), r"problems\(spec=3\): expected the name of a loss"),  # type: ignore[arg-type]
    "no head": (lambda: drawn.problems("nll"), r"problems\('nll'\): head is missing; expected one of hidden, logits"),
    "head": (lambda: drawn.problems("nll", head="hiden"), r"problems\(head='hiden'\): .*did you mean 'hidden'"),
    "dtype": (lambda: drawn.problems("nll", head="hidden", dtype="float8"), r"problems\(dtypes=.*float8"),
    "dtype of a candidate": (
        lambda: drawn.problems(FUSED, dtype="float16"),
        r"problems\(dtype='float16'\): candidate 'fused' takes float32, bfloat16",
    ),
    "supports": (
        lambda: drawn.problems("nll", head="hidden", supports={"temprature": ANY}),
        r"problems\(supports\['temprature'\]=lossgate.ANY\): .*did you mean 'temperature'",
    ),
    "tiles": (lambda: drawn.problems("nll", head="hidden", tiles={"vocap": 8}), r"problems\(tiles=.*vocap"),
    "what a candidate declares": (
        lambda: drawn.problems(FUSED, head="hidden"),
        r"problems\(head='hidden'\): candidate 'fused' declares it; leave it out",
    ),
    "layout": (lambda: drawn.problems(FUSED, layout="tp2"), "layout 'tp2': can't read 'tp2'"),
    "no layout": (
        lambda: drawn.problems(FUSED, layout=2),  # type: ignore[arg-type]
        r"problems\(layout=2\): expected a layout such as 'tp=2,cp=2', or a strategy",
    ),
    "layout of other axes": (
        lambda: drawn.problems(NO_CP, layout="cp=2"),
        r"problems\(layout='cp=2'\): candidate 'fused' is not sharded over cp; choose layouts that split tp",
    ),
    "drawn layout of other axes": (
        lambda: find(drawn.problems(NO_CP, layout=st.just(Layout(cp=2))), lambda p: True),
        r"problems\(layout='cp=2'\): candidate 'fused' is not sharded over cp",
    ),
    "ranks": (lambda: drawn.layouts(0), r"layouts\(ranks=0\): expected a number from 1 to 64"),
    "axes": (lambda: drawn.layouts(4, axes=["pp"]), r"layouts\(axes=\['pp'\]\): unknown mesh axis 'pp'"),
    "tokens": (lambda: drawn.lengths(0), r"lengths\(tokens=0\): expected a positive whole number"),
    "sequences": (lambda: drawn.lengths(sequences=0), r"lengths\(sequences=0\): expected a positive whole number"),
    "cp": (lambda: drawn.packs(cp=-1), r"packs\(cp=-1\): expected a positive whole number"),
    "pattern": (
        lambda: drawn.masks((2,), ["hole"]),  # type: ignore[list-item]
        r"masks\(patterns=...\): unknown pattern 'hole'; did you mean 'holes'",
    ),
    "no pattern": (lambda: drawn.masks((2,), []), r"masks\(patterns=\(\)\): expected at least one of all, none"),
    "mask of no token": (
        lambda: drawn.masks(()),
        r"masks\(lengths=\(\)\): expected the number of tokens of each sequence",
    ),
    "one length": (
        lambda: drawn.labels(3, 5),  # type: ignore[arg-type]
        r"labels\(lengths=3\): expected the number of tokens of each sequence",
    ),
    "vocab": (lambda: drawn.labels((3,), 0), r"labels\(vocab=0\): expected a positive whole number"),
    "options of a candidate": (
        lambda: drawn.options(FUSED, supports={}),
        r"options\(supports=\{\}\): candidate 'fused' declares it; leave it out",
    ),
    "rank": (
        lambda: find(drawn.problems(FUSED), lambda p: True).inputs(1),
        "rank 1: expected a rank below 1, because the layout is single",
    ),
}


@pytest.mark.parametrize("which", MISUSE)
def test_misuse_names_the_argument(which: str) -> None:
    call, message = MISUSE[which]
    with pytest.raises(UsageError, match=message):
        call()


def test_the_page_names_every_strategy() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/own-tests.md").read_text()
    assert [name for name in drawn.__all__ if not re.search(rf"`{name}\b", page)] == []


def test_public_names_are_there() -> None:
    assert {name for name in lossgate.__all__ if getattr(lossgate, name, None) is None} == set()
