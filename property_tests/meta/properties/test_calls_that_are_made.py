# SPDX-License-Identifier: Apache-2.0
"""Calls that properties make, each with a kernel that only this call shows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_bank.bugs import Wrap, on_inputs, on_loss
from kernel_bank.property_bugs import right
from lossgate import ANY, Candidate, Layout, Problem
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.placement import is_given, sample_problems
from lossgate.declaration.conventions import Conventions
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.worlds.base import World

MakeWorld = Callable[[str], World]


def found(kernel: Candidate, name: str, make_world: MakeWorld) -> CaseResult:
    """Checks a property on a problem of some tokens, on which the kernel agrees."""
    drawn = sample_problems(kernel, Layout(), "float32", 60, 3)
    problem = next(p for p in drawn if 8 < p.tokens < 100 and p.vocab > 2 and "none" not in p.masks)
    case = Case(kernel, problem, make_world("single"))
    assert run_case(case, PROPERTIES["agreement"]).agrees
    return run_case(case, PROPERTIES[name])


def as_rows(inputs: Any, mesh: Any) -> Any:
    """Reads logits with their number of columns as the distance of rows."""
    logits = inputs.logits
    return replace(inputs, logits=logits.as_strided(logits.shape, (logits.shape[1], 1), logits.storage_offset()))


def from_the_start(inputs: Any, mesh: Any) -> Any:
    """Reads the mask from where its memory begins."""
    return replace(inputs, mask=inputs.mask.as_strided(inputs.mask.shape, inputs.mask.stride(), 0))


def nothing_if_frozen(inputs: Any, mesh: Any) -> Any:
    return inputs if inputs.logits.requires_grad else replace(inputs, mask=torch.zeros_like(inputs.mask))


BUFFERS: list[Tensor] = []


def with_a_buffer(loss: Tensor, mesh: Any) -> Tensor:
    BUFFERS.append(torch.zeros(64))
    return loss


def with_the_last_buffer(loss: Tensor, mesh: Any) -> Tensor:
    BUFFERS[:] = [torch.zeros(64)]
    return loss


SHOWN: dict[str, tuple[str, Wrap, str]] = {
    "rows with gaps": ("strided-inputs", on_inputs(as_rows), "rows have gaps, as logits[:, :-1]"),
    "from the middle": ("strided-inputs", on_inputs(from_the_start), "within a larger tensor, as base[1:]"),
    "frozen": ("no-grad", on_inputs(nothing_if_frozen), "loss, if no input needs a gradient: got 0, want "),
    "kept": ("no-leaks", on_loss(with_a_buffer), "each call leaves 256 more bytes of tensors alive, in 4 equal calls"),
}


@pytest.mark.parametrize("call", SHOWN)
def test_a_call_shows_what_only_it_can(call: str, make_world: MakeWorld) -> None:
    name, wrap, words = SHOWN[call]
    assert found(right("logits"), name, make_world).agrees
    wrong = replace(right("logits"), kernel=wrap(right("logits").kernel), name=call)
    assert words in " ".join(found(wrong, name, make_world).findings)


def test_one_buffer_is_no_leak(make_world: MakeWorld) -> None:
    kernel = replace(right("logits"), kernel=on_loss(with_the_last_buffer)(right("logits").kernel))
    assert found(kernel, "no-leaks", make_world).agrees


def test_equal_numbers_come_expanded(make_world: MakeWorld) -> None:
    """A kernel that reads memory in order reads beyond a number that is expanded."""
    value = replace(dense_candidate(SPECS["value"], "values"), axes=())

    def wrong(inputs: Any, options: Any, mesh: Any) -> Any:
        returns = inputs.returns
        if 0 in returns.stride():
            returns = torch.cat([returns[:1], torch.zeros_like(returns[1:])])
        return value.kernel(replace(inputs, returns=returns), options, mesh)

    assert found(value, "strided-inputs", make_world).agrees
    faults = found(replace(value, kernel=wrong, name="wrong"), "strided-inputs", make_world).faults
    assert "loss has other bits if equal numbers are one that is expanded" in faults


def test_entropies_are_asked_for_beside_suppressed_ids(make_world: MakeWorld) -> None:
    dense = replace(dense_candidate(SPECS["token_logprobs"], "logits"), axes=(), supports={"temperature": ANY})

    def wrong(inputs: Any, options: Any, mesh: Any) -> Any:
        far = bool((inputs.logits < -1000).any())
        outputs = dense.kernel(inputs, options, mesh)
        return replace(outputs, token_entropy=2 * outputs.token_entropy) if far else outputs

    assert found(dense, "suppressed-ids", make_world).agrees
    findings = " ".join(found(replace(dense, kernel=wrong, name="wrong"), "suppressed-ids", make_world).findings)
    assert "token_entropy, with logits of -1e4" in findings


def test_a_metric_that_a_call_drops_on_every_rank_is_missing(make_world: MakeWorld) -> None:
    dense = dense_candidate(SPECS["value"], "values")

    def wrong(inputs: Any, options: Any, mesh: Any) -> Any:
        outputs = dense.kernel(inputs, options, mesh)
        return outputs if inputs.values.requires_grad else replace(outputs, metrics={})

    findings = " ".join(found(replace(dense, kernel=wrong, name="wrong"), "no-grad", make_world).findings)
    assert "vf_clipfrac, if no input needs a gradient: it is missing, although a plain call returns it" in findings


@pytest.mark.parametrize("name", ["same-call-twice", "after-another-shape"])
def test_the_last_seed_has_another_one(name: str, make_world: MakeWorld) -> None:
    kernel = right("logits")
    (problem,) = sample_problems(kernel, Layout(), "float32", 1, 3)
    last = replace(problem, seed=2**32 - 1)
    assert run_case(Case(kernel, last, make_world("single")), PROPERTIES[name]).agrees
    assert len({problem.another_seed(n) for n in range(5)}) == len({last.another_seed(n) for n in range(5)}) == 5


@pytest.mark.parametrize("name", ["same-call-twice", "after-another-shape"])
def test_the_other_call_keeps_to_the_conventions(name: str, make_world: MakeWorld) -> None:
    """With the sequences turned, or with another seed, some rank would have nothing to train."""

    def refuses(inputs, options, mesh):
        assert inputs.mask.any()
        return plain.kernel(inputs, options, mesh)

    plain, world = right("logits"), make_world("dp=2")
    conventions = Conventions(untrained="error", empty_ranks="refused")
    strict = replace(plain, kernel=refuses, conventions=conventions)
    (drawn,) = sample_problems(plain, Layout.parse("dp=2"), "float32", 1, 3)
    base = replace(drawn, lengths=(2, 2), masks=("holes",) * 2, options={}, forced_labels=(), outliers=())

    def allowed(problem: Problem) -> bool:
        return is_given(strict, BoundProblem(strict.spec, problem), problem.partition)

    drawn = (replace(base, seed=seed) for seed in range(200))
    telling = [one for one in drawn if allowed(one) and not allowed(replace(one, seed=one.another_seed()))]
    assert telling
    for problem in telling[:3]:
        assert run_case(Case(strict, problem, world), PROPERTIES[name]).agrees
