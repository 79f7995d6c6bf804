# SPDX-License-Identifier: Apache-2.0
"""The pieces of a calibration: the kernels of a spec and head on some problems of a layout."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from calibration_counts import RightCounts, WrongCounts

from kernel_bank.bugs import BUGS, SWITCHES, Bug, cross_entropy_with
from kernel_bank.cross_entropy import STYLES, make
from kernel_bank.spec_bugs import bugs_of
from lossgate import ANY, Candidate, Layout, Problem
from lossgate.base.errors import UsageError
from lossgate.base.names import DTYPES
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.difference import differences
from lossgate.cases.placement import sample_problems
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.judge.comparison import Comparison
from lossgate.judge.explain import explain_difference
from lossgate.numerics.float_formats import ROUNDED_TO
from lossgate.properties import PROPERTIES
from lossgate.worlds import SimulatedWorld

LAYOUTS = ("single", "tp=2", "cp=2", "dp=2", "tp=3", "dp=2,cp=2", "dp=2,cp=2,tp=2")
HOSTS = 2
"""Bugs are put into so many kernels of a piece, each of another precision."""


@dataclass(frozen=True, order=True)
class Piece:
    """The kernels of a spec and head, on problems in one dtype, on one layout."""

    spec: str
    head: str
    dtype: str
    layout: str
    seed: int

    def __str__(self) -> str:
        return f"{self.spec} {self.head} {self.dtype} {self.layout} seed {self.seed}"

    def holds(self, kernel: Candidate) -> bool:
        """Returns whether a kernel can be judged in this piece."""
        same = (kernel.spec.name, kernel.head) == (self.spec, self.head) and self.dtype in kernel.dtypes
        return same and {*Layout.parse(self.layout).axes} <= {*kernel.axes}


@dataclass(frozen=True)
class Sizes:
    """How many problems each kernel of a piece is judged on."""

    problems: int = 40
    wrong: int = 8
    """Those on which each bug is judged, too."""
    pairs: int = 8
    """Those on which kernels are compared with each other, too."""


def all_pieces(seeds: Sequence[int], kernels: Sequence[Candidate]) -> list[Piece]:
    """Returns the pieces of kernels, in an order in which every beginning covers much of all."""
    found: list[Piece] = []
    for seed in seeds:
        of_seed = sorted({Piece(k.spec.name, k.head, d, at, seed) for k in kernels for d in DTYPES for at in LAYOUTS})
        random.Random(seed).shuffle(of_seed)
        found += [piece for piece in of_seed if any(piece.holds(kernel) for kernel in kernels)]
    return found


def run_piece(piece: Piece, sizes: Sizes, kernels: Sequence[Candidate]) -> dict[str, Any]:
    """Judges the kernels of a piece.

    Args:
        piece: what is judged.
        sizes: on how many problems.
        kernels: those that are known to be right, of this piece and of others.

    Returns:
        What was counted, as JSON can hold it.
    """
    start, own = perf_counter(), [kernel for kernel in kernels if piece.holds(kernel)]
    judge = _Judge(piece)
    right = {kernel.name: judge.right(kernel, sizes.problems) for kernel in own}
    pairs = judge.pairs(own, sizes.pairs)
    wrong = judge.wrong(own, sizes.wrong)
    judge.world.close()
    return {
        "piece": vars(piece),
        "sizes": vars(sizes),
        "right": {name: vars(counts) for name, counts in right.items()},
        "pairs": vars(pairs),
        "wrong": {name: vars(counts) for name, counts in wrong.items()},
        "seconds": round(perf_counter() - start, 1),
    }


class _Judge:
    """Judges kernels on the problems of a piece. Kernels share what is made of a problem."""

    def __init__(self, piece: Piece) -> None:
        self.piece, self.layout = piece, Layout.parse(piece.layout)
        self.world = SimulatedWorld(self.layout)
        self._bound: dict[str, BoundProblem] = {}
        self._few: dict[str, list[tuple[Problem, CaseResult]]] = {}

    def problems(self, kernel: Candidate, count: int) -> list[Problem]:
        return sample_problems(kernel, self.layout, self.piece.dtype, count, self.piece.seed)

    def few(self, kernel: Candidate, count: int) -> list[tuple[Problem, CaseResult]]:
        """Returns the problems of a kernel that bugs are put into, and what comes of it."""
        if kernel.name not in self._few:
            self._few[kernel.name] = [(one, self.run(kernel, one)) for one in self.problems(kernel, count)]
        return self._few[kernel.name]

    def case(self, kernel: Candidate, problem: Problem) -> Case:
        key = problem.unsharded.to_json()
        if key not in self._bound:
            self._bound[key] = BoundProblem(kernel.spec, problem)
        return Case(kernel, problem, self.world, self._bound[key])

    def run(self, kernel: Candidate, problem: Problem) -> CaseResult:
        return run_case(self.case(kernel, problem), PROPERTIES["agreement"])

    def right(self, kernel: Candidate, count: int) -> RightCounts:
        found, pools = RightCounts(), dict[Any, list[Comparison]]()
        for problem in self.problems(kernel, count):
            result = self.run(kernel, problem)
            found.add(result)
            for comparison in result.comparisons:
                pools.setdefault(comparison.output, []).append(comparison)
        for comparisons in pools.values():
            found.add_pool(comparisons)
        return found

    def pairs(self, kernels: Sequence[Candidate], count: int) -> RightCounts:
        """Compares each kernel with the next one, on problems that both can be given."""
        found = RightCounts()
        for first, second in pairwise(kernels):
            for problem in self.problems(first, count) if count else ():
                if not _can_compare(first, second, problem):
                    continue
                compared = tuple(differences(self.case(first, problem), self.case(second, problem)))
                names = first.name, second.name
                lines = tuple(line for one in compared for line in explain_difference(one, *names))
                found.add(CaseResult(problem=problem, comparisons=compared, findings=lines))
        return found

    def wrong(self, kernels: Sequence[Candidate], count: int) -> dict[str, WrongCounts]:
        found: dict[str, WrongCounts] = {}
        for name, right, wrong in _wrong(self.piece, kernels):
            for problem, result in self.few(right, count) if count else ():
                found.setdefault(name, WrongCounts()).add(result, self._run_wrong(wrong, problem))
        return found

    def _run_wrong(self, wrong: Candidate, problem: Problem) -> CaseResult:
        try:
            return self.run(wrong, problem)
        except UsageError as error:  # a dense kernel's reference met a label that is not in the vocabulary
            return CaseResult(problem=problem, findings=(str(error),))


def _can_compare(first: Candidate, second: Candidate, problem: Problem) -> bool:
    """Returns whether another kernel can be given a problem of one, and is to give the same."""
    values: dict[str, Any] = {**problem.options, "bias": problem.bias, "vocab_split": problem.vocab_split}
    able = ((value, second.supported(name)) for name, value in values.items())
    # The tokens of a problem keep clear of kinks by the rounding for which it was made.
    coarser = ROUNDED_TO[second.coarsest(problem.dtype)].unit > problem.coarsest.unit
    return (
        not coarser
        and first.differentiable == second.differentiable
        and all(supported is ANY or value in supported for value, supported in able)
    )


def _wrong(piece: Piece, kernels: Sequence[Candidate]) -> Iterator[tuple[str, Candidate, Candidate]]:
    """Yields the bugs that a piece can show: name, right kernel, wrong kernel."""
    hosts: dict[Any, Candidate] = {}
    for kernel in kernels:
        hosts.setdefault(kernel.precision[piece.dtype], kernel)
    for host in [*hosts.values()][:HOSTS]:
        for bug in _bugs(host):
            yield bug.name, host, bug.put_into(host)
    if (piece.spec, piece.head) == ("nll", "hidden"):
        for style in STYLES.get(piece.dtype, ()):
            for name, _ in SWITCHES.values():
                yield name, make(style), cross_entropy_with(style, name)


_NEEDS: Mapping[str, tuple[str, ...]] = {"dX x1.01": ("hidden",), "dW x0.99": ("hidden",)}
"""The heads of the bugs that are in a gradient of some input."""


def _bugs(host: Candidate) -> Iterator[Bug]:
    for bug in BUGS.values():
        if host.head in _NEEDS.get(bug.name, (host.head,)) and host.spec.reference is not None:
            yield bug
    yield from bugs_of(host.spec)
