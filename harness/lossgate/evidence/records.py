# SPDX-License-Identifier: Apache-2.0
"""The schema of evidence. A line holds one record: of a run, of a cell, or of the end of a run.

``evidence.schema.json`` is made from these classes. A reader ignores fields that it does not know,
so that a later version of lossgate may tell more. A change that an older reader would misread
raises the first number of ``SCHEMA``.
"""

import builtins
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

SCHEMA = "1.4"
"""Version of the schema: an older reader understands another second number, not another first."""

WITHOUT_NOISE = "1.0"
"""The version in which outputs had no ``noise``."""

VerdictName = Literal["AGREE", "DISAGREE", "INCONCLUSIVE"]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="A SHA-256 in hexadecimal digits.")]
Time = Annotated[
    str,
    Meta(
        pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$",
        description="A time in UTC, as 2026-01-31T12:00:00+00:00.",
    ),
]
Part = Annotated[str, Meta(pattern=r"^[1-9]\d{0,8}/[1-9]\d{0,8}$", description="A part and their number, as 3/8.")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Size = Annotated[float, Meta(ge=0)]
"""A number that is not negative."""


class CellKey(Struct, frozen=True, order=True, array_like=True):
    """What identifies a cell."""

    candidate: str
    property: str
    layout: str
    dtype: str
    world: str
    device: str

    def __str__(self) -> str:
        where = "" if (self.world, self.device) == ("simulated", "cpu") else f" on {self.world}/{self.device}"
        return f"{self.candidate}[{self.property}-{self.layout}-{self.dtype}]{where}"


class Matrix(Struct, frozen=True, kw_only=True):
    """All cells of a run, or of the runs that share them out between them."""

    cells: Count
    digest: Sha256
    """Of the names of all cells, sorted. The parts of one matrix have the same."""


class RunRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """The first record of a run. Each cell and the end of the run name it by ``run``."""

    schema: str
    run: str
    """A random name."""
    started: Time
    commit: str | None
    """Of the working folder, if that is a git checkout."""
    modified: bool | None
    """Whether files in it differ from the commit; null if that is not known. Files that are not in
    the commit do not count."""
    host: str
    versions: dict[str, str]
    """Of lossgate, torch, python, and the machine's kind."""
    settings: dict[str, Any]
    """How much was verified: the profile's settings, and the seed."""
    part: Part | None = None
    """Which part of the matrix this run verifies; null for all of it."""
    matrix: Matrix | None = None
    """The whole matrix, if it is known at the start."""
    cells: tuple[CellKey, ...] | None = None
    """The cells of this run, if they are known at the start."""


class EndRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The last record of a run. A run without it was stopped, or its file was cut."""

    schema: str
    run: str
    finished: Time
    cells: Count
    """How many cells it has."""
    cells_digest: Sha256
    """Of the digests of their lines, sorted."""
    stopped: str = ""
    """In words, why not all cells were verified; empty if they were."""
    planned: tuple[CellKey, ...] | None = None
    """The cells of the run, if they were not known at the start."""


class PooledNoiseRecord(Struct, frozen=True, kw_only=True):
    """The noise of an output over all problems of a cell that say something about it."""

    problems: Count
    noise: Size
    """What a quarter of the problems reach, in units of the noisiest correct run of each."""
    limit: Size


class PooledRecord(Struct, frozen=True, kw_only=True):
    """The scale of an output over all problems of a cell that say something about it, and its
    noise.
    """

    problems: Count
    scale: float
    """By how much the output is too large, relative to the reference."""
    limit: Size
    """The largest that rounding explains, on either side of 0."""
    noise: PooledNoiseRecord | None = None
    """Null if too few problems say something about the noise, or in evidence of schema 1.0."""

    @property
    def mde(self) -> float:
        """The minimum detectable effect."""
        return self.limit + abs(self.scale)


class OutputRecord(Struct, frozen=True, kw_only=True):
    """One output of a cell: how it compared on each problem. ``cases``, ``scale``, ``limit``,
    ``sd``, ``mean``, ``noise`` and the lists in ``shares`` have one entry for each comparison.
    """

    name: str
    """``loss``, ``logprobs``, ``token_entropy``, a metric, or ``grad of`` an input."""
    metric: bool
    """It may be zero on every problem: a share of tokens that are clipped, say."""
    cases: tuple[Count, ...] = ()
    """The number of each problem on which it was compared."""
    without_numbers: tuple[Count, ...] = ()
    """The number of each further problem: there it is exactly zero in every correct run, or it is
    not finite, which is a fault."""
    scale: tuple[float, ...] = ()
    """By how much the output is too large, relative to the reference."""
    limit: tuple[Size, ...] = ()
    """The largest ``scale`` that rounding explains, on either side of 0."""
    sd: tuple[Size, ...] = ()
    """Standard deviation of ``scale`` over correct runs that round."""
    mean: tuple[float, ...] = ()
    """Mean of ``scale`` over correct runs that round."""
    noise: tuple[Size | None, ...] | None = None
    """How noisy the output is, in units of the noisiest correct run that rounds; null if none has
    any noise. No list in evidence of schema 1.0."""
    vacuous: tuple[Count, ...] = ()
    """The entries of comparisons whose reference was zero, so that no error of scale could show."""
    silent: tuple[Count, ...] = ()
    """The entries of comparisons in which rounding explains an output of zero, and one that is
    twice as large."""
    shares: dict[str, tuple[Size | None, ...]] = field(default_factory=dict)
    """Each other statistic as a share of its limit, rounded up to three digits: over 1, or null for
    any number over a limit of zero, is a disagreement. 0 where it was not measured. Outputs that
    are a number have none."""
    unit: Size = 0.0
    """Unit roundoff of the output's dtype."""
    kernels: Count = 1
    """How many kernels' rounding is in it."""
    faults: tuple[str, ...] = ()
    """What is wrong whatever the noise, in words."""
    pooled: PooledRecord | None = None
    """Null if no problem says anything about the scale."""
    planted: dict[str, Size] = field(default_factory=dict)
    """The share of the planted errors that were rejected, by kind."""
    blind: tuple[str, ...] = ()
    """Planted errors that were accepted although the limits say otherwise: a fault of lossgate."""


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
    replay: str | None = None
    """The command that judges it again."""
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
    problems: Count
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
    exempt: str = ""
    """Why the candidate is not held to it, as it declares."""


class CellRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="cell"):
    """What came of a cell. Its numbers are enough to redo the verdict."""

    schema: str
    run: str
    candidate: str
    property: str
    layout: str
    dtype: str
    world: str
    device: str
    spec: str
    head: str
    source: str
    """``file.py:name`` or ``package.module:name``."""
    source_digest: Sha256 | None
    """Of the file that declares the candidate."""
    source_modified: bool | None = None
    """Whether that file differs from the commit, or is not in it; null if that is not known."""
    verdict: VerdictName
    reasons: tuple[str, ...]
    """In words, why the verdict is not AGREE."""
    problems: Count
    comparisons: Count
    needs_adequacy: bool
    """Whether the property asks for goals, killed mutants and a small detectable effect."""
    outputs: tuple[OutputRecord, ...]
    properties: tuple[PropertyRecord, ...] = ()
    """What came of the properties beside its own; empty in evidence of schema 1.0 and 1.1."""
    faults: tuple[str, ...]
    """What disagreed beside outputs: how the ranks failed, or what else the property found."""
    mde: float | None
    """The minimum detectable effect of the output with the least power; null if it is infinite."""
    coverage: dict[str, Count]
    """How many problems reach each coverage goal."""
    required: tuple[str, ...]
    """The goals that must be reached."""
    killed: Count
    """How many option mutants were killed."""
    surviving: tuple[str, ...]
    """The option mutants that no problem killed."""
    equivalent: tuple[str, ...]
    """Those of them that no problem can kill."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished, and that none need to, in words."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Scenarios and their choices that problems do not have, and why the candidate is never given
    them, as it declares."""
    mistakes_shown: Count = 0
    """How many known mistakes the problems would have shown; 0 in evidence before schema 1.4."""
    mistakes_surviving: tuple[str, ...] = ()
    """In words, those that no problem shows although they change an output noticeably."""
    mistakes_too_small: tuple[str, ...] = ()
    """In words, those that no problem shows because they change outputs by little."""
    mistakes_seconds: Size = 0.0
    """CPU time that it took to ask."""
    untried: tuple[str, ...] = ()
    """The sizes of the settings that could not be tried, such as ``4096x1024x32768``."""
    worst: tuple[WorstExample, ...]
    """The worst examples, the worst first."""
    failure: Failure | None
    known_failure: KnownFailureRecord | None
    seconds: Size
    time: Time
    causes: tuple[str, ...] = ()
    """What may have gone wrong, in words; the likeliest first."""
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    """The most that a rank used in a call, by budget, and the budget; then the collectives by kind
    and group, and the sizes of the problem. Empty if the candidate declares no budgets."""

    @builtins.property
    def key(self) -> CellKey:
        return CellKey(self.candidate, self.property, self.layout, self.dtype, self.world, self.device)


Record = RunRecord | CellRecord | EndRecord
