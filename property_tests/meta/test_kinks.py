# SPDX-License-Identifier: Apache-2.0
"""Tokens near a kink, where rounding could change the outcome of a comparison, are masked."""

from typing import Any

import torch
from torch import Tensor

from lossgate import Problem
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.kinks import _near_kinks
from lossgate.losses import SPECS
from lossgate.problems.batch import GlobalBatch


def bind(**changes: Any) -> BoundProblem:
    plain = {"dtype": "float32", "lengths": (9, 7), "masks": ("all", "all"), "hidden": 1, "vocab": 5, "seed": 7}
    return BoundProblem(SPECS["clipped_pg"], Problem(**{"spec": "clipped_pg", "head": "logprobs", **plain, **changes}))


def log_ratios(batch: GlobalBatch) -> Tensor:
    return (batch.policy - batch.fields["prev_logprobs"])[batch.fields["mask"]]


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
    none, _ = _near_kinks(batch, spec, values, {"logprobs": torch.stack([still, still + 1e-9])})
    assert not none.any()
    moved = torch.zeros_like(values.logprobs)
    moved[3] = 10.0  # far beyond the clip, from wherever it was
    tokens, _ = _near_kinks(batch, spec, values, {"logprobs": torch.stack([still, moved])})
    assert tokens.nonzero().flatten().tolist() == [3]


def test_an_exact_tie_is_no_kink() -> None:
    batch = bind(scenario={"ratios": "on-policy"}).batch
    assert int(batch.fields["valid_tokens"]) == 14
