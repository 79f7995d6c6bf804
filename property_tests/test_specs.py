# SPDX-License-Identifier: Apache-2.0
"""Every spec, end to end: an honest dense candidate agrees at every head and layout, a wrong one does not, and every option counts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_candidates import Spoil, dense_candidate

from lossgate import Layout
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run import run_cell
from lossgate.engine.settings import Settings
from lossgate.engine.strategies import sample_problems
from lossgate.specs import SPECS
from lossgate.specs.base import FEATURES, Option
from lossgate.specs.materialize import materialize
from lossgate.specs.reference import run_reference

LAYOUTS = ("single", "dp=2", "cp=2", "tp=2", "dp=2,cp=2,tp=2")
SETTINGS = Settings(examples=12, rounds=12)
FAMILIES = [(name, head) for name, spec in SPECS.items() for head in spec.inputs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "head"), FAMILIES)
def test_an_honest_candidate_agrees(name: str, head: str, layout: str) -> None:
    """Conclusively: every branch that the spec declares is visited, and every planted error seen."""
    result = run_cell(Cell(dense_candidate(name, head), Layout.parse(layout), "float32"), SETTINGS)
    assert result.verdict is Verdict.AGREE, result.reasons
    assert not result.missing_branches


def shifted_mask(batch: dict[str, Any], options: Any) -> Any:
    batch["mask"] = batch["mask"].roll(1)
    return options


def every_sample(batch: dict[str, Any], options: Any) -> Any:
    batch["sample_mask"] = torch.ones_like(batch["sample_mask"])
    return options


SPOILT: dict[str, Spoil] = {
    "nll": shifted_mask,
    "dpo": lambda _, o: replace(o, preference_average_log_probs=not o.preference_average_log_probs),
    "preference": every_sample,
    "clipped_pg": lambda _, o: replace(o, ratio_clip_max=10.0),
    "grpo": lambda _, o: replace(o, clip_lower=o.clip_lower + 0.05),
    "value": lambda _, o: replace(o, cliprange=None),
    "distill": lambda _, o: replace(o, kl_type="reverse" if o.kl_type == "forward" else "forward"),
    "token_logprobs": lambda _, o: replace(o, temperature=1.0),
}
"""One line changed in each."""


@pytest.mark.parametrize("name", SPECS)
def test_a_wrong_candidate_does_not(name: str) -> None:
    head = next(iter(SPECS[name].inputs))
    result = run_cell(Cell(dense_candidate(name, head, SPOILT[name]), Layout(), "float32"), replace(SETTINGS, shrink_calls=20))
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None


def changed_results(name: str, option: Option) -> bool:
    """Whether another value of the option, on the same numbers, changes an output or a gradient of some problem."""
    spec = SPECS[name]
    candidate = dense_candidate(name, next(iter(spec.inputs)))
    for problem in sample_problems(candidate, Layout(), "float32", 150, seed=3):
        batch = materialize(problem)
        before = run_reference(batch)
        values = option.choices if option.interval is None else option.interval
        for value in values:
            options = {**problem.options, option.name: value}
            if value == problem.options.get(option.name, option.default) or not spec.allows(options):
                continue
            after = run_reference(replace(batch, problem=replace(problem, options=options)))
            if any(not torch.equal(before[output], after[output]) for output in before if output in after):
                return True
    return False


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, id=f"{name}-{option.name}")
        for name, spec in SPECS.items()
        for option in spec.options
        if len(set(option.choices)) != 1
    ],
)
def test_every_option_counts(name: str, option: Option) -> None:
    assert changed_results(name, option)


@pytest.mark.parametrize("name", SPECS)
def test_options_say_what_they_mean(name: str) -> None:
    spec = SPECS[name]
    for option in spec.options:
        assert option.meaning
        assert option.name not in FEATURES
        assert option.allows(option.default)
    assert spec.allows({})
