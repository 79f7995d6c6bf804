# SPDX-License-Identifier: Apache-2.0
"""What came of a comparison of two candidates, and how it is said."""

from collections.abc import Iterator
from dataclasses import dataclass

from lossgate.base.spelling import counted
from lossgate.engine.cell import CellResult, Verdict
from lossgate.judge.explain import explain_pooled_difference


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
        return tuple(line for one in result.pooled for line in explain_pooled_difference(one, *self.names))


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
