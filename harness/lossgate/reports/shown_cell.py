# SPDX-License-Identifier: Apache-2.0
"""What people are shown of a cell, whether it was verified just now or evidence tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.evidence.records import VerdictName
from lossgate.evidence.summary import CellSummary
from lossgate.reports.numbers import share
from lossgate.reports.printable import printable

if TYPE_CHECKING:  # an engine needs torch, and a report of evidence does not
    from lossgate.engine.case_result import CaseResult
    from lossgate.engine.cell import CellResult
    from lossgate.problems.problem import Problem

STYLES: dict[VerdictName, str] = {"AGREE": "green", "DISAGREE": "bold red", "INCONCLUSIVE": "yellow"}
KNOWN_STYLE = "cyan"
_WORST_FIRST: tuple[VerdictName, ...] = ("DISAGREE", "INCONCLUSIVE", "AGREE")


class ShownVerdict(NamedTuple):
    """How the verdict of a cell is shown. ``note`` names the known failure of an expected one."""

    word: VerdictName
    expected: bool = False
    note: str = ""

    @property
    def style(self) -> str:
        return KNOWN_STYLE if self.expected else STYLES[self.word]

    @property
    def wrong(self) -> bool:
        return self.word == "DISAGREE" and not self.expected

    @property
    def order(self) -> tuple[int, bool]:
        """Sorts the worst verdict first, and a known failure after other disagreements."""
        return _WORST_FIRST.index(self.word), self.expected

    def __str__(self) -> str:
        return f"{self.word} {self.note}" if self.note else self.word


@dataclass(frozen=True, kw_only=True)
class ShownCell:
    """What is shown of a cell. Its texts are printable, and not yet escaped for ``rich``."""

    candidate: str
    source: str = ""
    """Tells candidates of one name apart in a run; empty in evidence, where a name is enough."""
    held_to: str
    """The property."""
    dtype: str
    layout: str
    ranks: int
    place: str = ""
    """World and device, if they are not those of the whole run."""
    verdict: ShownVerdict
    reasons: tuple[str, ...]
    """Lines in words, why the verdict is not AGREE."""
    causes: tuple[str, ...] = ()
    """Lines in words, what the mistake may be and what to do about it."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished."""
    exempt: tuple[str, ...] = ()
    """The properties from which the candidate is exempt, and why."""
    excluded: tuple[str, ...] = ()
    """The problems that the candidate is not given, and why."""
    problems: int
    comparisons: int
    margin: float
    """The largest statistic of any comparison, as a share of its limit."""
    mde: float
    seconds: float
    mistakes_seconds: float = 0.0
    """What it took of them to ask which known mistakes the problems show."""
    good_for: str = ""
    on: str | None = None
    """The smallest problem that disagrees, in words."""
    side_by_side: tuple[str, ...] = ()
    """Lines in words: what was got on it, beside what is wanted."""
    replay: str | None = None
    """The command that judges it again."""
    largest: str = ""
    """How large the problems were, in words; "" if nothing tells."""
    at_sizes: tuple[str, ...] = ()
    """Lines in words: for each size of large problems, how near to its limits each output came."""

    @property
    def passes(self) -> bool:
        """Whether the cell agrees, or disagrees as a known failure says."""
        return self.verdict.word == "AGREE" or self.verdict.expected


