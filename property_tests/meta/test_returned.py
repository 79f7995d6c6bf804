# SPDX-License-Identifier: Apache-2.0
"""What a candidate returns is checked, and assembled as its contract says."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_bank.cross_entropy import STYLES, make
from lossgate import CandidateError, Contract, Layout, Outputs, Problem, candidate
from lossgate.cases.case import Case
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES
from lossgate.properties import PROPERTIES
from lossgate.specs.outputs import gradient_output
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

PROBLEM = Problem(spec="nll", head="hidden", dtype="float32", lengths=(3,), masks=("all",), hidden=2, vocab=4)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda i: 3.0, "returned float; expected lossgate.Outputs, or the loss as a tensor"),
        (lambda i: i.hidden.sum(0), "returned loss of shape [2]; expected []"),
        (lambda i: i.hidden.sum().bfloat16(), "returned loss in bfloat16; its Precision declares float32"),
        (
            lambda i: i.hidden.sum().detach(),
            "returned loss without a graph; it is declared differentiable; look for detach(), torch.no_grad() and ",
        ),
        (lambda i: i.hidden.sum().to("meta"), "returned loss on meta; its inputs are on cpu"),
        (lambda i: Outputs(), "returned no loss; spec 'nll' requires it"),
        (lambda i: Outputs(loss=1.0), "returned loss as float; expected a tensor"),  # type: ignore[arg-type]
        (
            lambda i: Outputs(loss=i.hidden.sum(), logprobs=torch.zeros(2)),
            "returned logprobs of shape [2]; expected [3]",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), token_entropy=torch.zeros(3)),
            "returned token_entropy; spec 'nll' has only loss, logprobs",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics={"acc": torch.tensor(1.0)}),
            "returned metric 'acc', which spec 'nll' does not have; expected one of entropy, n_seqs",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics={"entrpy": torch.tensor(1.0)}),
            "returned metric 'entrpy', which spec 'nll' does not have; did you mean 'entropy'?",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics={"entropy": torch.ones(1)}),
            "returned metric 'entropy' of shape [1]; expected []",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics={"entropy": "high"}),  # type: ignore[dict-item]
            "returned metric 'entropy' as str; expected a tensor",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics={3: torch.tensor(1.0)}),  # type: ignore[dict-item]
            "returned metric 3, which spec 'nll' does not have; expected one of entropy, n_seqs",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics=None),  # type: ignore[arg-type]
            'returned metrics=None; expected a dict of tensors, such as {"name": tensor}, and {} for none',
        ),
        (lambda i: Outputs(loss=i.hidden.sum().detach().numpy()), "returned loss as ndarray; expected a tensor"),
        (lambda i: None, "returned NoneType; expected lossgate.Outputs, or the loss as a tensor"),
        (lambda i: Layout.parse("x=2"), "raised UsageError: "),
    ],
)
def test_what_a_candidate_must_not_return(make_world: MakeWorld, returned: Callable[[Any], Any], message: str) -> None:
    declared = candidate("nll", head="hidden", name="returns")(lambda inputs, options, mesh: returned(inputs))
    with pytest.raises(CandidateError) as error:
        _ = Case(declared, PROBLEM, make_world("single")).result
    assert str(error.value).startswith(f"candidate 'returns' on rank 0 {message}")


def test_log_probabilities_that_are_declared_differentiable_must_be(make_world: MakeWorld) -> None:
    declared = candidate("nll", head="hidden", differentiable=("loss", "logprobs"), name="returns")
    for outputs, message in (
        (lambda i: Outputs(loss=i.hidden.sum()), "returned no logprobs, which is declared differentiable"),
        (
            lambda i: Outputs(loss=i.hidden.sum(), logprobs=torch.zeros(3)),
            r"returned logprobs without a graph; it is declared differentiable",
        ),
    ):
        case = Case(declared(lambda inputs, options, mesh, o=outputs: o(inputs)), PROBLEM, make_world("single"))
        with pytest.raises(CandidateError, match=message):
            _ = case.result


def test_contracts_that_leave_factors_to_the_caller_agree(make_world: MakeWorld) -> None:
    """Loss and gradients are dp times too large, as for a trainer that averages over dp."""
    right = make(STYLES["float32"][1])

    def averaged(inputs: Any, options: Any, mesh: Any) -> Outputs:
        outputs = right(inputs, options, mesh)
        assert isinstance(outputs, Outputs)
        return Outputs(loss=outputs.loss * mesh["dp"].size())

    dp: Any = {"dp": "avg"}
    contract = Contract(loss=dp, grads={"hidden": dp, "weight": dp})
    declared = candidate("nll", head="hidden", axes=("dp",), contract=contract)(averaged)
    without_contract = candidate("nll", head="hidden", axes=("dp",))(averaged)
    world = make_world("dp=2")
    problem = replace(PROBLEM, layout=world.layout, lengths=(5, 4), masks=("all", "all"), hidden=4, vocab=9)
    assert run_case(Case(declared, problem, world), PROPERTIES["agreement"]).agrees
    wrong = run_case(Case(without_contract, problem, world), PROPERTIES["agreement"])
    assert wrong.statistics[0].startswith("loss: 2 times the reference")


def test_outputs_are_assembled_as_the_contract_says(make_world: MakeWorld) -> None:
    """By default a metric is summed over dp, and log-probabilities are replicated over tp."""
    contract = Contract(metrics={"entropy": {"dp": "avg"}}, logprobs={"tp": "sum"})

    @candidate("nll", head="hidden", axes=("dp", "tp"), contract=contract)
    def by_rank(inputs: Any, options: Any, mesh: Any) -> Outputs:
        rank = float(mesh.get_local_rank("tp"))
        everything = 0.0 * inputs.hidden.sum() + 0.0 * inputs.weight.sum()
        return Outputs(
            loss=everything, logprobs=torch.full(inputs.labels.shape, 1 + rank), metrics={"entropy": torch.tensor(3.0)}
        )

    world = make_world("dp=2,tp=2")
    result = Case(by_rank, replace(PROBLEM, layout=world.layout, lengths=(2, 2), masks=("all", "all")), world).result
    outputs = {str(output): tensor for output, tensor in result.outputs.items()}
    assert not result.faults
    assert outputs["entropy"].item() == 3
    assert outputs["logprobs"].tolist() == [3, 3, 3, 3]


def test_a_rank_without_tokens_need_not_give_their_gradient(make_world: MakeWorld) -> None:
    """It must give the gradient of the weight, of which it has its share."""

    def leaves_early(inputs: Any, options: Any, mesh: Any) -> Any:
        return inputs.weight.sum() if not len(inputs.labels) else inputs.hidden.sum() + inputs.weight.sum()

    def forgets_the_weight(inputs: Any, options: Any, mesh: Any) -> Any:
        return inputs.hidden.sum() if not len(inputs.labels) else leaves_early(inputs, options, mesh)

    world = make_world("dp=2")
    problem, declare = replace(PROBLEM, layout=world.layout), candidate("nll", head="hidden", axes=("dp",))
    assert not Case(declare(leaves_early), problem, world).result.faults
    assert Case(declare(forgets_the_weight), problem, world).result.faults == {
        gradient_output("weight", ("vocab", "hidden")): ("backward did not reach it on rank 1; it is None there",)
    }


def test_a_rank_without_tokens_must_keep_the_graph(make_world: MakeWorld) -> None:
    """As in a loop over no chunk."""
    loop = candidate("nll", head="hidden", axes=("dp",), name="loop")(
        lambda inputs, options, mesh: sum((x.sum() for x in inputs.hidden.split(2) if len(x)), torch.zeros(()))
    )
    world = make_world("dp=2")
    with pytest.raises(CandidateError, match=r"on rank 1 returned loss without a graph; .*; this rank has no token, "):
        _ = Case(loop, replace(PROBLEM, layout=world.layout), world).result


def test_a_broken_interface_says_what_to_do_in_place_of_the_property() -> None:
    """What the property advises has nothing to do with it."""

    @candidate("nll", head="hidden", axes=("dp",), dtypes=("float32",))
    def chunked(inputs: Any, options: Any, mesh: Any) -> Any:
        total = torch.zeros(())
        for start in range(0, len(inputs.labels), 8):
            part = slice(start, start + 8)
            logits = inputs.hidden[part] @ inputs.weight.T
            losses = torch.nn.functional.cross_entropy(logits, inputs.labels[part], reduction="none")
            total = total + torch.where(inputs.mask[part], losses, 0.0).sum()
        return total / inputs.valid_tokens.clamp(min=1)

    cell = Cell(chunked, Layout(), "float32", also=(PROPERTIES["microbatches"],))
    result = run_cell(cell, replace(PROFILES["dev"], shrink_calls=0))
    assert result.verdict is Verdict.DISAGREE
    assert "adds 0.0 * x.sum() of each differentiable input x" in result.reasons[0]
    assert result.reasons[0].startswith("property microbatches: candidate 'chunked' on rank ")
    assert not any(reason.startswith("to do") for reason in result.reasons)


def test_a_broken_interface_is_the_verdict_of_its_case(make_world: MakeWorld) -> None:
    detached = candidate("nll", head="hidden", name="detached")(lambda inputs, options, mesh: torch.tensor(1.0))
    result = run_case(Case(detached, PROBLEM, make_world("single")), PROPERTIES["agreement"])
    assert (result.agrees, result.symptoms, result.problem) == (False, ("CandidateError",), PROBLEM)
    assert "without a graph" in result.findings[0]


@pytest.mark.parametrize("limit_is_raised", [True, False])
def test_a_compiled_kernel_meets_more_shapes_than_the_compiler_takes_by_itself(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, limit_is_raised: bool
) -> None:
    """It is compiled for each, and torch's limit of eight is afterwards what it was."""
    torch.compiler.reset()
    if not limit_is_raised:
        monkeypatch.setattr("lossgate.cases.rank_call.many_shapes", nullcontext)
    right = make(STYLES["float32"][1])

    @torch.compile(backend="eager", fullgraph=True, dynamic=False)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def doubled(inputs: Any, options: Any, mesh: Any) -> Outputs:
        outputs = right(inputs, options, mesh)
        assert isinstance(outputs, Outputs)
        assert compiled(inputs.hidden.detach()).shape == inputs.hidden.shape
        return outputs

    declared, world = candidate("nll", head="hidden", axes=("dp",))(doubled), make_world("dp=2")
    problems = [replace(PROBLEM, layout=world.layout, lengths=(2 * n,), seed=n) for n in range(1, 13)]
    findings = [run_case(Case(declared, problem, world), PROPERTIES["agreement"]).findings for problem in problems]
    assert any("FailOnRecompileLimitHit" in line for each in findings for line in each) is not limit_is_raised
    assert torch._dynamo.config.recompile_limit == 8
