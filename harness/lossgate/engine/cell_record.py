# SPDX-License-Identifier: Apache-2.0
"""The record of a cell: everything that is reported of it, as data.

The record is made where the cell ran. The terminal, the page, the gate and ``lossgate diff`` read
it, and evidence files hold it as it is. The string below a field is its description in the
published schema.
"""

import builtins
from collections.abc import Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from lossgate.engine.output_record import Count, OutputRecord, Size

SCHEMA = "2.0"
"""Version of the schema. A reader understands versions with the same first number."""

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="A SHA-256 in hexadecimal digits.")]
Time = Annotated[
    str,
    Meta(
        pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$",
        description="A time in UTC, as 2026-01-31T12:00:00+00:00.",
    ),
]


class Verdict(StrEnum):
    """The verdict on a cell. INCONCLUSIVE: nothing wrong was seen, but not enough was seen."""

    AGREE = "AGREE"
    DISAGREE = "DISAGREE"
    INCONCLUSIVE = "INCONCLUSIVE"


class Outcome(StrEnum):
    """The outcome of a cell as people are told it, the worst first. It tells apart what
    ``Verdict.DISAGREE`` has in one: wrong numbers, and right numbers with a broken promise.
    """

    DISAGREE = "DISAGREE"
    PROMISE_BROKEN = "PROMISE BROKEN"
    """Only properties other than agreement are broken."""
    INCONCLUSIVE = "INCONCLUSIVE"
    AGREE = "AGREE"


class CellKey(Struct, frozen=True, order=True, array_like=True):
    """The names that identify a cell."""

    candidate: str
    property: str
    layout: str
    dtype: str
    world: str
    device: str

    def __str__(self) -> str:
        where = f" on {self.place}" if self.place else ""
        return f"{self.candidate}[{self.property}-{self.layout}-{self.dtype}]{where}"

    def matches(self, pattern: str) -> bool:
        """Returns whether a pattern matches the name of the cell or the name of its candidate.

        ``*`` stands for any text and ``?`` for any character. Brackets stand for themselves,
        because names of cells have them: ``nll_*[*tp=2*]``. The last bracket may be left out, as in
        ``*float32``.
        """
        literal = pattern.replace("[", "[[]")  # to fnmatch, this is a bracket and no set of characters
        names = (str(self), str(self).partition("]")[0], self.candidate)
        return any(fnmatchcase(name, literal) for name in names)

    @builtins.property
    def place(self) -> str:
        """World and device. It is empty for simulated ranks on the CPU, the usual place."""
        return "" if (self.world, self.device) == ("simulated", "cpu") else f"{self.world}/{self.device}"


class WorstExample(Struct, frozen=True, kw_only=True):
    """The problem on which a statistic of an output came closest to its limit, or went over it."""

    output: str
    statistic: str
    value: float
    limit: float
    problem: dict[str, Any]


class Failure(Struct, frozen=True, kw_only=True):
    """The smallest problem that disagrees."""

    problem: dict[str, Any]
    description: str
    """The problem in words."""
    findings: tuple[str, ...]
    todo: str = ""
    """What to do about the findings, in words."""
    symptoms: tuple[str, ...]
    """The outputs that disagree and other faults, or how the ranks failed."""
    shrink_calls: Count = 0
    """How many problems were tried to make the failing one smaller."""
    statistics: tuple[str, ...] = ()
    """The statistics over their limit of outputs whose numbers the findings show, in words."""


class KnownFailureRecord(Struct, frozen=True, kw_only=True):
    """The known failure that a candidate declares."""

    name: str
    example: Sha256
    """The digest of the file with the frozen example."""
    expected: bool
    """Whether the example still disagrees in the same outputs, and nothing else does."""
    beside: str = ""
    """What lies beside it, in words. Empty if only the frozen example was judged."""


How = Literal["mended", "same error", "perhaps"]


class Explained(Struct, frozen=True, kw_only=True):
    """Another broken property that explains why one is broken."""

    by: str
    how: How
    """Whether the property holds once the fault that breaks the other is mended, or both raise the
    same error. If neither, the other may explain it."""


def with_todo_second(findings: Sequence[str], todo: str) -> tuple[str, ...]:
    """Returns findings in words, with what to do after the first."""
    return (*findings[:1], f"to do: {todo}", *findings[1:]) if findings and todo else tuple(findings)


