# SPDX-License-Identifier: Apache-2.0
"""A case runs its candidate once and keeps what came of it. Its tasks pickle as data."""

import copy
import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from lossgate import ANY, Candidate, Layout, Outputs, Problem, UsageError
from lossgate.base.errors import CandidateError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.placement import PlacedProblem
from lossgate.cases.rank_call import RankOutputs, RankTask
from lossgate.declaration.loading import load_candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.worlds import SimulatedWorld
from lossgate.worlds.base import RankRaised

MakeWorld = Callable[..., SimulatedWorld]

PROBLEM = Problem(
    spec="nll",
    head="hidden",
    dtype="float32",
    layout=Layout(dp=2),
    lengths=(4, 3),
    masks=("all", "holes"),
    hidden=3,
    vocab=5,
    seed=7,
    options={"temperature": 0.5},
)

FILE = """
import torch
import lossgate
from lossgate.dense_candidates import dense_kernel
from lossgate.losses import SPECS

declare = lossgate.candidate(
    "nll",
    head="hidden",
    axes=("dp",),
    dtypes=("float32",),
    contract=lossgate.Contract(grads={"hidden": {"tp": "sum"}}),
    supports={"temperature": lossgate.ANY},
    name="in_a_file",
)
in_a_file = declare(dense_kernel(SPECS["nll"], "hidden"))
"""


def counting(calls: list[int]) -> Candidate:
    """Returns a right candidate that notes on which rank it is called."""
    dense = dense_candidate(SPECS["nll"], "hidden")

    def kernel(inputs: Any, options: Any, mesh: Any) -> Outputs | torch.Tensor:
        calls.append(mesh.get_rank())
        return dense.kernel(inputs, options, mesh)

    return replace(dense, kernel=kernel)


def same(one: Sequence[RankOutputs], other: Sequence[RankOutputs]) -> bool:
    """Returns whether two runs gave the same outputs on every rank, bit for bit."""
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[output], b[output]) for output in a)  # type: ignore[arg-type]
        for a, b in zip(one, other, strict=True)
    )


def test_a_case_runs_its_candidate_once(make_world: MakeWorld) -> None:
    calls: list[int] = []
    case = Case(counting(calls), PROBLEM, make_world("dp=2"))
    assert case.bound.coverage
    assert not calls  # neither a case nor its coverage needs a run
    for _ in range(2):
        assert len(case.ranks) == 2
        assert case.result.outputs
        assert case.oracle.reference
        assert all(comparison.agrees for comparison in case.comparisons)
        assert run_case(case, PROPERTIES["agreement"]).agrees
    assert sorted(calls) == [0, 1]


def test_another_case_runs_its_candidate_again(make_world: MakeWorld) -> None:
    calls: list[int] = []
    world, candidate = make_world("dp=2"), counting(calls)
    first, second = Case(candidate, PROBLEM, world).ranks, Case(candidate, PROBLEM, world).ranks
    assert sorted(calls) == [0, 0, 1, 1]
    assert same(first, second)


def test_a_case_keeps_what_each_rank_returned(make_world: MakeWorld) -> None:
    case = Case(counting([]), PROBLEM, make_world("dp=2"))
    assert case.ranks is case.ranks
    assert case.result is case.result
    assert case.comparisons is case.comparisons
    for output, whole in case.result.outputs.items():
        if str(output) in ("loss", "grad of weight"):  # by default they are the sum over dp
            parts = [local[output] for local in case.ranks]
            assert torch.equal(parts[0].double() + parts[1].double(), whole)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spec": "token_logprobs"},
            "has spec 'nll', but the problem has 'token_logprobs'; choose a candidate of spec 'tok",
        ),
        ({"head": "logits"}, "has head 'hidden', but the problem has 'logits'; choose a candidate of head 'logits'"),
    ],
)
def test_a_problem_of_another_spec_or_head_is_refused(
    make_world: MakeWorld, changes: dict[str, Any], message: str
) -> None:
    calls: list[int] = []
    with pytest.raises(UsageError) as error:
        Case(counting(calls), replace(PROBLEM, **changes), make_world("dp=2"))
    assert str(error.value).startswith(f"candidate 'dense_nll_hidden' {message}")
    assert not calls


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"dtype": "bfloat16"}, "dp=2", "takes float32, but the problem is in bfloat16; choose a candidate that"),
        (
            {"layout": Layout(cp=2)},
            "cp=2",
            "is not sharded over cp, but the problem's layout is cp=2; declare axes=('dp', 'cp')",
        ),
    ],
)
def test_a_problem_outside_of_the_declaration_is_refused(
    task: RankTask, make_world: MakeWorld, changes: dict[str, Any], world: str, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        Case(task.candidate, replace(PROBLEM, **changes), make_world(world))
    assert str(error.value).startswith(f"candidate 'in_a_file' {message}")


def test_a_world_of_other_ranks_is_refused(task: RankTask, make_world: MakeWorld) -> None:
    with pytest.raises(UsageError, match="the world has layout single, but the problem has dp=2; make a world of"):
        Case(task.candidate, PROBLEM, make_world("single"))


def test_a_failure_of_the_ranks_is_kept(make_world: MakeWorld) -> None:
    """A second look at a hang must not wait again."""
    calls: list[int] = []

    def kernel(inputs: Any, options: Any, mesh: Any) -> Outputs:
        calls.append(mesh.get_rank())
        raise ValueError("no kernel today")

    case = Case(replace(counting(calls), kernel=kernel), PROBLEM, make_world("dp=2"))
    for _ in range(2):
        with pytest.raises(RankRaised, match="no kernel today") as failure:
            _ = case.ranks
    assert len(calls) <= 2
    again = pickle.loads(pickle.dumps(failure.value))
    assert (str(again), again.rank) == (str(failure.value), failure.value.rank)


def test_a_fault_of_lossgate_is_not_told_as_one_of_the_kernel(task: RankTask, make_world: MakeWorld) -> None:
    world = make_world("dp=2")
    with pytest.raises(AttributeError):
        world.run(replace(task, batch=None))  # type: ignore[arg-type]
    no_arguments = replace(task.candidate, kernel=lambda: None)  # the call raises, before there is a line of the kernel
    with pytest.raises(RankRaised, match="rank 0 raised TypeError"):
        world.run(replace(task, candidate=no_arguments))


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (lambda: importlib.import_module("not_there"), "ModuleNotFoundError: No module named 'not_there'"),
        (lambda: torch.ops.aten.not_there, "AttributeError: '_OpNamespace' 'aten' object has no attribute 'not_there'"),
    ],
)
def test_a_kernel_that_lacks_a_module_is_not_wrong(
    needs: Callable[[], Any], said: str, task: RankTask, make_world: MakeWorld
) -> None:
    kernel = replace(task.candidate, kernel=lambda *_: needs())
    with pytest.raises(UsageError) as error:
        run_case(Case(kernel, PROBLEM, make_world("dp=2")), PROPERTIES["agreement"])
    assert not isinstance(error.value, CandidateError)
    assert fnmatchcase(str(error.value), f"candidate 'in_a_file' raised {said}  [*; install what it needs for *")


