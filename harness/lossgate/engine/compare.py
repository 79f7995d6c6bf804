# SPDX-License-Identifier: Apache-2.0
"""Compares two candidates of a spec with each other, and each with the reference."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.base.spelling import counted
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.difference import differences
from lossgate.cases.drawn_problem import DrawnProblem
from lossgate.declaration.candidate import Candidate
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.cell_record import Verdict
from lossgate.engine.matrix import layouts_and_dtypes
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings, load_settings, names_of
from lossgate.engine.shared_declaration import able_alike
from lossgate.engine.verdict import conclude, pooled_outputs
from lossgate.judge.explain import explain_difference, explain_pooled_difference
from lossgate.problems.problem import Problem
from lossgate.properties import PROPERTIES, Checked, Property
from lossgate.worlds import make_world
from lossgate.worlds.base import RankFailure


@dataclass(frozen=True, repr=False)
class ComparedCell:
    """The results of two kernels on one layout, in one dtype."""

    names: tuple[str, str]
    results: tuple[CellResult, CellResult]
    """Each kernel against the reference."""
    difference: CellResult | None
    """The kernels against each other; None if the ranks of one of them failed."""

    @property
    def verdict(self) -> Verdict:
        """AGREE only if the two agree with each other, and both with the reference."""
        found = [result.verdict for _, result in self._all]
        worst_first = (Verdict.DISAGREE, Verdict.INCONCLUSIVE, Verdict.AGREE)
        return next(verdict for verdict in worst_first if verdict in found)

    @property
    def differ(self) -> bool:
        """Whether the two differ by more than the rounding of both explains."""
        return self.difference is not None and self.difference.verdict is Verdict.DISAGREE

    @property
    def wrong(self) -> tuple[str, ...]:
        """The names of the kernels that disagree with the reference."""
        pairs = zip(self.names, self.results, strict=True)
        return tuple(name for name, result in pairs if result.verdict is Verdict.DISAGREE)

    @property
    def conclusion(self) -> str:
        """The verdict in words."""
        if self.difference is None:
            return f"ranks of {' and of '.join(self.wrong)} failed"
        if len(self.wrong) == 2:
            return "both are wrong, and they differ" if self.differ else "both are wrong in the same way"
        if self.wrong and self.differ:
            return f"they differ: {self.wrong[0]} is wrong"
        if self.wrong:
            return f"{self.wrong[0]} is wrong, but by too little to show between the two"
        if self.differ:
            return "they differ by more than the rounding of both explains, but neither is known to be wrong"
        if self.verdict is Verdict.INCONCLUSIVE:
            return "nothing wrong was seen, but not enough was seen"
        return "they agree with each other and with the reference"

    def __str__(self) -> str:
        cell = self.results[0].cell
        lines = [f"{self.verdict}  {cell.dtype}  {cell.layout}: {self.conclusion}"]
        for name, result in self._all:
            lines += [f"  {name}: {line}" for reason in self._reasons(result) for line in reason.splitlines()]
            if result.failure is not None:
                lines.append(f"    on: {result.failure.problem.describe()}")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def _all(self) -> Iterator[tuple[str, CellResult]]:
        yield from zip(self.names, self.results, strict=True)
        if self.difference is not None:
            yield "the two", self.difference

    def _reasons(self, result: CellResult) -> tuple[str, ...]:
        """Returns the reasons of a result. The reasons of a pooled difference are worded here, with
        the names of both kernels.
        """
        only_pooled = result is self.difference and self.differ and result.failure is None
        if not only_pooled:  # the cause is told of the kernel that is wrong
            return result.reasons if result is self.difference else result.record.told
        pooled = pooled_outputs(result.cases)
        return tuple(line for output in pooled for line in explain_pooled_difference(output, *self.names))


@dataclass(frozen=True, repr=False)
class Compared:
    """The result of ``compare``. It prints as its verdicts, with reasons."""

    names: tuple[str, str]
    spec: str
    head: str
    cells: tuple[ComparedCell, ...]
    """A cell for each layout and dtype."""

    @property
    def agree(self) -> bool:
        """Whether the kernels agree with each other and with the reference, everywhere.

        It is False if both have the same mistake, or if not enough was seen.
        """
        return all(cell.verdict is Verdict.AGREE for cell in self.cells)

    @property
    def only_one_returns(self) -> dict[str, str]:
        """The outputs that only one kernel returns, with the name of this kernel. They are compared
        only with the reference.
        """
        found: dict[str, str] = {}
        for cell in self.cells:
            of_a, of_b = map(_returned, cell.results)
            found |= dict.fromkeys(sorted(of_a - of_b), self.names[0])
            found |= dict.fromkeys(sorted(of_b - of_a), self.names[1])
        return found

    def check(self) -> None:
        """Raises ``AssertionError`` with all reasons, unless the kernels agree."""
        __tracebackhide__ = True
        if not self.agree:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        cells = counted(len(self.cells), "cell")
        title = f"{self.names[0]} against {self.names[1]}: spec {self.spec} from {self.head}, {cells}"
        alone = [f"only {name} returns {output}" for output, name in self.only_one_returns.items()]
        return "\n".join([title, *map(str, self.cells), *alone])

    __repr__ = __str__


def _returned(result: CellResult) -> set[str]:
    """Returns the outputs that a kernel returned, without gradients."""
    compared = (comparison for case in result.cases for comparison in case.comparisons)
    return {str(comparison.output) for comparison in compared if comparison.output.kind != "gradient"}


def compare(
    kernel_a: Candidate,
    kernel_b: Candidate,
    *,
    layouts: Iterable[str] | str | None = None,
    dtypes: Iterable[Any] | Any = None,
    profile: str = "dev",
    examples: int | None = None,
    seed: int | None = None,
    problem: Problem | DrawnProblem | None = None,
) -> Compared:
    """Compares two candidates on the same problems, such as a fused kernel with an unfused one.

    Two kernels may have the same mistake. So each is also compared with the reference, and the
    result says which of them is wrong.

    Both kernels round. The difference that they may have is derived from the precision that both
    declare. Runs of the reference that round as kernel_a declares, minus runs that round as
    kernel_b declares, show how far apart two right kernels are. The statistics are the same as for
    one kernel (``judge.md``). They are those of the difference a - b, in units of this noise; its
    scale is relative to the reference. Each kernel may be off as a whole by what one unit roundoff
    explains. So a difference is judged less sharply than either kernel alone, and a kernel may be
    found wrong although it does not differ from the other.

    The problems suit both kernels: they have axes, dtypes and options that both declare, and tiles
    of either.

    Args:
        kernel_a: a candidate.
        kernel_b: another candidate of the same spec and head.
        layouts: the layouts, such as ``["single", "tp=2"]``; by default those on which
            ``lossgate verify`` would verify a kernel with the axes that both have.
        dtypes: the dtypes of inputs; by default all that both take.
        profile: how much to try, as for ``lossgate verify``.
        examples: the fewest problems for each layout and dtype.
        seed: another seed draws other problems.
        problem: the only problem to try, with its layout and dtype, in place of drawn problems. It
            need not be able to show every mistake.

    Returns:
        The verdicts. ``agree`` is True if all agree, ``check()`` serves tests, and the printed
        result has the reasons.

    Raises:
        UsageError: if the two cannot be compared, or if a setting is wrong.
    """
    one, other = able_alike(kernel_a, kernel_b)
    settings = load_settings(
        profile,
        layouts=names_of("compare(", "layouts", layouts),
        dtypes=names_of("compare(", "dtypes", dtypes),
        examples=examples,
        seed=seed,
        world="simulated",
        device="cpu",
    )
    names = one.name, other.name
    if names[0] == names[1]:
        names = f"{names[0]} (a)", f"{names[1]} (b)"
    if problem is not None:
        problem = _as_problem(problem)
        _check_not_given(layouts=layouts, dtypes=dtypes, examples=examples, seed=seed)
        places = [(problem.layout, problem.dtype)]
    else:
        places = _places(one, settings, names)
    cells = (_compare_in(one, other, names, layout, dtype, settings, problem) for layout, dtype in places)
    return Compared(names, one.spec.name, one.head, tuple(cells))


def _as_problem(given: Problem | DrawnProblem) -> Problem:
    if isinstance(given, DrawnProblem):
        return given.problem
    if not isinstance(given, Problem):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"compare(problem={given!r:.60}): expected a Problem, or a DrawnProblem of lossgate.strategies.problems; "
            "DrawnProblem.from_json reads one from its text"
        )
    return given


def _compare_in(
    one: Candidate,
    other: Candidate,
    names: tuple[str, str],
    layout: Layout,
    dtype: str,
    settings: Settings,
    problem: Problem | None,
) -> ComparedCell:
    bound = None if problem is None else BoundProblem(one.spec, problem)

    def result_of(candidate: Candidate, held_to: Property) -> CellResult:
        cell = Cell(candidate, layout, dtype, held_to)
        if problem is None:
            return run_cell(cell, settings)
        # A single problem need not show every mistake.
        cell = replace(cell, property=replace(held_to, needs_adequacy=False))
        return _run_one(cell, settings, problem, bound)

    results = result_of(one, PROPERTIES["agreement"]), result_of(other, PROPERTIES["agreement"])
    if any(result.failure is not None and result.failure.failure for result in results):
        return ComparedCell(names, results, None)
    return ComparedCell(names, results, result_of(one, _like(other, names)))


def _run_one(cell: Cell, settings: Settings, problem: Problem, bound: BoundProblem | None) -> CellResult:
    start = perf_counter()
    world = make_world(cell.world, cell.layout, settings.timeout, cell.device)
    try:
        case = run_case(Case(cell.candidate, problem, world, bound), cell.property)
    finally:
        world.close()
    failure = None if case.agrees else case
    return conclude(CellRun(cell=cell, cases=(case,), failure=failure, seconds=perf_counter() - start))


@dataclass(frozen=True, kw_only=True)
class _Difference(Checked):
    """The comparison with another kernel on one case."""

    names: tuple[str, str]

    @property
    def findings(self) -> tuple[str, ...]:
        lines = (line for comparison in self.comparisons for line in explain_difference(comparison, *self.names))
        return (*self.faults, *lines)


def _like(other: Candidate, names: tuple[str, str]) -> Property:
    """Returns a property that holds if a candidate gives the same results as another one."""

    def check(case: Case) -> Checked:
        counterpart = Case(other, case.problem, case.world, case.bound)
        for name, of_kernel in zip(names, (case, counterpart), strict=True):
            try:
                _ = of_kernel.ranks  # runs the kernel
            except RankFailure as failure:
                return _Difference(names=names, faults=(f"{name}: {failure}",))
        return _Difference(names=names, comparisons=tuple(differences(case, counterpart)))

    return Property(
        name=f"like {other.name}",
        summary=f"Every output and gradient equals that of {other.name}, up to the rounding that both declare",
        check=check,
        applies=lambda candidate: True,
        runs=2,
        needs_adequacy=True,
    )


def _places(able: Candidate, settings: Settings, names: tuple[str, str]) -> list[tuple[Layout, str]]:
    """Returns every layout and dtype of a comparison."""
    for layout in map(Layout.parse, settings.layouts):
        if extra := [axis for axis in layout.axes if axis not in able.axes]:
            raise UsageError(
                f"compare(layouts=...): layout {layout} splits {', '.join(extra)}, but {names[0]} and {names[1]} do "
                f"not both support that; both support {', '.join(able.axes) or 'no axis'}"
            )
    for dtype in settings.dtypes:
        if dtype not in able.dtypes:
            raise UsageError(
                f"compare(dtypes=...): {names[0]} and {names[1]} do not both take {dtype}; "
                f"both take {', '.join(able.dtypes)}"
            )
    return layouts_and_dtypes(able, settings)


def _check_not_given(**settings: Any) -> None:
    """Refuses settings that are given together with a single problem."""
    for name, value in settings.items():
        if value is not None:
            raise UsageError(f"compare({name}={value!r}): problem= leaves nothing to set; leave one of the two out")
