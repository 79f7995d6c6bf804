# SPDX-License-Identifier: Apache-2.0
"""Tokens near a kink, where rounding could change the outcome of a comparison, are masked."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lossgate
from lossgate import Problem
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.kinks import RecordChoices, near_kinks, tokens_of
from lossgate.losses import SPECS
from lossgate.problems.batch import GlobalBatch


def bind(**changes: Any) -> BoundProblem:
    plain = {"dtype": "float32", "lengths": (9, 7), "masks": ("all", "all"), "hidden": 1, "vocab": 5, "seed": 7}
    return BoundProblem(SPECS["clipped_pg"], Problem(**{"spec": "clipped_pg", "head": "logprobs", **plain, **changes}))


def log_ratios(batch: GlobalBatch) -> Tensor:
    return (batch.policy - batch.fields["prev_logprobs"])[batch.fields["mask"]]


@pytest.mark.parametrize(("head", "width"), [("hidden", 16), ("logits", 1), ("logprobs", 1)])
def test_tokens_keep_clear_of_a_clip_by_the_coarsest_format(head: str, width: int) -> None:
    """A kernel that rounds float32 inputs to bfloat16 on the way moves a ratio by percents."""
    sizes = {"lengths": (999,), "masks": ("all",), "hidden": width, "vocab": 7, "logit_std": 0.3}
    near = {}
    for rounded_to in (None, "bfloat16"):
        given = {"head": head, "rounded_to": rounded_to, "scenario": {"ratios": "everywhere"}, **sizes}
        off = torch.cat([log_ratios(bind(seed=seed, **given).batch) for seed in range(12)]) - math.log(1.2)
        assert len(off) > 6000
        near[rounded_to] = float(off.abs().min())
    assert near[None] < 6 * 2.0**-8 / math.sqrt(3) < near["bfloat16"]


def test_tokens_whose_clip_depends_on_rounding_are_masked() -> None:
    """In bfloat16, log-probabilities move by percents.

    A ratio 5% beyond the clip cannot be distinguished from one inside.
    """
    batch = bind(dtype="bfloat16", lengths=(64,), masks=("all",), scenario={"ratios": "everywhere"}).batch
    coarse, edge = 2.0**-8 / 3**0.5, float(torch.tensor(1.2).log())
    assert len(log_ratios(batch))
    assert bool(((log_ratios(batch) - edge).abs() > 3 * coarse).all())


def test_a_kink_is_found_where_a_probe_crosses_it() -> None:
    bound = bind(scenario={"ratios": "everywhere"})
    batch, spec = bound.batch, bound.bound_spec
    values = spec.token_values("logprobs", batch.leaves, batch.fields)
    still = torch.zeros_like(values.logprobs)
    assert not near_kinks(batch, spec, values, {"logprobs": (still + 1e-9)[None]}).any()
    moved = torch.zeros_like(values.logprobs)
    moved[3] = 10.0  # far beyond the clip, from wherever it was
    tokens = near_kinks(batch, spec, values, {"logprobs": torch.stack([still, moved])})
    assert tokens.nonzero().flatten().tolist() == [3]


def test_an_exact_tie_is_no_kink() -> None:
    batch = bind(scenario={"ratios": "on-policy"}).batch
    assert int(batch.fields["valid_tokens"]) == 14


# What is a choice

CHOICES: dict[str, Callable[[Tensor], Any]] = {
    "comparison": lambda x: x > 0.5,
    "maximum": lambda x: torch.maximum(x, torch.full_like(x, 0.5)),
    "fmin": lambda x: torch.fmin(x, torch.full_like(x, 0.5)),
    "max of two": lambda x: torch.max(x, torch.full_like(x, 0.5)),
    "clamp": lambda x: x.clamp(0.5, 2.0),
    "clamp, upper": lambda x: x.clamp(max=0.5),
    "clamp in place": lambda x: x.clone().clamp_(min=0.5),
    "clip": lambda x: torch.clip(x, 0.5),
    "relu": lambda x: torch.relu(x - 0.5),
    "relu of nn.functional": lambda x: F.relu(x - 0.5),
    "relu in place": lambda x: (x - 0.5).relu_(),
    "relu6": lambda x: F.relu6(x - 0.5),
    "leaky_relu": lambda x: F.leaky_relu(x - 0.5),
    "elu": lambda x: F.elu(x - 0.5, alpha=2.0),
    "prelu": lambda x: F.prelu(x - 0.5, torch.tensor(0.25, dtype=x.dtype)),
    "hardtanh": lambda x: F.hardtanh(x - 1.5),
    "hardtanh with edges": lambda x: F.hardtanh(x, 0.5, 9.0),
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
    "softshrink": lambda x: F.softshrink(x, 0.5),
    "hardsigmoid": lambda x: F.hardsigmoid(x + 2.5),
    "abs": lambda x: (x - 0.5).abs(),
    "sign": lambda x: (x - 0.5).sign(),
    "l1_loss": lambda x: F.l1_loss(x, torch.full_like(x, 0.5), reduction="none"),
    "hinge": lambda x: F.margin_ranking_loss(
        x, torch.full_like(x, 0.5), torch.ones_like(x), margin=0.0, reduction="none"
    ),
    "amax": lambda x: torch.stack([x, torch.full_like(x, 0.5)]).amax(0),
    "max along a dim": lambda x: torch.stack([x, torch.full_like(x, 0.5)]).max(0),
    "aminmax": lambda x: torch.aminmax(torch.stack([x, torch.full_like(x, 0.5)]), dim=0),
    "argmax": lambda x: torch.stack([x, torch.full_like(x, 0.5)]).argmax(0),
    "argmin": lambda x: torch.stack([x, torch.full_like(x, 0.5)]).argmin(0),
    "topk": lambda x: torch.stack([x, torch.full_like(x, 0.5)], 1).topk(1),
    "smallest of topk": lambda x: torch.stack([x, torch.full_like(x, 0.5)], 1).topk(1, largest=False),
    "largest in a place": lambda x: torch.full_like(x, 0.5).scatter_reduce(0, torch.arange(2), x, "amax"),
    "smallest in a place": lambda x: torch.full_like(x, 0.5).scatter_reduce(0, torch.arange(2), x, "amin"),
    "norm of order 1": lambda x: torch.linalg.vector_norm((x - 0.5)[:, None], 1, dim=1),
    "norm of infinite order": lambda x: torch.linalg.vector_norm(
        torch.stack([x, torch.full_like(x, 0.5)]), math.inf, dim=0
    ),
    "comparison of integers": lambda x: torch.zeros(2, dtype=torch.int64) < x - 0.5,
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_chooses_by_size_is_recorded(name: str) -> None:
    def outcomes(*numbers: float) -> list[Tensor]:
        with RecordChoices() as record:
            CHOICES[name](torch.tensor(numbers, dtype=torch.float64))
        return record.outcomes

    below, above = outcomes(0.4, 0.4), outcomes(0.4, 0.6)
    assert any(torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1]) for a, b in zip(below, above, strict=True))
    assert any(bool((tie[0] == 0).all()) for tie in outcomes(0.5, 0.5))


def test_what_is_smooth_is_no_choice() -> None:
    with RecordChoices() as record:
        x = torch.ones(3, dtype=torch.float64)
        _ = x.log_softmax(0) + x.exp().sum() / x.sort().values + F.softplus(x) - torch.where(x == 1, x, 0.0)
        _ = torch.arange(3) > 1
        _ = x.scatter_reduce(0, torch.arange(3), x, "sum"), torch.linalg.vector_norm(x, 2)
    assert not record.outcomes


# Which tokens a choice belongs to


@pytest.mark.parametrize(
    ("lengths", "changed", "expected"),
    [
        ((2, 3), [0, 1, 0, 0, 0], [1]),
        ((2, 3), [0, 1], [2, 3, 4]),
        ((2, 3), [[0, 0, 0, 1, 0]], [3]),
        ((2, 3), [[0, 0], [0, 1], [0, 0], [0, 0], [1, 1]], [1, 4]),
        ((2, 3), [1, 1, 1], []),
        ((0, 2), [1, 0], [0]),  # as many tokens as sequences: the first token, or the first sequence
        ((0, 2), [0, 1], [0, 1]),
    ],
)
def test_tokens_of_an_outcome(lengths: tuple[int, ...], changed: list[Any], expected: list[int]) -> None:
    batch = bind(lengths=lengths, masks=("all",) * len(lengths)).batch
    assert tokens_of(torch.tensor(changed, dtype=torch.bool), batch).nonzero().flatten().tolist() == expected


def test_tokens_of_an_outcome_of_groups() -> None:
    bound = BoundProblem(
        SPECS["preference"],
        Problem(
            spec="preference", head="rewards", dtype="float32", lengths=(1, 2, 1, 2), masks=("all",) * 4, hidden=1,
            vocab=1, seed=7, group_size=2,
        ),
    )  # fmt: skip
    changed = torch.tensor([False, True])
    assert tokens_of(changed, bound.batch).nonzero().flatten().tolist() == [3, 4, 5]


def test_all_of_a_batch_at_once_masks_nothing() -> None:
    assert not tokens_of(torch.tensor(True), bind().batch).any()


def capped(values: Any, batch: Any, options: Any) -> Tensor:
    """A loss of logits, which stops at a probability of 0.3."""
    logprobs = values.logits.log_softmax(-1).gather(1, batch.labels[:, None]).squeeze(1)
    return torch.where(batch.mask, logprobs.clamp(max=math.log(0.3)), 0.0).sum()


def test_probabilities_of_logits_stay_clear_of_a_kink() -> None:
    """To move all logits alike changes no probability, so the label's moves against the others."""
    spec = lossgate.spec("capped", uses=("logits",), kinks=True)(capped)
    problem = Problem(
        spec="capped", head="logits", dtype="bfloat16", lengths=(400,), masks=("all",), hidden=1, vocab=5, seed=3
    )
    bound = BoundProblem(spec, problem)
    logits = bound.batch.leaves["logits"].double()
    odds = logits.softmax(-1).gather(1, bound.batch.fields["labels"][:, None]).squeeze(1).logit()
    distance = (odds - math.log(0.3 / 0.7)).abs()
    gap = 2 * 6 * 2.0**-8 * float(logits.abs().max()) / 3**0.5
    assert 50 < int(bound.batch.fields["mask"].sum()) < 399
    assert bool((distance[bound.batch.fields["mask"]] >= gap).all())


