# SPDX-License-Identifier: Apache-2.0
"""Each property has a candidate, or a problem, to which it does not apply."""

from dataclasses import replace

import pytest

from kernel_bank.property_bugs import right
from lossgate import ANY, Contract, Layout, Problem, candidate
from lossgate.cases.case import Case
from lossgate.declaration.candidate import Candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from property_tests.meta.properties.test_bugs import MakeWorld

PROBLEM = Problem(
    spec="nll", head="logits", dtype="float32", lengths=(5, 4), masks=("all", "holes"), hidden=4, vocab=6, seed=3
)
REWARDS = dense_candidate(SPECS["preference"], "rewards")
ROWS = dense_candidate(SPECS["nll"], "logprobs")


def declared(**changes: object) -> Candidate:
    """Returns the right kernel of logits, declared otherwise."""
    return candidate("nll", head="logits", **changes)(right("logits").kernel)  # type: ignore[arg-type]


NOT_FOR = {
    "upstream-one": candidate("token_logprobs", head="logits", differentiable=("logprobs",))(right("logits").kernel),
    "frozen-inputs": right("logits"),
    "int32-ids": declared(tokens="rows"),
    "masked-ids": right("logprobs"),
    "vocabulary-order": right("logprobs"),
    "temperature": right("logprobs"),
    "microbatches": declared(axes=("dp",), contract=Contract(loss={"dp": "replicate"})),
    "other-padding": REWARDS,
    "idle-rank": declared(),
    "budgets": declared(),
    "extreme-logits": right("logprobs"),
    "suppressed-ids": right("hidden"),
    "hopeless-labels": right("logprobs"),
    "bad-inputs": right("logits"),
}
"""A candidate for each property that is not for every one."""

SAYS_NOTHING = {
    "upstream-one": replace(PROBLEM, dtype="float16"),
    "sequence-order": replace(PROBLEM, lengths=(5,), masks=("all",)),
    "autocast": PROBLEM,
    "temperature": replace(PROBLEM, options={"softcap": 30.0}),
    "reduction-order": PROBLEM,
    "idle-rank": PROBLEM,
    "device": replace(PROBLEM, layout=Layout(dp=3)),
    "masked-nan": PROBLEM,
    "extreme-logits": replace(PROBLEM, options={"softcap": 30.0}),
    "suppressed-ids": replace(PROBLEM, vocab=1),
    "hopeless-labels": replace(PROBLEM, lengths=(1, 1), masks=("all", "all")),
    "bad-inputs": replace(PROBLEM, masks=("none", "none")),
}
"""A problem for each property of which some say nothing."""


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_applies_to_those_that_can_break_it(name: str) -> None:
    others = [kernel for of, kernel in NOT_FOR.items() if of == name]
    assert not any(PROPERTIES[name].applies(kernel) for kernel in others)
    everyone = [right("logits"), right("hidden"), right("logprobs"), REWARDS, *NOT_FOR.values()]
    refused = [kernel for kernel in everyone if not PROPERTIES[name].applies(kernel)]
    assert bool(refused) == bool(others), [kernel.name for kernel in refused]


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_a_problem_that_says_nothing_of_a_property_is_left_out(name: str, make_world: MakeWorld) -> None:
    problem = SAYS_NOTHING[name]
    kernel = replace(right("logits"), dtypes=("float32", "float16"), supports={"temperature": ANY, "softcap": ANY})
    kernel = replace(kernel, precision=dict.fromkeys(kernel.dtypes, kernel.precision["float32"]))
    kernel = replace(kernel, axes=problem.layout.axes)
    case = Case(kernel, problem, make_world(str(problem.layout)))
    assert not PROPERTIES[name].fits(case)
