# SPDX-License-Identifier: Apache-2.0
"""The record of a cell: all that is told of it, as data.

It is made where the cell ran. The terminal, the page, the gate and ``lossgate diff`` read it, and
evidence writes it as it is. The string below a field is its description in the published schema.
"""

import builtins
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from lossgate.engine.output_record import Count, OutputRecord, Size

SCHEMA = "2.0"
"""Version of the schema: an older reader understands another second number, not another first."""

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="A SHA-256 in hexadecimal digits.")]
Time = Annotated[
    str,
    Meta(
        pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$",
        description="A time in UTC, as 2026-01-31T12:00:00+00:00.",
    ),
]


class Verdict(StrEnum):
    """The verdict on a cell. INCONCLUSIVE: nothing wrong was seen, and not enough was seen."""

    AGREE = "AGREE"
    DISAGREE = "DISAGREE"
    INCONCLUSIVE = "INCONCLUSIVE"


class CellKey(Struct, frozen=True, order=True, array_like=True):
    """What identifies a cell."""

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
        """Returns whether a pattern names the cell, by all of its name or by that of its candidate.

        ``*`` stands for any text and ``?`` for any character. Brackets stand for themselves,
        because names of cells have them: ``nll_*[*tp=2*]``.
        """
        literal = pattern.replace("[", "[[]")
        return any(fnmatchcase(name, literal) for name in (str(self), self.candidate))

    @builtins.property
    def place(self) -> str:
        """World and device; empty for simulated ranks on the CPU, which are usual."""
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
    symptoms: tuple[str, ...]
    """What identifies the disagreement: the outputs in which it shows, or how the ranks failed."""
    shrink_calls: Count = 0
    """How many problems were tried to make it smaller."""
    side_by_side: tuple[str, ...] = ()
    """What was got on it beside what is wanted, in words; the entries that are farthest off."""


class KnownFailureRecord(Struct, frozen=True, kw_only=True):
    """The known failure that a candidate declares: its frozen example was judged, nothing else."""

    name: str
    example: Sha256
    """Of the file with the frozen example."""
    expected: bool
    """Whether it still disagrees in the same outputs."""