class Grid(lossgate.Batch):
    grid: Tensor = lossgate.field("token vocab", "numbers that no move changes")


def gridded(values: Any, batch: Any, options: Any) -> Tensor:
    own = torch.where(batch.mask, values.logprobs, 0.0)[:, None]
    return torch.where(batch.grid > 0, own, 2 * own).sum()


def test_what_has_as_many_entries_as_there_are_moves_is_not_taken_for_moves() -> None:
    spec = lossgate.spec("gridded", batch=Grid, kinks=True)(gridded)
    problem = Problem(
        spec="gridded", head="logits", dtype="bfloat16", lengths=(7,), masks=("all",), hidden=1, vocab=7, seed=3
    )
    assert int(BoundProblem(spec, problem).batch.fields["mask"].sum()) == 6


def bounded(values: Any, batch: Any, options: Any) -> Tensor:
    """A loss that clamps in place, which torch does not map over moves: it clamps move by move."""
    return torch.where(batch.mask, (values.logprobs * 1.0).clamp_(min=-1.0), 0.0).sum()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_moves_that_torch_runs_otherwise_than_one_run_are_run_one_by_one() -> None:
    spec = lossgate.spec("bounded", kinks=True)(bounded)
    problem = Problem(
        spec="bounded", head="logits", dtype="bfloat16", lengths=(400,), masks=("all",), hidden=1, vocab=5, seed=3
    )
    batch = BoundProblem(spec, problem).batch
    mask, logits = batch.fields["mask"], batch.leaves["logits"].double()
    logprobs = logits.log_softmax(-1).gather(1, batch.fields["labels"][:, None]).squeeze(1)
    distance, gap = (logprobs + 1.0).abs(), 6 * 2.0**-8 * float(logits.abs().max()) / 3**0.5
    assert 50 < int(mask.sum()) < 399
    assert bool((distance[mask] >= gap).all())
