# SPDX-License-Identifier: Apache-2.0
"""Declarations and what a candidate returns: each slip is told in one clear line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lossgate import ANY, CandidateError, Contract, Finding, Outputs, Precision, Problem, UsageError, candidate, suite
from lossgate.cases.execute import execute
from lossgate.cases.materialize import materialize
from lossgate.declaration.loading import load_candidates
from lossgate.engine.failure_files import read_failure
from lossgate.losses import find_spec
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]


def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
    return inputs.hidden.sum()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"axes": ("pp",)}, "unknown mesh axis 'pp'; expected any of dp, cp, tp"),
        ({"dtypes": ("int8",)}, "unknown dtype 'int8'; expected any of float32, bfloat16, float16"),
        (
            {"precision": {"float32": Precision()}},
            "no Precision for dtype 'bfloat16'; give one for each of float32, bfloat16, or one for all",
        ),
    ],
)
def test_bad_declarations(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        candidate("nll", head="hidden", **changes)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("spec", "changes", "told"),
    [
        ("nope", {}, "unknown spec 'nope'; expected one of nll"),
        (
            "nll",
            {"head": "embeddings"},
            "candidate 'kernel': spec 'nll' has no head 'embeddings'; expected one of hidden, logits",
        ),
        (
            "nll",
            {"supports": {"temprature": ANY}},
            "supports['temprature'] is no option of spec 'nll'; expected any of bias, vocab_split, reduction, temp",
        ),
        (
            "nll",
            {"supports": {"temperature": (1.0, 9.0)}},
            "supports['temperature'] allows 9.0, which spec 'nll' does not; expected 0.3 to 3",
        ),
        (
            "nll",
            {"supports": {"reduction": "none"}},
            "supports['reduction'] allows 'none', which spec 'nll' does not; expected mean | sum",
        ),
        (
            "nll",
            {"contract": Contract(metrics={"accuracy": {}})},
            "contract names metric 'accuracy'; spec 'nll' has entropy, n_seqs",
        ),
        (
            "nll",
            {"contract": Contract(grads={"logits": {}})},
            "contract names the gradient of 'logits'; head 'hidden' has hidden, weight, bias",
        ),
        ("nll", {"tiles": {"batch": 4}}, "tiles names dim 'batch'; expected token, vocab or hidden"),
        (
            "nll",
            {"differentiable": ("entropy",)},
            "differentiable=('entropy',); expected 'loss', alone or with others of ('loss', 'logprobs')",
        ),
    ],
)
def test_declarations_that_do_not_fit_the_spec(spec: str, changes: dict[str, Any], told: str) -> None:
    declared = candidate(spec, **{"head": "hidden", **changes})(kernel)
    with pytest.raises(UsageError) as error:
        find_spec(declared.spec).check(declared)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Precision(logits="fp32"), "Precision(logits='fp32'): expected one of float32, bfloat16, float16"),
        (lambda: Precision(chunk=0), "Precision(chunk=0): expected a positive number of tokens, or None"),
        (lambda: Precision(grads_in_forward="yes"), "Precision(grads_in_forward='yes'): expected True or False"),
        (lambda: Contract(loss={"pp": "sum"}), "Contract(loss): unknown mesh axis 'pp'; expected one of dp, cp, tp"),
        (
            lambda: Contract(grads={"weight": {"dp": "mean"}}),
            "Contract(grads['weight']): dp='mean'; expected one of replicate, sum, avg, min, max",
        ),
        (lambda: suite(kernel), "expected a candidate; decorate the kernel with @lossgate.candidate(...)"),
        (lambda: load_candidates("nowhere.py"), "nowhere.py: no such file"),
        (
            lambda: load_candidates("no.such.module"),
            "no.such.module: no such module; expected a file ending in .py or an importable module",
        ),
        (lambda: load_candidates("json"), "json: no candidate in it; decorate a kernel with @lossgate.candidate(...)"),
        (lambda: read_failure(Path("nowhere.json")), "can't read nowhere.json: No such file or directory"),
    ],
)
def test_other_bad_input(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert told in str(error.value)


def test_files_with_candidates(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import lossgate, neighbour\n"
        "@lossgate.candidate('nll', head='hidden')\ndef one(inputs, options, mesh): ...\n"
        "@lossgate.candidate('nll', head='logits')\ndef two(inputs, options, mesh): ...\nalias = two\n"
    )
    with pytest.raises(
        UsageError, match=r"mine\.py: can't be imported: ModuleNotFoundError: No module named 'neighbour'"
    ):
        load_candidates(str(file))
    (tmp_path / "neighbour.py").write_text("")
    assert [found.name for found in load_candidates(str(file))] == ["one", "two"]
    (two,) = load_candidates(f"{file}:two")
    assert two.source == f"{file}:two"
    assert load_candidates(two.source) == [two]
    with pytest.raises(UsageError, match="no candidate named 'three'"):
        load_candidates(f"{file}:three")


PROBLEM = Problem(spec="nll", head="hidden", dtype="float32", lengths=(3,), masks=("all",), hidden=2, vocab=4)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda i: 3.0, "returned float; expected lossgate.Outputs, or the loss as a tensor"),
        (lambda i: i.hidden.sum(0), "returned loss of shape [2]; expected []"),
        (lambda i: i.hidden.sum().bfloat16(), "returned loss in bfloat16; its Precision(loss=...) declares float32"),
        (lambda i: i.hidden.sum().detach(), "returned a detached loss, without a graph; it is declared differentiable"),
        (lambda i: Outputs(loss=1.0), "returned loss as float; expected a tensor"),  # type: ignore[arg-type]
        (
            lambda i: Outputs(loss=i.hidden.sum(), logprobs=torch.zeros(2)),
            "returned logprobs of shape [2]; expected [3]",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics={"acc": torch.tensor(1.0)}),
            "returned metric 'acc'; spec 'nll' has entropy, n_seqs",
        ),
        (
            lambda i: Outputs(loss=i.hidden.sum(), metrics={"entropy": torch.ones(1)}),
            "returned metric 'entropy' of shape [1]; expected []",
        ),
    ],
)
def test_what_a_candidate_must_not_return(make_world: MakeWorld, returned: Callable[[Any], Any], told: str) -> None:
    declared = candidate("nll", head="hidden")(lambda inputs, options, mesh: returned(inputs))
    with pytest.raises(CandidateError) as error:
        execute(declared, materialize(PROBLEM), make_world("single"))
    assert str(error.value).startswith(f"candidate '<lambda>' on rank 0 {told}")


def test_log_probabilities_that_are_declared_differentiable_must_be(make_world: MakeWorld) -> None:
    declared = candidate("nll", head="hidden", differentiable=("loss", "logprobs"))
    for outputs in (
        lambda i: Outputs(loss=i.hidden.sum()),
        lambda i: Outputs(loss=i.hidden.sum(), logprobs=torch.zeros(3)),
    ):
        with pytest.raises(CandidateError, match="logprobs, without a graph; it is declared differentiable"):
            execute(
                declared(lambda inputs, options, mesh, o=outputs: o(inputs)), materialize(PROBLEM), make_world("single")
            )


def test_contracts_that_leave_factors_to_the_caller_agree(make_world: MakeWorld) -> None:
    """A kernel whose loss and gradients are dp times too large, for a trainer that averages over dp (DDP, FSDP)."""
    from controls import STYLES, make

    from lossgate.cases.examine import examine

    right = make(STYLES["float32"][1])

    def averaged(inputs: Any, options: Any, mesh: Any) -> Outputs:
        outputs = right(inputs, options, mesh)
        assert isinstance(outputs, Outputs)
        return Outputs(loss=outputs.loss * mesh["dp"].size())

    dp: Any = {"dp": "avg"}
    declared = candidate(
        "nll", head="hidden", axes=("dp",), contract=Contract(loss=dp, grads={"hidden": dp, "weight": dp})
    )(averaged)
    silent = candidate("nll", head="hidden", axes=("dp",))(averaged)
    problem = Problem(
        spec="nll",
        head="hidden",
        dtype="float32",
        layout=make_world("dp=2").layout,
        lengths=(5, 4),
        masks=("all", "all"),
        hidden=4,
        vocab=9,
    )
    world = make_world("dp=2")
    assert examine(declared, problem, world).agrees
    wrong = examine(silent, problem, world)
    assert wrong.findings[0].startswith("loss: 2 times the reference")


def test_outputs_are_put_together_as_the_contract_says(make_world: MakeWorld) -> None:
    """By default a metric is summed over dp, and log-probabilities are the same on every tp rank."""
    contract = Contract(metrics={"entropy": {"dp": "avg"}}, logprobs={"tp": "sum"})

    @candidate("nll", head="hidden", axes=("dp", "tp"), contract=contract)
    def of_its_rank(inputs: Any, options: Any, mesh: Any) -> Outputs:
        rank = float(mesh.get_local_rank("tp"))
        everything = 0.0 * inputs.hidden.sum() + 0.0 * inputs.weight.sum()
        return Outputs(
            loss=everything, logprobs=torch.full(inputs.labels.shape, 1 + rank), metrics={"entropy": torch.tensor(3.0)}
        )

    world = make_world("dp=2,tp=2")
    problem = replace(PROBLEM, layout=world.layout, lengths=(2, 2), masks=("all", "all"))
    result = execute(of_its_rank, materialize(problem), world)
    assert not result.faults
    assert result.outputs["entropy"].item() == 3
    assert result.outputs["logprobs"].tolist() == [3, 3, 3, 3]


def test_a_rank_without_tokens_owes_no_gradient_of_them(make_world: MakeWorld) -> None:
    """That of the weight, of which it has its share, it owes."""

    def leaves_early(inputs: Any, options: Any, mesh: Any) -> Any:
        return inputs.weight.sum() if not len(inputs.labels) else inputs.hidden.sum() + inputs.weight.sum()

    def forgets_the_weight(inputs: Any, options: Any, mesh: Any) -> Any:
        return inputs.hidden.sum() if not len(inputs.labels) else leaves_early(inputs, options, mesh)

    world = make_world("dp=2")
    batch, declare = materialize(replace(PROBLEM, layout=world.layout)), candidate("nll", head="hidden", axes=("dp",))
    assert not execute(declare(leaves_early), batch, world).faults
    assert execute(declare(forgets_the_weight), batch, world).faults == {
        "grad of weight": ("nothing reached it on rank 1",)
    }


def test_a_finding_is_declared_with_its_example() -> None:
    known = Finding(name="x-1", example=Path("x.json"))
    assert candidate("nll", head="hidden", finding=known)(kernel).finding is known