class PropertyRecord(Struct, frozen=True, kw_only=True):
    """A property that a cell was held to beside its own, on some of its problems."""

    name: str
    problems: Count = 0
    """On how many problems it was checked. 0 if none says anything about it, or if the candidate is
    exempt."""
    comparisons: Count = 0
    """Outputs that were compared by the judge because they had other bits than those of a plain
    call."""
    margin: Size | None = 0.0
    """The largest statistic of any comparison, as a share of its limit; null if it is infinite."""
    seconds: Size = 0.0
    findings: tuple[str, ...] = ()
    """What is wrong, in words; nothing if it holds."""
    on: str = ""
    """The problem of the findings, in words."""
    remedy: str = ""
    """What to do about the findings, in words."""
    gaps: tuple[str, ...] = ()
    """The mistakes that it is there to find and that no problem would have shown, as reasons
    against AGREE."""
    exempt: str = ""
    """Why the candidate is not held to it, as it declares."""

    @property
    def holds(self) -> bool:
        return not self.findings

    @property
    def symptom(self) -> str:
        """What identifies the failure of the property in a verdict."""
        return f"property {self.name}"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings as reasons against AGREE, and what to do."""
        said = tuple(f"{self.symptom}: {finding}" for finding in self.findings)
        return (*said, f"to do: {self.remedy}") if said and self.remedy else said


class LargeProblems(Struct, frozen=True, kw_only=True):
    """The large problems of one size."""

    tokens: Count
    hidden: Count | None
    """Null if the kernel starts at logits."""
    vocab: Count
    margins: dict[str, Size | None]
    """The largest statistic of each output, as a share of its limit; null if it is infinite."""


class CellRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="cell"):
    """What came of a cell. Its numbers are enough to redo the verdict."""

    schema: str
    run: str
    """The run that wrote it; empty until then."""
    candidate: str
    property: str
    layout: str
    dtype: str
    world: str
    device: str
    spec: str
    head: str
    good_for: str = ""
    """What the candidate is good for, as it declares."""
    source: str
    """``file.py:name`` or ``package.module:name``."""
    source_digest: Sha256 | None = None
    """Of the file that declares the candidate."""
    source_modified: bool | None = None
    """Whether that file differs from the commit, or is not in it; null if that is not known."""
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    """In words, why the verdict is not AGREE."""
    causes: tuple[str, ...] = ()
    """What may have gone wrong and what to do, in words; the likeliest first."""
    cause: str = ""
    """The mistake of the first of them alone; empty if none is named."""
    explains: str = ""
    """What that mistake explains, in words."""
    problems: Count
    tokens: Count = 0
    """Of the longest problem."""
    tokens_in_all: Count = 0
    """Of all problems together."""
    vocab: Count | None = None
    """Of the problem with the most rows; null if the kernel has no logits."""
    large: tuple[LargeProblems, ...] = ()
    """The large problems, by their size."""
    comparisons: Count = 0
    margin: Size | None = 0.0
    """The largest statistic of any comparison, as a share of its limit; null if it is infinite."""
    mde: float | None = None
    """The minimum detectable effect of the output with the least power; null if it is infinite."""
    symptoms: tuple[str, ...] = ()
    """What disagrees: outputs, properties, and faults beside them."""
    needs_adequacy: bool
    """Whether the property asks for goals, killed mutants and a small detectable effect."""
    outputs: tuple[OutputRecord, ...] = ()
    properties: tuple[PropertyRecord, ...] = ()
    """What came of the properties beside its own."""
    faults: tuple[str, ...] = ()
    """What disagreed beside outputs: how the ranks failed, or what else the property found."""
    coverage: dict[str, Count] = field(default_factory=dict)
    """How many problems reach each coverage goal."""
    required: tuple[str, ...] = ()
    """The goals that must be reached."""
    killed: Count = 0
    """How many option mutants were killed."""
    surviving: tuple[str, ...] = ()
    """The option mutants that no problem killed."""
    equivalent: tuple[str, ...] = ()
    """Those of them that no problem can kill."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished, and that none need to, in words."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Scenarios and their choices that problems do not have, and why the candidate is never given
    them, as it declares."""
    gaps: tuple[str, ...] = ()
    """The mistakes that its own property is there to find and that no problem would have shown, as
    reasons against AGREE."""
    mistakes_shown: Count = 0
    """How many known mistakes the problems would have shown."""
    mistakes_surviving: tuple[str, ...] = ()
    """In words, those that no problem shows although they change an output noticeably."""
    mistakes_too_small: tuple[str, ...] = ()
    """In words, those that no problem shows because they change outputs by little."""
    mistakes_seconds: Size = 0.0
    """CPU time that it took to ask."""
    untried: tuple[str, ...] = ()
    """The sizes of the settings that could not be tried, such as ``4096x1024x32768``."""
    worst: tuple[WorstExample, ...] = ()
    """The worst examples, the worst first."""
    failure: Failure | None = None
    """Null if nothing disagrees, or only all problems pooled."""
    known_failure: KnownFailureRecord | None = None
    replay: str | None = None
    """The command that judges its disagreement again, if it has one."""
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    """The most that a rank used in a call, by budget, and the budget; then the collectives by kind
    and group, and the sizes of the problem. Empty if the candidate declares no budgets."""
    seconds: Size = 0.0
    time: Time
    """When it was written; empty until then."""

    @builtins.property
    def key(self) -> CellKey:
        return CellKey(self.candidate, self.property, self.layout, self.dtype, self.world, self.device)

    @builtins.property
    def expected(self) -> bool:
        """Whether it disagrees as a known failure says."""
        return self.known_failure is not None and self.known_failure.expected

    @builtins.property
    def passes(self) -> bool:
        """Whether the cell agrees, or disagrees as a known failure says."""
        return self.verdict == Verdict.AGREE or self.expected

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
        """All properties beside its own that it was to be held to: those that it kept or broke,
        those from which the candidate is exempt, and those of which no problem says anything.
        """
        return tuple(one.name for one in self.properties)

    @builtins.property
    def kept(self) -> tuple[str, ...]:
        """The properties that it was held to beside its own, and kept."""
        return tuple(one.name for one in self.properties if one.problems and one.holds)

    @builtins.property
    def why(self) -> str:
        """Why it is not AGREE, what may have gone wrong, and what was got where what is wanted, in
        one line.
        """
        shown = self.failure.side_by_side if self.failure is not None else ()
        return "; ".join((*self.reasons, *self.causes, *shown)) or "no reason is given"


def with_sums(record: CellRecord) -> CellRecord:
    """Returns a record with what follows from its numbers: margin, minimum detectable effect and
    symptoms.
    """
    return replace(record, margin=margin_of(record), mde=mde_of(record), symptoms=symptoms_of(record))


def symptoms_of(record: CellRecord) -> tuple[str, ...]:
    """Returns what disagrees by the numbers and faults of a record."""
    wrong = {output.name for output in record.outputs if output.disagrees}
    broken = {one.symptom for one in record.properties if not one.holds}
    of_failure = record.failure.symptoms if record.failure is not None else ()
    return tuple(sorted(wrong | broken | {*record.faults, *of_failure}))


def margin_of(record: CellRecord) -> float | None:
    """Returns the largest share of a limit that the numbers of a record give; None if infinite."""
    margin = max((max(output.margins.values()) for output in record.outputs), default=0.0)
    return None if margin == inf else margin


def mde_of(record: CellRecord) -> float | None:
    """Returns the minimum detectable effect of the output with the least power; None if it is
    infinite.

    Metrics that were zero on every problem are left out.
    """
    counted = [output for output in record.outputs if output.pooled is not None or output.must_be_compared]
    effects = [output.pooled.mde for output in counted if output.pooled is not None]
    return max(effects) if effects and len(effects) == len(counted) else None