class PropertyRecord(Struct, frozen=True, kw_only=True):
    """A further property of a cell, which was checked on some of the cell's problems."""

    name: str
    problems: Count = 0
    """The number of problems on which it was checked. 0 if no problem says anything about it, or if
    the candidate is exempt."""
    comparisons: Count = 0
    """The number of outputs that the judge compared, because their bits differ from those of a
    plain call."""
    margin: Size | None = 0.0
    """The largest statistic of any comparison, as a share of its limit; null if it is infinite."""
    seconds: Size = 0.0
    findings: tuple[str, ...] = ()
    """What is wrong, in words. Empty if the property holds."""
    on: str = ""
    """The problem of the findings, in words."""
    remedy: str = ""
    """What to do about the findings, in words."""
    explained: Explained | None = None
    """Another broken property that explains the findings, if there is one."""
    gaps: tuple[str, ...] = ()
    """A reason against AGREE for each mistake that the property is there to find, but that no
    problem would have shown."""
    exempt: str = ""
    """Why the candidate is exempt, as it declares."""

    @property
    def holds(self) -> bool:
        return not self.findings

    @property
    def symptom(self) -> str:
        """The name of a failure of the property in a verdict."""
        return f"property {self.name}"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings as reasons against AGREE. What to do comes after the first."""
        return with_todo_second([f"{self.symptom}: {finding}" for finding in self.findings], self.remedy)


class LargeProblems(Struct, frozen=True, kw_only=True):
    """The large problems of one size."""

    tokens: Count
    hidden: Count | None
    """Null if the kernel starts at logits."""
    vocab: Count
    margins: dict[str, Size | None]
    """The largest statistic of each output, as a share of its limit; null if it is infinite."""


class CellRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="cell"):
    """The result of a cell. Its numbers are enough to conclude the verdict again."""

    schema: str
    run: str
    """The run that wrote the record. Empty before it is written."""
    candidate: str
    property: str
    layout: str
    dtype: str
    world: str
    device: str
    spec: str
    head: str
    good_for: str = ""
    """The use that the candidate declares itself good for."""
    source: str
    """``file.py:name`` or ``package.module:name``."""
    source_digest: Sha256 | None = None
    """The digest of the file that declares the candidate."""
    source_modified: bool | None = None
    """Whether the file differs from the commit, or is not in it; null if that is not known."""
    verdict: Verdict
    numbers: Verdict | None = None
    """The verdict on the numbers alone, without the further properties. Null if the cell is of
    another property than agreement or of a known failure, or if the kernel crashed in another
    property."""
    reasons: tuple[str, ...] = ()
    """Why the verdict is not AGREE, in words."""
    causes: tuple[str, ...] = ()
    """The cause and what to do, in words. If no cause is named: that there is none, then the places
    where outputs are wrong."""
    cause: str = ""
    """The mistake that the first cause names. Empty if it names none."""
    explains: str = ""
    """What the mistake explains, in words."""
    problems: Count
    tokens: Count = 0
    """The number of tokens of the longest problem."""
    tokens_in_all: Count = 0
    """The number of tokens of all problems together."""
    vocab: Count | None = None
    """The largest vocabulary of a problem; null if the kernel has no logits."""
    large: tuple[LargeProblems, ...] = ()
    """The sizes of the large problems."""
    comparisons: Count = 0
    margin: Size | None = 0.0
    """The largest statistic of any comparison, as a share of its limit; null if it is infinite."""
    mde: float | None = None
    """The minimum detectable effect of the output with the least power; null if it is infinite."""
    symptoms: tuple[str, ...] = ()
    """The outputs and properties that disagree, and other faults."""
    needs_adequacy: bool
    """Whether AGREE requires coverage goals, killed mutants and a small detectable effect."""
    outputs: tuple[OutputRecord, ...] = ()
    properties: tuple[PropertyRecord, ...] = ()
    """The further properties that were checked."""
    faults: tuple[str, ...] = ()
    """Faults that are not in outputs: how the ranks failed, or what else the property found."""
    coverage: dict[str, Count] = field(default_factory=dict)
    """How many problems reach each coverage goal."""
    required: tuple[str, ...] = ()
    """The coverage goals that must be reached."""
    killed: Count = 0
    """How many option mutants were killed."""
    surviving: tuple[str, ...] = ()
    """The option mutants that no problem killed, without equivalent ones."""
    equivalent: tuple[str, ...] = ()
    """The option mutants that no problem can kill."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished, and that need not be, in words."""
    excluded: dict[str, str] = field(default_factory=dict)
    """The scenarios and choices that the candidate excludes from its problems, and the reasons that
    it declares."""
    conventions: dict[str, str] = field(default_factory=dict)
    """The conventions that the candidate declares, and what each means, in words."""
    gaps: tuple[str, ...] = ()
    """A reason against AGREE for each mistake that the cell's property is there to find, but that
    no problem would have shown."""
    mistakes_shown: Count = 0
    """How many known mistakes the problems would have shown."""
    mistakes_surviving: tuple[str, ...] = ()
    """The known mistakes that change an output noticeably, but that no problem shows, in words."""
    mistakes_too_small: tuple[str, ...] = ()
    """The known mistakes that no problem shows because they change outputs by little, in words."""
    mistakes_seconds: Size = 0.0
    """The CPU time that it took to find out which known mistakes show."""
    untried: tuple[str, ...] = ()
    """The sizes of the settings that could not be tried, such as ``4096x1024x32768``."""
    worst: tuple[WorstExample, ...] = ()
    """The worst examples, the worst first."""
    failure: Failure | None = None
    """Null if no single problem disagrees. The cell may still disagree when problems are pooled."""
    known_failure: KnownFailureRecord | None = None
    replay: str | None = None
    """The command that judges the disagreement again; null if there is none."""
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each budget, the most that a rank used in a call, and the budget; then the collectives by
    kind and group, and the sizes of the problem. Empty if the candidate declares no budgets."""
    seconds: Size = 0.0
    time: Time
    """When the record was written. Empty before that."""

    @builtins.property
    def key(self) -> CellKey:
        return CellKey(self.candidate, self.property, self.layout, self.dtype, self.world, self.device)

    @builtins.property
    def expected(self) -> bool:
        """Whether the cell disagrees in the way that a known failure expects."""
        return self.known_failure is not None and self.known_failure.expected

    @builtins.property
    def passes(self) -> bool:
        """Whether the cell agrees, or disagrees in the way that a known failure expects."""
        return self.verdict == Verdict.AGREE or self.expected

    def counts_as(self, *, numbers_only: bool) -> Verdict:
        """Returns the verdict that counts for a run. A known failure counts as AGREE.

        Args:
            numbers_only: whether broken promises do not count.
        """
        if self.passes:
            return Verdict.AGREE
        return self.numbers if numbers_only and self.numbers is not None else self.verdict

    @builtins.property
    def outcome(self) -> Outcome:
        """The verdict as people are told it."""
        if self.verdict != Verdict.DISAGREE:
            return Outcome(self.verdict)
        numbers_seem_right = self.numbers not in (None, Verdict.DISAGREE)
        return Outcome.PROMISE_BROKEN if numbers_seem_right or self.property != "agreement" else Outcome.DISAGREE

    @builtins.property
    def broken(self) -> tuple[str, ...]:
        """The properties other than agreement that are broken."""
        own = (self.property,) if self.outcome is Outcome.PROMISE_BROKEN and self.property != "agreement" else ()
        return (*own, *(one.name for one in self.properties if not one.holds))

    @builtins.property
    def missing_goals(self) -> tuple[str, ...]:
        """The required coverage goals that no problem reached."""
        return tuple(name for name in self.required if not self.coverage.get(name))

    @builtins.property
    def exempt(self) -> dict[str, str]:
        """The properties from which the candidate is exempt, and why."""
        return {one.name: one.exempt for one in self.properties if one.exempt}

    @builtins.property
    def held_to(self) -> tuple[str, ...]:
        """All further properties of the cell, also if the candidate is exempt from them or if no
        problem says anything about them.
        """
        return tuple(one.name for one in self.properties)

    @builtins.property
    def kept(self) -> tuple[str, ...]:
        """The further properties that were checked and that hold."""
        return tuple(one.name for one in self.properties if one.problems and one.holds)

    @builtins.property
    def told(self) -> tuple[str, ...]:
        """Why the verdict is not AGREE, in words: the cause and what to do, then the reasons. If no
        cause is named, a place where the outputs are wrong comes first, or else the first reason.
        """
        if self.cause:
            return (*self.causes, *self.reasons)
        return (*self.causes[1:2], *self.reasons, *self.causes[2:], *self.causes[:1])

    @builtins.property
    def first_told(self) -> str:
        """The cause and what to do, in one line. If no cause is named, the first that is told."""
        lines = self.causes[:1] if self.cause else self.told[:1]
        return "; ".join(line.partition("\n")[0] for line in (*lines, *([f"to do: {self.todo}"] if self.todo else [])))

    @builtins.property
    def todo(self) -> str:
        """What to do, in words: about the cause, if it is named. Empty if nothing is advised."""
        if self.cause and len(self.causes) > 1:
            return self.causes[1].removeprefix("to do: ")
        broken = (one.remedy for one in self.properties if not one.holds and one.explained is None)
        return next(broken, self.failure.todo if self.failure is not None else "")

    @builtins.property
    def why(self) -> str:
        """All that is told, in one line."""
        return "; ".join(self.told) or "no reason is given"


def with_sums(record: CellRecord) -> CellRecord:
    """Returns a record with the margin, minimum detectable effect and symptoms of its numbers."""
    return replace(record, margin=margin_of(record), mde=mde_of(record), symptoms=symptoms_of(record))


def symptoms_of(record: CellRecord) -> tuple[str, ...]:
    """Returns the symptoms that follow from the numbers and faults of a record."""
    wrong = {output.name for output in record.outputs if output.disagrees}
    broken = {one.symptom for one in record.properties if not one.holds}
    of_failure = record.failure.symptoms if record.failure is not None else ()
    return tuple(sorted(wrong | broken | {*record.faults, *of_failure}))


def margin_of(record: CellRecord) -> float | None:
    """Returns the largest share of a limit in the numbers of a record; None if it is infinite."""
    margin = max((max(output.margins.values()) for output in record.outputs), default=0.0)
    return None if margin == inf else margin


def mde_of(record: CellRecord) -> float | None:
    """Returns the minimum detectable effect of the output with the least power; None if it is
    infinite.

    Metrics that were zero on every problem are left out.
    """
    pooled = [output.pooled for output in record.outputs if output.pooled is not None or output.must_be_compared]
    effects = [one.mde for one in pooled if one is not None]
    never_compared = len(pooled) - len(effects)
    return max(effects) if effects and not never_compared else None
