# SPDX-License-Identifier: Apache-2.0
"""Tests of drawn problems: they reach the boundaries where bugs sit."""

from collections.abc import Callable

import pytest

from lossgate import ANY, Candidate, Layout, Problem, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import sample_problems
from lossgate.cases.problem_strategies import LOGIT_STDS
from lossgate.losses import find_spec


def declared(**changes: object) -> Candidate:
    plain = {
        "head": "hidden",
        "axes": ("dp", "cp", "tp"),
        "supports": {"temperature": ANY, "reduction": ANY, "bias": ANY, "vocab_split": ANY},
    }
    declare = candidate("nll", name="kernel", **{**plain, **changes})  # type: ignore[arg-type]
    return declare(lambda inputs, options, mesh: inputs.hidden.sum())


@pytest.fixture(scope="module")
def drawn() -> list[Problem]:
    return sample_problems(
        declared(tiles={"token": 24, "vocab": 40}), Layout(dp=2, cp=2, tp=3), "bfloat16", 600, seed=0
    )


REACHED: dict[str, Callable[[Problem], bool]] = {
    "one token": lambda p: p.tokens == 1,
    "two tokens": lambda p: p.tokens == 2,
    "a prime number of tokens": lambda p: p.tokens in (13, 17, 31, 67),
    "a power of two": lambda p: p.tokens in (8, 16, 32, 64),
    "one more": lambda p: p.tokens in (17, 33),
    "a chunk less one": lambda p: p.tokens == 23,
    "a chunk": lambda p: p.tokens == 24,
    "a chunk and one": lambda p: p.tokens == 25,
    "a tile of the vocabulary and one": lambda p: p.vocab == 41,
    "a vocabulary that tp does not divide": lambda p: p.vocab % 3 != 0,
    "a padded vocabulary": lambda p: p.vocab_split == "padded",
    "an empty vocabulary shard": lambda p: any(s.start == s.end for s in p.partition.vocab_shards),
    "an odd hidden size": lambda p: p.hidden % 2 == 1,
    "a hidden size of one": lambda p: p.hidden == 1,
    "several sequences": lambda p: len(p.lengths) > 2,
    "an empty sequence": lambda p: 0 in p.lengths,
    "a sequence of one token": lambda p: 1 in p.lengths and p.tokens > 1,
    "a sequence masked whole": lambda p: "none" in p.masks,
    "nothing trained at all": lambda p: not BoundProblem(find_spec(p.spec), p).batch.fields["mask"].any(),
    "a dp rank without tokens": lambda p: not sum(p.lengths[s] for s in p.partition.sequences(1)),
    "a label forced to the last row": lambda p: any(row == p.vocab - 1 for _, row in p.forced_labels),
    "a label forced to a shard's first row": lambda p: any(
        row == p.partition.vocab_shards[1].start for _, row in p.forced_labels
    ),
    "the coldest temperature": lambda p: p.options.get("temperature", 1) < 0.4,
    "the hottest temperature": lambda p: p.options.get("temperature", 1) > 2.9,
    "nearly equal logits": lambda p: p.logit_std == min(LOGIT_STDS) == 0.1,
    "a huge logit_std": lambda p: p.logit_std == max(LOGIT_STDS) == 30,
    "confident labels": lambda p: p.label_boost > 10,
    "outliers": lambda p: len(p.outliers) > 1,
    "a bias": lambda p: p.bias,
    "a sum": lambda p: p.options.get("reduction") == "sum",
    "padding beyond need": lambda p: p.pad_to_multiple > 1,
    "the last reduction order": lambda p: p.reduction_order == "ring",
}


@pytest.mark.parametrize("what", REACHED)
def test_reaches(drawn: list[Problem], what: str) -> None:
    assert sum(map(REACHED[what], drawn)) >= 3


def test_draws_what_the_candidate_supports_and_nothing_else() -> None:
    plain = sample_problems(declared(supports={"reduction": "sum"}), Layout(tp=2), "float32", 100, seed=0)
    assert {tuple(p.options.items()) for p in plain} == {(("reduction", "sum"),)}
    assert not any(p.bias for p in plain)
    assert {p.vocab_split for p in plain} == {"balanced"}
    assert {p.cotangent for p in plain} == {"loss"}
    both = sample_problems(declared(differentiable=("loss", "logprobs")), Layout(), "float32", 100, seed=0)
    assert {p.cotangent for p in both} == {"loss", "logprobs", "both"}
    even = sample_problems(declared(supports={"vocab_split": "even"}), Layout(tp=3), "float32", 100, seed=0)
    assert all(p.vocab % 3 == 0 for p in even)
    assert len({p.vocab for p in even}) > 5
    logits = sample_problems(declared(head="logits"), Layout(), "float32", 100, seed=0)
    assert {p.hidden for p in logits} == {1}


def test_temperatures_are_exact_in_every_dtype(drawn: list[Problem]) -> None:
    import torch

    for problem in drawn:
        value = problem.options.get("temperature", 1.0)
        assert float(torch.tensor(value, dtype=torch.bfloat16)) == value


def test_same_seed_same_problems() -> None:
    one, again, other = (sample_problems(declared(), Layout(), "float32", 20, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
