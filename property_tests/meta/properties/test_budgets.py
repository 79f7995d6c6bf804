# SPDX-License-Identifier: Apache-2.0
"""Budgets: how they are declared, and what is said where a kernel goes over one."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate import Budgets, Layout, Problem, UsageError, candidate
from lossgate.cases.case import Case
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.size_expression import SizeExpression
from lossgate.engine.case_result import run_case
from lossgate.properties import PROPERTIES
from lossgate.properties.resources import demanding_problem
from lossgate.worlds.base import World
from property_tests.meta.command_line import Lossgate
from property_tests.meta.evidence_lines import cells_in

SIZES = {"tokens": 100.0, "vocab": 512.0, "tp": 2.0, "chunk": 16.0}
PROBLEM = Problem(
    spec="nll", head="hidden", dtype="float32", lengths=(5, 4), masks=("all", "holes"), hidden=4, vocab=6, seed=3
)
TWO = replace(PROBLEM, layout=Layout(tp=2))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("chunk*vocab/tp", 4096),
        ("ceil(tokens/chunk)", 7),
        ("floor(tokens/chunk)", 6),
        ("tokens//chunk + tokens % chunk", 10),
        ("max(tokens, vocab) - min(tokens, vocab)", 412),
        ("3*(tp > 1)", 3),
        ("3*(tp == 1)", 0),
        ("tokens - 2.5 + -1", 96.5),
        ("  tokens ", 100),
    ],
)
def test_an_expression_has_a_value(text: str, value: float) -> None:
    assert SizeExpression(text).value(SIZES) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no expression"),
        ("tokens*", "'tokens*' is no expression"),
        ("tokens**9", "the operation tokens ** 9"),
        ("open('x')", "the call open('x')"),
        ("tokens.real", "the term tokens.real"),
        ("max(tokens, key=vocab)", "the call max(tokens, key=vocab)"),
        ("[1]", "the term [1]"),
        ("True", "the value True"),
        ("1 < tokens < 3", "the comparison 1 < tokens < 3"),
        ("max()", "the call max()"),
        ("(" * 3000, "is no expression"),
    ],
)
def test_what_is_no_expression_is_told(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        SizeExpression(text)
    assert said in str(error.value)
    assert "; expected numbers, names, + - * / // %, comparisons, and ceil, floor, max, min" in str(error.value)


def declare(budgets: Any, head: str = "hidden") -> Callable[..., Candidate]:
    return candidate("nll", head=head, axes=("tp",), dtypes=("float32", "bfloat16"), budgets=budgets)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Budgets(), "Budgets(): names no budget; expected at least one of largest_tensor, peak, saved,"),
        (lambda: Budgets(peak=4), "Budgets(peak=4): expected an expression in quotes, such as 'tokens*4'"),  # type: ignore[arg-type]
        (lambda: Budgets(peak="4 tokens"), "Budgets(peak=...): '4 tokens' is no expression; expected numbers"),
        (lambda: Budgets(peak="c", where={"c": 0}), "Budgets(where={'c': 0}): expected positive sizes by name"),
        (lambda: Budgets(peak="c", where=[1]), "Budgets(where=[1]): expected positive sizes by name, such as"),  # type: ignore[arg-type]
        (lambda: Budgets(peak="tp", where={"tp": 2}), "Budgets(where={'tp': 2}): 'tp' has a meaning already"),
        (
            lambda: declare(Budgets(peak="chunks*vocab", where={"chunk": 2})),
            "candidate(budgets=Budgets(peak='chunks*vocab')): unknown dim 'chunks'; did you mean 'chunk'?",
        ),
        (lambda: declare(Budgets(peak="hidden"), "logits"), "unknown dim 'hidden'; expected one of tokens,"),
        (lambda: declare(Budgets(peak="vocab"), "logprobs"), "unknown dim 'vocab'"),
        (lambda: declare("4*tokens"), "candidate(budgets='4*tokens'): expected lossgate.Budgets(...)"),
        (lambda: declare(Budgets(peak="4/(tp - 1)")), "Budgets(peak=...): '4/(tp - 1)' has no value with tp 1: float"),
        (lambda: declare(Budgets(peak="1e400")), "'1e400' is inf with any sizes; expected a finite number that is not"),
        (lambda: declare(Budgets(peak="1e400 - 1e400")), "'1e400 - 1e400' is nan with any sizes; expected a finite"),
        (lambda: declare(Budgets(peak="ceil(1e400)")), "'ceil(1e400)' has no value with any sizes: cannot convert"),
        (lambda: declare(Budgets(peak="1 - tp")), "'1 - tp' is -1 with tp 2; expected a finite number that is not"),
    ],
)
def test_a_wrong_declaration_is_an_error_where_it_is_made(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert said in str(error.value)


def test_budgets_pickle_and_compare() -> None:
    budgets = Budgets(peak="chunk*4", where={"chunk": 3})
    assert pickle.loads(pickle.dumps(budgets)) == budgets
    with pytest.raises(TypeError):
        budgets.where["chunk"] = 4  # type: ignore[index]


def _loss(inputs: Any, options: Any, mesh: Any) -> Tensor:
    logits = inputs.hidden @ inputs.weight.T
    total = logits.logsumexp(-1).sum() + torch.ones(4, 4).sum().item()
    dist.all_reduce(torch.ones(6), group=mesh.get_group("tp"))
    return total


@pytest.mark.parametrize(
    ("budget", "fits", "finding"),
    [
        (
            "largest_tensor",
            "tokens*vocab/tp",
            "forward makes float32[64, 512], 32,768 elements, in aten.mm.default; the budget largest_tensor is 1",
        ),
        (
            "peak",
            "20*tokens*vocab/tp",
            "in backward; the budget peak is 1 = 1 (tokens 64, vocab 1024)",
        ),
        ("saved", "4*tokens*vocab/tp + 4*tokens", "131,328 bytes live from forward to backward; the budget saved is"),
        ("collectives", "(tp > 1)", "a rank makes 1 collective, 1 all_reduce over tp; the budget collectives is 0"),
        (
            "host_waits",
            "1",
            "the host would wait for its device 1 time, first in aten._local_scalar_dense.default; the budget",
        ),
        ("bytes", "6*4*(tp > 1)", "a rank brings 24 bytes to collectives, 1 all_reduce over tp; the budget bytes is"),
    ],
)
def test_each_budget_has_a_finding_where_it_is_too_small(budget: str, fits: str, finding: str, make_world: Any) -> None:
    world = make_world("tp=2")
    assert faults(declare(Budgets(**{budget: fits}))(_loss), TWO, world) == ()
    small = "0" if budget in ("collectives", "bytes", "host_waits") else "1"
    (fault,) = faults(declare(Budgets(**{budget: small}))(_loss), TWO, world)
    assert finding in fault


def faults(kernel: Candidate, problem: Problem, world: World) -> tuple[str, ...]:
    return run_case(Case(kernel, problem, world), PROPERTIES["budgets"]).findings


def test_a_tensor_as_large_as_the_largest_input_is_allowed(make_world: Any) -> None:
    kernel = candidate("nll", head="logits", dtypes=("float32",), budgets=Budgets(largest_tensor="1"), name="doubled")(
        lambda inputs, options, mesh: (2 * inputs.logits).sum(),
        # a lambda has a name, and no source: it is not pickled here
    )
    assert faults(kernel, replace(PROBLEM, head="logits"), make_world("single")) == ()
    twice = replace(kernel, kernel=lambda inputs, options, mesh: torch.cat([inputs.logits] * 2).sum())
    (fault,) = faults(twice, replace(PROBLEM, head="logits"), make_world("single"))
    assert "float32[128, 512]" in fault


def test_a_budget_without_a_value_on_some_sizes_is_told_of_its_kernel(make_world: Any) -> None:
    """It ends its cell, and not the run."""
    kernel = declare(Budgets(peak="1/(tokens - 64)"))(_loss)
    (fault,) = faults(kernel, TWO, make_world("tp=2"))
    said = "Budgets(peak=...): '1/(tokens - 64)' has no value with tokens 64: division by zero"
    assert fault == f"candidate '_loss': {said}"


def test_a_failure_is_not_made_smaller() -> None:
    """The problem that is run is another in any case, or any problem says as much."""
    assert {held_to.name for held_to in PROPERTIES.values() if not held_to.shrinks} == {"bad-inputs", "budgets"}


@pytest.mark.parametrize(
    ("budgets", "sizes"),
    [
        (Budgets(largest_tensor="chunk*vocab/tp", where={"chunk": 16}), (64, 512)),
        (Budgets(largest_tensor="chunk*vocab/tp", where={"chunk": 1024}), (2048, 512)),
        (Budgets(largest_tensor="tokens*tile", where={"tile": 1024}), (64, 2048)),
        (Budgets(largest_tensor="tokens*vocab/tp"), (64, 512)),
        (Budgets(peak="1000000000"), (4096, 512)),
        (Budgets(collectives="3"), (64, 512)),
    ],
)
def test_the_problem_is_so_large_that_all_logits_are_over_budget(
    budgets: Budgets, sizes: tuple[int, int], make_world: Any
) -> None:
    """It does not grow for a budget that grows with the logits, and not without end."""
    found = demanding_problem(Case(declare(budgets)(_loss), TWO, make_world("tp=2")))
    assert (found.tokens, found.vocab // 2) == sizes


@pytest.mark.parametrize("layout", ["single", "dp=3", "cp=2", "tp=4", "dp=2,cp=2,tp=2"])
def test_ranks_have_as_many_tokens_whatever_the_layout(layout: str, make_world: Any) -> None:
    kernel = candidate("nll", head="hidden", axes=("dp", "cp", "tp"))(_loss)
    problem = replace(PROBLEM, layout=Layout.parse(layout), lengths=(5, 4, 3), masks=("all",) * 3)
    found = demanding_problem(Case(kernel, problem, make_world(layout))).partition
    assert {len(shard) for shard in found.token_shards.values()} == {64}
    assert {shard.rows for shard in found.vocab_shards} == {512}


FILE = """
import torch, lossgate

