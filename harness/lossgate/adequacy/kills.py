# SPDX-License-Identifier: Apache-2.0
"""For which contrasts a problem speaks: would a kernel that takes one choice of an option for another be rejected on it?"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lossgate.adequacy.option_mutants import SIDES, Contrast, Side
from lossgate.cases.materialize import materialize
from lossgate.cases.reference import run_reference
from lossgate.judge.comparison import Yardstick
from lossgate.problems.batch import Batch
from lossgate.problems.problem import Problem
from lossgate.specs.outputs import grad_name


def told(contrasts: Iterable[Contrast], yardstick: Yardstick, dtypes: Mapping[str, torch.dtype]) -> Iterator[Contrast]:
    """Those of ``contrasts`` for which the problem speaks. ``dtypes``: of the candidate's results."""
    batch = yardstick.batch
    swapped: dict[tuple[str, str], Mapping[str, Tensor]] = {}
    for contrast in contrasts:
        other = contrast.swapped(batch.problem)
        if other is None:
            continue
        choice = contrast.option, repr(contrast.other)
        if choice not in swapped:
            swapped[choice] = run_reference(replace(batch, problem=other), ())
        given = ((name, swapped[choice][name]) for name in outputs_of(contrast.side, batch) if name in dtypes)
        changed = ((name, output) for name, output in given if not torch.equal(output, yardstick.reference[name]))
        if not all(yardstick.compare(name, output, dtypes[name]).agrees for name, output in changed):
            yield contrast


def differences(contrast: Contrast, problem: Problem) -> dict[Side, float]:
    """How much the other choice changes a value and a gradient, at most, relative to the largest entry; 0 where the contrast does not apply."""
    return dict(_differences(replace(contrast, side="value"), problem.to_json()))


@lru_cache(maxsize=4096)
def _differences(contrast: Contrast, problem_json: str) -> dict[Side, float]:
    """Of both sides: each is asked for in turn."""
    problem = Problem.from_json(problem_json)
    other = contrast.swapped(problem)
    if other is None:
        return dict.fromkeys(SIDES, 0.0)
    batch, own = _reference(problem_json)
    swapped = run_reference(replace(batch, problem=other), ())
    return {
        side: max((_relative(own[name], swapped[name]) for name in outputs_of(side, batch)), default=0.0)
        for side in SIDES
    }


@lru_cache(maxsize=512)
def _reference(problem: str) -> tuple[Batch, Mapping[str, Tensor]]:
    """Many contrasts are tried on the same problems. Those that are promising are made with more care."""
    batch = materialize(Problem.from_json(problem), settled=False)
    return batch, run_reference(batch, ())


def _relative(own: Tensor, other: Tensor) -> float:
    if torch.equal(own, other):
        return 0.0
    finite = own.isfinite() & other.isfinite()
    if not bool((own[~finite] == other[~finite]).all()):
        return float("inf")
    own, other = own[finite], other[finite]
    return float((own - other).abs().max() / torch.maximum(own.abs().max(), other.abs().max()))


def outputs_of(side: Side, batch: Batch) -> Iterator[str]:
    """What a contrast may show in: the values from which gradients start, or the gradients."""
    yield from batch.cotangents if side == "value" else map(grad_name, batch.leaves)