def test_an_attribute_that_an_object_lacks_is_a_mistake_of_the_kernel(task: RankTask, make_world: MakeWorld) -> None:
    kernel = replace(task.candidate, kernel=lambda inputs, *_: inputs.not_there)
    result = run_case(Case(kernel, PROBLEM, make_world("dp=2")), PROPERTIES["agreement"])
    assert result.failure == "RankRaised"


@pytest.fixture
def task(tmp_path: Path) -> RankTask:
    file = tmp_path / "file_with_candidate.py"
    file.write_text(FILE)
    candidate = load_candidate(f"{file}:in_a_file")
    placed = PlacedProblem(BoundProblem(candidate.spec, PROBLEM), PROBLEM)
    return RankTask(candidate, PROBLEM.options, placed.batch)


def test_a_task_is_data(task: RankTask, make_world: MakeWorld) -> None:
    again = pickle.loads(pickle.dumps(task))
    assert again.candidate is task.candidate
    assert again.options == task.options
    assert all(torch.equal(again.batch.fields[name], field) for name, field in task.batch.fields.items())
    world = make_world("dp=2")
    assert same(world.run(task), world.run(again))


RUN_TASK = """
import pickle, sys
from pathlib import Path

task = pickle.loads(Path(sys.argv[1]).read_bytes())
from lossgate.worlds import SimulatedWorld
from lossgate.worlds.base import RankRaised
world = SimulatedWorld(task.batch.partition.layout)
Path(sys.argv[2]).write_bytes(pickle.dumps(world.run(task)))
world.close()
"""


@pytest.mark.slow
def test_a_task_gives_the_same_in_a_fresh_process(task: RankTask, make_world: MakeWorld, tmp_path: Path) -> None:
    """The process knows neither the candidate nor lossgate before it loads the task."""
    given, returned = tmp_path / "task.pickle", tmp_path / "returned.pickle"
    given.write_bytes(pickle.dumps(task))
    subprocess.run([sys.executable, "-c", RUN_TASK, str(given), str(returned)], check=True, timeout=120)
    assert same(make_world("dp=2").run(task), pickle.loads(returned.read_bytes()))


def test_a_cell_is_data(task: RankTask) -> None:
    cell = Cell(task.candidate, Layout(dp=2), "float32", PROPERTIES["agreement"])
    again = pickle.loads(pickle.dumps(cell))
    assert str(again) == str(cell) == "in_a_file[agreement-dp=2-float32]"
    assert again.candidate is cell.candidate
    assert again.property is PROPERTIES["agreement"]
    for name in ("layout", "dtype", "world", "device"):
        assert getattr(again, name) == getattr(cell, name)


def test_any_stays_the_same_object() -> None:
    assert pickle.loads(pickle.dumps(ANY)) is ANY
    assert pickle.loads(pickle.dumps({"temperature": (ANY, ANY)}))["temperature"] == (ANY, ANY)
    assert copy.deepcopy(ANY) is ANY
    assert repr(ANY) == "lossgate.ANY"
