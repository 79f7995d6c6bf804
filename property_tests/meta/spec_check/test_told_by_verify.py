# SPDX-License-Identifier: Apache-2.0
"""A run says that a spec is unfit, if a kernel of it does not agree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lossgate import Candidate, candidate, spec, verify


@spec("unclamped", heads=("logprobs",))
def unclamped(values: Any, batch: Any, options: Any) -> Tensor:
    """It is NaN where nothing is trained."""
    return -torch.where(batch.mask, values.logprobs, 0.0).sum() / batch.valid_tokens


@spec("clamped", heads=("logprobs",))
def clamped(values: Any, batch: Any, options: Any) -> Tensor:
    """It is 0 there."""
    return -torch.where(batch.mask, values.logprobs, 0.0).sum() / batch.valid_tokens.clamp(min=1)


def right(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return -inputs.logprobs[inputs.mask].sum() / inputs.valid_tokens.clamp(min=1)


def wrong(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return 2 * right(inputs, options, mesh)


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (candidate(unclamped, head="logprobs")(right), True),
        (candidate(clamped, head="logprobs")(wrong), False),
        (candidate("nll", head="logprobs")(wrong), False),
    ],
    ids=["unfit", "fit", "built in"],
)
def test_a_run_says_that_a_spec_is_unfit(kernel: Candidate, told: bool) -> None:
    found = verify(kernel, layouts=["single"], dtypes=["float32"], properties=["agreement", "nothing-trained"])
    assert found.verdict == "DISAGREE"
    lines = str(found).splitlines()
    says = [line for line in lines if line.startswith("Spec unclamped may be wrong, and not the kernel. ")]
    assert bool(says) is told
    if told:
        (line,) = says
        assert line.endswith(
            "property_tests/meta/spec_check/test_told_by_verify.py says: with nothing trained, the loss is not finite, "
            "or a gradient is not 0"
        )
        assert lines[lines.index(line) + 1].startswith("  change: divide by batch.valid_tokens.clamp(min=1)")
