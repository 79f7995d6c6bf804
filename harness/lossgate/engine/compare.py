# SPDX-License-Identifier: Apache-2.0
"""Compares two candidates of a spec with each other, and each with the reference."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from lossgate.base.argument import Argument
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
from lossgate.engine.settings import Settings, load_settings
from lossgate.engine.shared_declaration import able_alike
from lossgate.engine.verdict import conclude, pooled_outputs
from lossgate.judge.explain import explain_difference, explain_pooled_difference
from lossgate.problems.problem import Problem
from lossgate.properties import PROPERTIES, Checked, Property
from lossgate.worlds import make_world
from lossgate.worlds.base import RankFailure


@dataclass(frozen=True, repr=False)
class ComparedCell:
    """What came of two kernels on one layout, in one dtype."""

    names: tuple[str, str]
    results: tuple[CellResult, CellResult]
    """Each kernel against the reference."""
    difference: CellResult | None
    """The kernels against each other; None if the ranks of one of them failed."""

    @property
    def verdict(self) -> Verdict:
        """AGREE only if the two agree with each other, and both with the reference."""
        found = [result.verdict for _, result in self._all]
        return next((v for v in (Verdict.DISAGREE, Verdict.INCONCLUSIVE) if v in found), Verdict.AGREE)

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
        if self.wrong:
            unseen = f"{self.wrong[0]} is wrong, by less than shows between the two"
            return f"they differ: {self.wrong[0]} is wrong" if self.differ else unseen
        if self.differ:
            return "they differ by more than the rounding of both explains, and neither is known to be wrong"
        if self.verdict is Verdict.INCONCLUSIVE:
            return "nothing wrong was seen, and not enough was seen"
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
        only_pooled = result is self.difference and self.differ and result.failure is None
        if not only_pooled:
            return result.reasons
        return tuple(
            line for one in pooled_outputs(result.cases) for line in explain_pooled_difference(one, *self.names)
        )


@dataclass(frozen=True, repr=False)
class Compared:
    """What ``compare`` found. It prints as its verdicts, with reasons."""

    names: tuple[str, str]
    spec: str
    head: str
    cells: tuple[ComparedCell, ...]
    """One for each layout and dtype."""

    @property
    def agree(self) -> bool:
        """Whether the kernels agree with each other and with the reference, everywhere.

        It is False if they agree on the same mistake, and if not enough was seen.
        """
        return all(cell.verdict is Verdict.AGREE for cell in self.cells)

    @property
    def only_one_returns(self) -> dict[str, str]:
        """The outputs that only one kernel returns, and its name: they are compared with the
        reference alone.
        """
        found: dict[str, str] = {}
        for cell in self.cells:
            own, other = map(_returned, cell.results)
            found |= dict.fromkeys(sorted(own - other), self.names[0])
            found |= dict.fromkeys(sorted(other - own), self.names[1])
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
    """Returns the outputs beside gradients that a kernel has returned."""
    compared = (comparison for case in result.cases for comparison in case.comparisons)
    return {str(comparison.output) for comparison in compared if comparison.output.kind != "gradient"}


def compare(
    kernel_a: Candidate,
    kernel_b: Candidate,
    *,
    layouts: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    profile: str = "dev",
    examples: int | None = None,
    seed: int | None = None,
    problem: Problem | DrawnProblem | None = None,
) -> Compared:
    """Compares two candidates on the same problems: a fused kernel with an unfused one, say.

    Two kernels may agree on the same mistake. So each is also compared with the reference, and the
    result says which of them is wrong.

    Both kernels round. What they may differ by is derived from the precision that both declare, as
    the tolerance of one against the reference is: runs of the reference that round as kernel_a
    declares, less others that round as kernel_b declares, show how far two right kernels are apart.
    The statistics are those of one kernel (``judge.md``), of the difference a - b in units of
    that noise; its scale is relative to the reference. What one unit roundoff may do to a whole
    result is allowed to both. So a difference is judged less sharply than the sharper of the two
    kernels alone, and a kernel may be found wrong that does not differ from the other.

    Problems are drawn that suit both: axes, dtypes and options that both declare, tiles of either.

    Args:
        kernel_a: a candidate.
        kernel_b: another of the same spec and head.
        layouts: the layouts, such as ``["single", "tp=2"]``; by default those on which
            ``lossgate verify`` would verify a kernel with the axes of both.
        dtypes: the dtypes of inputs; by default all that both take.
        profile: how much to try, as for ``lossgate verify``.
        examples: the least problems for each layout and dtype.
        seed: other problems are drawn for another seed.
        problem: the only problem to try, with its layout and dtype, in place of drawn ones. Whether
            it would have shown a mistake is then not asked.

    Returns:
        The verdicts: ``agree``, ``check()`` for tests, and reasons when printed.

    Raises:
        UsageError: if the two cannot be compared, or a setting is wrong.
    """
    one, other = able_alike(kernel_a, kernel_b)
    settings = load_settings(
        profile,
        layouts=_several("layouts", layouts),
        dtypes=_several("dtypes", dtypes),
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
        _alone(layouts=layouts, dtypes=dtypes, examples=examples, seed=seed)
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
            f"compare(problem={given!r:.60}): expected a Problem, or what lossgate.strategies.problems draws; "
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
        return _run_one(replace(cell, property=replace(held_to, needs_adequacy=False)), settings, problem, bound)

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
    """What the comparison with another kernel found on one case."""

    names: tuple[str, str]

    @property
    def findings(self) -> tuple[str, ...]:
        lines = (line for comparison in self.comparisons for line in explain_difference(comparison, *self.names))
        return (*self.faults, *lines)


def _like(other: Candidate, names: tuple[str, str]) -> Property:
    """Returns the property of a candidate that it gives what another gives."""

    def check(case: Case) -> Checked:
        counterpart = Case(other, case.problem, case.world, case.bound)
        for name, either in zip(names, (case, counterpart), strict=True):
            try:
                _ = either.ranks
            except RankFailure as failure:
                return _Difference(names=names, faults=(f"{name}: {failure}",))
        return _Difference(names=names, comparisons=tuple(differences(case, counterpart)))

    return Property(
        name=f"like {other.name}",
        summary=f"Every output and gradient equals that of {other.name}, up to rounding as both declare",
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
                f"compare(layouts=...): {names[0]} and {names[1]} are not both sharded over {', '.join(extra)}, "
                f"as layout {layout} is; both are over {', '.join(able.axes) or 'no axis'}"
            )
    for dtype in settings.dtypes:
        if dtype not in able.dtypes:
            raise UsageError(
                f"compare(dtypes=...): {names[0]} and {names[1]} do not both take {dtype}; "
                f"both take {', '.join(able.dtypes)}"
            )
    return layouts_and_dtypes(able, settings)


def _several(argument: str, given: Iterable[str] | None) -> tuple[str, ...] | None:
    return (
        None
        if given is None
        else tuple(map(str, Argument("compare(", argument, given).several(f"{argument}, or None")))
    )


def _alone(**given: Any) -> None:
    """Refuses settings beside a problem, which has its own."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"compare({name}={value!r}): the problem has its own; leave one of the two out")
