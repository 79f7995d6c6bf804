# SPDX-License-Identifier: Apache-2.0
"""What the tests of the judge share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernel_bank.cross_entropy import ALL_BFLOAT16, STYLES, make
from lossgate import Candidate, Layout, Precision, Problem
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.reference import DenseRun
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.judge.comparison import Comparison
from lossgate.judge.ensemble import gradient_on, rounded_runs, run_ensemble, stages_of
from lossgate.judge.tolerance import Tolerance
from lossgate.losses import find_spec
from lossgate.properties import PROPERTIES
from lossgate.specs.outputs import Output
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]
"""The type of the fixture ``make_world``."""

Change = Callable[[dict[str, Tensor]], None]
"""Changes the outputs of a correct kernel, which are given by name."""

ALL_STYLES = [(dtype, style) for dtype, styles in STYLES.items() for style in styles] + [("bfloat16", ALL_BFLOAT16)]
IDS = [f"{dtype} {style.name}" for dtype, style in ALL_STYLES]


def make_problem(dtype: str, layout: str = "dp=1", **changes: object) -> Problem:
    """Returns a middle-sized problem of spec ``nll``, with some fields changed."""
    fields = {
        "spec": "nll",
        "head": "hidden",
        "dtype": dtype,
        "layout": Layout.parse(layout),
        "lengths": (40, 24),
        "masks": ("all", "holes"),
        "hidden": 24,
        "vocab": 97,
        "options": {"temperature": 0.75},
        "cotangent": "both",
        "seed": 3,
    }
    return Problem(**{**fields, **changes})  # type: ignore[arg-type]


def bind(problem: Problem) -> BoundProblem:
    return BoundProblem(find_spec(problem.spec), problem)


def run(candidate: Candidate, problem: Problem, world: SimulatedWorld) -> CaseResult:
    """Runs a candidate on a problem and compares its outputs with the reference."""
    return run_case(Case(candidate, problem, world), PROPERTIES["agreement"])


def by_output(comparisons: tuple[Comparison, ...]) -> dict[str, Comparison]:
    return {str(comparison.output): comparison for comparison in comparisons}


def judge_changed(
    problem: Problem, world: SimulatedWorld, change: Change, precision: Precision | None = None
) -> dict[str, Comparison]:
    """Judges the outputs of a correct kernel after a change.

    Args:
        problem: the problem.
        world: where the kernel runs.
        change: what is done to the outputs.
        precision: what the judge takes for declared; by default what the kernel declares.

    Returns:
        The comparison of each output, by its name.
    """
    kernel = make(STYLES[problem.dtype][1])
    result = Case(kernel, problem, world).result
    outputs = {str(output): tensor for output, tensor in result.outputs.items()}
    change(outputs)
    declared = kernel if precision is None else replace(kernel, precision={problem.dtype: precision})
    case = Case(declared, problem, world)
    case.result = replace(result, outputs={output: outputs[str(output)] for output in result.outputs})
    return by_output(case.comparisons)


def compare(output: Output, result: Tensor, reference: Tensor, members: Tensor, **given: Any) -> Comparison:
    """Compares one result with a reference; see ``Tolerance``."""
    return Tolerance(output, reference, members - reference, **given).compare(result)


def rounds_to(unit: float) -> dict[str, Any]:
    """Returns what a ``Tolerance`` is given of an output that is rounded with a unit roundoff."""

    def error(x: Tensor) -> Tensor:
        return unit * x.abs()

    return {"unit": unit, "rounding": error, "alike": error}


def noise_of(candidate: Candidate, problem: Problem, bound: BoundProblem, seed: str) -> dict[str, Tensor]:
    """Returns every output of the ensemble of a problem, with a seed of its own, by name."""
    head, stages, batch = candidate.starts_at, stages_of(candidate, problem.dtype), bound.batch
    ensemble = run_ensemble(head, batch, bound.bound_spec, rounded_runs(batch, stages, seed))
    outputs = dict(ensemble.outputs)
    if ensemble.dlogits is not None:
        for leaf, output in head.gradients(batch.leaves).items():
            of_leaf = f"{seed} {leaf}"
            outputs[output] = gradient_on(
                problem.partition, leaf, head, batch, ensemble.dlogits, rounded_runs(batch, stages, of_leaf)
            )
    return {str(output): members for output, members in outputs.items()}


def members_of(candidate: Candidate, problem: Problem, count: int) -> dict[str, Tensor]:
    """Returns each output of ``count`` members of the ensemble of a problem, ``[count, *shape]``.

    A run of the ensemble has at most 32 members. More come from runs on the same tensors with other
    seeds of the noise.
    """
    bound = bind(problem)
    runs: list[dict[str, Tensor]] = []
    found = 0
    while found < count:
        outputs = noise_of(candidate, problem, bound, str(len(runs)))
        runs.append(outputs)
        found += len(next(iter(outputs.values())))
    return {name: torch.cat([run[name] for run in runs])[:count] for name in runs[0]}


def reference_of(problem: Problem) -> dict[str, Tensor]:
    """Returns every output of the reference, by its name."""
    bound = bind(problem)
    outputs = DenseRun(bound.batch, problem.head).outputs(bound.bound_spec)
    return {str(output): tensor for output, tensor in outputs.items()}
