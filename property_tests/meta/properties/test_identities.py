# SPDX-License-Identifier: Apache-2.0
"""Identities that are no property of their own, because agreement sees what would break them."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from kernel_bank.property_bugs import right
from lossgate.base.layout import Layout
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.precision import Precision
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import run_case
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from property_tests.meta.properties.test_bugs import MakeWorld, problems


def cross_entropy(total: float) -> Candidate:
    """Returns a kernel whose softmax adds up to a number in backward."""

    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        logits = inputs.logits.float() / options.temperature
        logprobs, weights = logits.log_softmax(-1), inputs.mask / inputs.valid_tokens.clamp(min=1)
        loss = -(logprobs.gather(1, inputs.labels[:, None]).squeeze(1) * weights).sum()
        more = (logprobs.detach().exp() * logits * weights[:, None]).sum()
        return loss + (total - 1) * (more - more.detach())

    plain = right("logits")
    return replace(plain, kernel=kernel, precision=dict.fromkeys(plain.dtypes, Precision()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_softmax_that_adds_up_to_a_little_more_disagrees(dtype: str, make_world: MakeWorld) -> None:
    """The gradients of a row of logits then do not add up to 0."""
    drawn = [p for p in problems("logits", Layout(), dtype) if p.options.get("temperature", 1.0) == 1.0]
    world, held_to = make_world("single"), PROPERTIES["agreement"]

    def findings(total: float) -> set[str]:
        cases = [Case(cross_entropy(total), problem, world) for problem in drawn]
        return {line.partition(":")[0] for case in cases for line in run_case(case, held_to).findings}

    assert len(drawn) > 1
    assert findings(1.0) == set()
    assert findings(1.0003) == {"grad of logits"}


def test_hopeless_labels_spare_a_right_kernel_with_a_large_vocabulary(make_world: MakeWorld) -> None:
    """If half of the ids were far below, a gradient would be a sum of thousands of equal terms,
    which rounds the same way again and again: off by 2.3 times the tolerance on this problem.
    """
    dense = dense_candidate(SPECS["nll"], "hidden")
    drawn = sample_problems(dense, Layout(), "float32", 10, 1)[1]
    changes = {"masks": ("all", "all"), "forced_labels": (), "outliers": (), "logit_std": 1.0}
    large = replace(drawn, vocab=16384, lengths=(3, 5), hidden=16, **changes)
    checked = PROPERTIES["hopeless-labels"].check(Case(dense, large, make_world("single")))
    assert checked.comparisons
    assert max(comparison.margin for comparison in checked.comparisons) < 0.5