def declare(name, limit):
    budgets = lossgate.Budgets(largest_tensor=limit, peak="20*tokens*vocab")
    return lossgate.candidate("nll", head="hidden", dtypes=("float32",), name=name, budgets=budgets)

def kernel(inputs, options, mesh):
    logprobs = (inputs.hidden @ inputs.weight.T).log_softmax(-1)
    losses = -logprobs.gather(1, inputs.labels.clamp(0)[:, None]).squeeze(1)
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

small = declare("small", "16*vocab")(kernel)
ample = declare("ample", "tokens*vocab")(kernel)
"""


def test_evidence_and_reports_have_what_was_used(folder: Path, lossgate: Lossgate) -> None:
    (folder / "held.py").write_text(FILE)
    done = lossgate("verify", "held.py", "--evidence", "held.jsonl", "--property", "agreement", "--property", "budgets")
    assert done.returncode == 1
    over = (
        "forward makes float32[64, 512], 32,768 elements, in aten.mm.default; "
        "the budget largest_tensor is 16*vocab = 8,192 (tokens 64, vocab 512)"
    )
    assert f"  property budgets: {over}\n  to do: use less, or declare" in done.stdout
    small, ample = cells_in(folder / "held.jsonl")
    assert (small.verdict, ample.verdict) == ("DISAGREE", "AGREE")
    assert ample.resources["largest_tensor"] == {
        "elements": 32768,
        "forward": 32768,
        "backward": 32768,
        "budget": 32768,
    }
    assert small.resources["largest_tensor"]["budget"] == 8192
    assert ample.resources["problem"]["tokens"] == 64
    shown = lossgate("report", "held.jsonl", "--cell", "ample").stdout
    used = [
        "largest tensor: 32,768 elements of a budget of 32,768 (32,768 in forward, 32,768 in backward)",
        "saved for backward: 131,592 bytes",
        "brought to collectives: 0 bytes",
        "collectives: 0 calls",
        "measured with 64 tokens, 2 sequences, 512 vocab, 8 hidden, 1 dp, 1 cp, 1 tp, 4 itemsize, on each rank",
    ]
    assert [line for line in used if f"  {line}\n" not in shown] == [], shown
    (folder / "gate.toml").write_text('schema = 1\n[[require]]\ncandidates = ["ample"]\nkeeps = ["budgets"]\n')
    gate = lossgate("gate", "--policy", "gate.toml", "held.jsonl", "--junit", "junit.xml")
    junit = (folder / "junit.xml").read_text()
    assert "keeps: budgets\n" + used[0] in junit, (gate.stdout, junit)