def of_result(result: CellResult, replay: str | None = None) -> ShownCell:
    """Shows a cell that was verified just now.

    Args:
        result: what came of it.
        replay: the command that judges its failure again, if there is one.
    """
    cell, candidate = result.cell, result.cell.candidate
    known = candidate.known_failure.name if result.expected and candidate.known_failure else None
    return ShownCell(
        candidate=candidate.name,
        source=candidate.source,
        held_to=str(cell.property),
        dtype=cell.dtype,
        layout=str(cell.layout),
        ranks=cell.layout.ranks,
        verdict=_verdict(result.verdict.value, result.expected, known),
        reasons=_lines(result.reasons),
        causes=_lines(result.causes),
        not_distinguished=_lines(result.not_distinguished),
        exempt=tuple(printable(f"{one.name}: {one.exempt}") for one in result.properties if one.exempt),
        excluded=tuple(printable(f"{what}: {why}") for what, why in candidate.exclusions.items()),
        problems=len(result.cases),
        comparisons=result.comparisons,
        margin=result.margin,
        mde=result.mde,
        seconds=result.seconds,
        mistakes_seconds=result.mistakes.seconds,
        good_for=candidate.good_for,
        on=_on(result.failure.problem.describe(), result.shrink_calls) if result.failure is not None else None,
        side_by_side=_lines(result.failure.side_by_side) if result.failure is not None else (),
        replay=replay,
        largest=_largest([case.problem for case in result.cases]),
        at_sizes=tuple(_at_sizes(result.cases)),
    )


def of_summary(summary: CellSummary) -> ShownCell:
    """Shows a cell of which evidence tells."""
    key, known, failure = summary.key, summary.known_failure, summary.failure
    return ShownCell(
        candidate=printable(key.candidate),
        held_to=printable(key.property),
        dtype=printable(key.dtype),
        layout=printable(key.layout),
        ranks=_ranks(key.layout),
        place="" if (key.world, key.device) == ("simulated", "cpu") else printable(f"{key.world}/{key.device}"),
        verdict=_verdict(summary.verdict, summary.expected, printable(known.name) if known else None),
        reasons=_lines(summary.reasons),
        causes=_lines(summary.causes),
        not_distinguished=_lines(summary.not_distinguished),
        exempt=tuple(printable(f"{name}: {why}") for name, why in summary.exempt),
        excluded=tuple(printable(f"{what}: {why}") for what, why in summary.excluded),
        problems=summary.problems,
        comparisons=summary.comparisons,
        margin=summary.margin,
        mde=inf if summary.mde is None else summary.mde,
        seconds=summary.seconds,
        on=_on(printable(failure.description), failure.shrink_calls) if failure else None,
        side_by_side=_lines(failure.side_by_side) if failure else (),
        replay=printable(failure.replay) if failure and failure.replay else None,
    )


def _verdict(word: VerdictName, expected: bool, known: str | None) -> ShownVerdict:
    return ShownVerdict(word, expected, f"(known: {known})" if expected and known is not None else "")


def _lines(reasons: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(printable(line) for reason in reasons for line in reason.splitlines())


def _on(problem: str, shrink_calls: int) -> str:
    if not shrink_calls:
        return problem
    tries = "1 try" if shrink_calls == 1 else f"{shrink_calls} tries"
    return f"{problem}  (after {tries} to make it smaller)"


def _largest(problems: Sequence[Problem]) -> str:
    if not problems:
        return ""
    from lossgate.specs.heads import HEADS  # a report of evidence needs no torch

    tokens, vocab = max(one.tokens for one in problems), max(one.vocab for one in problems)
    return f"up to T={tokens:,}, V={vocab:,}" if HEADS[problems[0].head].has_logits else f"up to T={tokens:,}"


def _at_sizes(cases: Sequence[CaseResult]) -> Iterator[str]:
    from lossgate.cases.large import is_large

    nearest: dict[str, dict[str, float]] = {}
    for case in cases:
        problem = case.problem
        if is_large(problem):
            width = f", H={problem.hidden:,}" if problem.head == "hidden" else ""
            outputs = nearest.setdefault(f"T={problem.tokens:,}{width}, V={problem.vocab:,}", {})
            for one in case.comparisons:
                if one.values:
                    name = str(one.output)
                    outputs[name] = max(one.margin, outputs.get(name, 0.0))
    for size, outputs in nearest.items():
        if outputs:
            shares = ", ".join(f"{output} {share(margin)}" for output, margin in outputs.items())
            yield f"at {size}, as shares of the limits: {shares}"


def _ranks(layout: str) -> int:
    """Returns the ranks of a layout; 1 for one of which only a later version knows."""
    try:
        return Layout.parse(layout).ranks
    except UsageError:
        return 1
