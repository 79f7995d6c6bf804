# SPDX-License-Identifier: Apache-2.0
"""Losses as public libraries compute them agree under the conventions of their callers, and break
others.
"""

from dataclasses import replace

import pytest

from kernel_bank.as_upstream import AS_UPSTREAM
from lossgate import Conventions
from lossgate.engine.cell_record import Verdict
from lossgate.engine.plan import plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layout", ["single", "dp=2"])
@pytest.mark.parametrize("name", sorted(AS_UPSTREAM, key=lambda name: AS_UPSTREAM[name].spec.name, reverse=True))
def test_it_agrees_under_its_conventions(name: str, layout: str) -> None:
    kernel, settings = AS_UPSTREAM[name], Settings(layouts=(layout,), shrink_calls=0)
    assert not kernel.exempt
    (cell,) = plan([kernel], settings)
    result = run_cell(cell, settings)
    assert result.verdict is Verdict.AGREE, result.reasons


BROKEN: dict[str, tuple[str, Conventions, str]] = {
    "counts of the batch": ("areal_sft", Conventions(under_mask="usual", untrained="nan"), "loss"),
    "0 without training": (
        "trl_bnpo",
        Conventions(under_mask="usual", counts="own", untrained="nan"),
        "property nothing-trained: with nothing trained the loss is 0, not NaN",
    ),
    "no error without training": (
        "verl_value",
        Conventions(under_mask="usual", counts="own", untrained="error"),
        "property nothing-trained: with nothing trained it raises no error",
    ),
    "NaN under the mask": (
        "verl_value",
        Conventions(counts="own"),
        "property masked-nan: loss, with NaN at masked tokens: NaN",
    ),
    "an input that is kept": (
        "liger_cross_entropy",
        Conventions(counts="own"),
        "property inputs-kept: the kernel wrote to logits",
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", BROKEN)
def test_it_breaks_another_convention(name: str) -> None:
    kernel, conventions, words = BROKEN[name]
    candidate = replace(AS_UPSTREAM[kernel], conventions=conventions)
    settings = Settings(layouts=("dp=2" if words == "loss" else "single",), shrink_calls=0)
    (cell,) = plan([candidate], settings)
    assert run_cell(cell, settings).reasons[0].startswith(words)
