# SPDX-License-Identifier: Apache-2.0
"""The tables of a policy: their keys, and the values that each key takes.

``policy.schema.json`` is made from these classes.
"""

import builtins
import math
import re
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from typing import Annotated, Literal

from msgspec import Meta, Struct

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.engine.cell_record import CellKey
from lossgate.engine.toml_tables import Expected
from lossgate.gate.policy_patterns import Demand, KnownCells, Patterns, any_fits, demands, literal
from lossgate.judge.pooling import LARGEST_MDE

_MOST_PROBLEMS = 1_000_000
"""The largest ``min_problems``. No cell has so many problems, so a larger number is a slip."""

_MOST_DEMANDS = 1_000_000
"""The most combinations of patterns in one rule: ten times the cells of a large release. Without a
limit, a slip could keep a gate busy for hours."""

_AGE = r"^(?=.*[1-9])([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(minute|hour|day|week)s?$"
_PERCENTAGE = r"^(?=.*[1-9])[0-9]{1,2}(\.[0-9]{1,9})? ?%$"
_EXACT = r"^[^*?]*[^\s*?][^*?]*$"
_UNIQUE = {"uniqueItems": True}


def _check_once(names: Sequence[str]) -> None:
    """Refuses a name that is listed twice."""
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UsageError(f"{name!r} is listed twice; remove one of the two")


def _check_layouts(patterns: Sequence[str]) -> None:
    """Refuses a name that is listed twice, and a pattern without wildcards that names no layout."""
    _check_once(patterns)
    for pattern in patterns:
        if (name := literal(pattern)) is not None:
            _check_layout(name)


def _check_layout(name: str) -> None:
    """Refuses a name that is no layout, or is spelt otherwise in evidence: no cell has it."""
    spelt = str(Layout.parse(name))
    if spelt != name:
        raise UsageError(f"expected {spelt!r}, which is how evidence spells this layout")


def _key(description: str, *examples: object) -> Meta:
    """Returns the description of a key for editors, and examples of its value for messages."""
    return Meta(description=description, examples=list(examples) or None)


_Name = Annotated[str, Meta(min_length=1)]
_Flag = Annotated[bool, Expected("true or false, without quotes")]
_Names = Annotated[tuple[_Name, ...], Meta(extra_json_schema=_UNIQUE), Expected("a list of names", _check_once)]
_Some = Meta(min_length=1, extra_json_schema=_UNIQUE)
_PATTERNS = "a list of at least one shell pattern"
_Patterns = Annotated[tuple[_Name, ...], _Some, Expected(_PATTERNS, _check_once)]
_LayoutPatterns = Annotated[tuple[_Name, ...], _Some, Expected(_PATTERNS, _check_layouts)]
_Exact = Annotated[str, Meta(pattern=_EXACT), Expected("an exact name, without wildcards")]
_ExactLayout = Annotated[
    str, Meta(pattern=_EXACT), Expected("the exact name of a layout, without wildcards", _check_layout)
]
_Text = Annotated[str, Meta(pattern=r"\S"), Expected("a text in quotes")]
_Age = Annotated[Annotated[str, Meta(pattern=_AGE)] | None, Expected("a number over 0 and a unit")]
_Count = Annotated[
    int, Meta(ge=1, le=_MOST_PROBLEMS), Expected(f"a whole number from 1 to {_MOST_PROBLEMS}, without quotes")
]
_Share = Annotated[
    # A whole number is refused: 1 could be meant as 1%.
    Annotated[float, Meta(gt=0, lt=1)] | Annotated[str, Meta(pattern=_PERCENTAGE)],
    Expected("more than 0 and less than 1, as a number or a percentage"),
]
_Address = Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+[^\s]*$"), Expected("the address of an issue")]
_Day = Annotated[date, Expected("a date without a time")]
_Schema = Annotated[Literal[1], Expected("1, the schema that this version of lossgate reads")]


class EvidenceRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for all evidence: ``[evidence]``."""

    max_age: Annotated[
        _Age,
        _key(
            "The greatest age of evidence. Without it, evidence may be of any age.",
            *("3 days", "36 hours", "90 minutes", "2 weeks"),
        ),
    ] = None
    same_commit: Annotated[_Flag, _key("Whether all evidence must be of one commit.")] = True
    unmodified: Annotated[
        _Flag, _key("Whether evidence is refused that comes from a checkout whose files differ from its commit.")
    ] = False
    same_versions: Annotated[
        _Names, _key("The versions that must be the same in all evidence.", ["lossgate", "torch", "python"])
    ] = ("lossgate", "torch")

    @property
    def oldest(self) -> timedelta | None:
        """The greatest age of evidence; None allows any."""
        found = re.search(_AGE, self.max_age or "")
        if found is None:
            return None
        number, unit = found.groups()
        return timedelta(**{f"{unit}s": float(number)})


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells that a release needs, and how well they must have been seen: ``[[require]]``."""

    candidates: Annotated[
        _Patterns,
        _key(
            "Shell patterns of candidates. A name without wildcards must be in the evidence, and a pattern must match "
            "at least one candidate.",
            ["nll_*"],
        ),
    ]
    properties: Annotated[_Patterns, _key("Shell patterns of properties.", ["agreement"])] = ("*",)
    layouts: Annotated[
        _LayoutPatterns,
        _key(
            "Shell patterns of layouts. A layout without wildcards is spelt as in evidence.",
            ["single", "cp=2,tp=2", "tp=*"],
        ),
    ] = ("*",)
    dtypes: Annotated[_Patterns, _key("Shell patterns of dtypes.", ["float32", "bfloat16"])] = ("*",)
    worlds: Annotated[_Patterns, _key("Shell patterns of worlds: where the ranks ran.", ["simulated", "gloo"])] = (
        "simulated",
    )
    devices: Annotated[_Patterns, _key("Shell patterns of devices: where the ranks computed.", ["cpu", "cuda"])] = (
        "cpu",
    )
    min_problems: Annotated[_Count, _key("The least problems of each cell.")] = 1
    max_mde: Annotated[
        _Share,
        _key(
            "The greatest minimum detectable effect of each cell: the error in the scale of an output that could have "
            "stayed hidden.",
            *(0.01, "1%"),
        ),
    ] = LARGEST_MDE
    keeps: Annotated[
        _Names,
        _key(
            "Names of further properties that each cell must have been held to, and must have kept.",
            ["frozen-inputs", "no-grad"],
        ),
    ] = ()
    numbers_only: Annotated[
        _Flag,
        _key(
            "Whether a cell may break promises, which are its further properties, if its numbers agree. Those in keeps "
            "must be kept all the same."
        ),
    ] = False

    def __post_init__(self) -> None:
        combinations = math.prod(map(len, (self.candidates, *self.others)))
        if combinations > _MOST_DEMANDS:
            raise UsageError(f"it asks for {combinations} combinations; expected at most {_MOST_DEMANDS}: split it up")

    @property
    def largest_mde(self) -> float:
        """``max_mde`` as a number, even if it is written as a percentage."""
        if not isinstance(self.max_mde, str):
            return self.max_mde
        # "0.5e-2" is 0.005, and 0.5 / 100 need not be the nearest float of it.
        return float(f"{self.max_mde.partition('%')[0].strip()}e-2")

    @property
    def others(self) -> tuple[Patterns, ...]:
        """The patterns for the other parts of a cell's key, in its order."""
        return self.properties, self.layouts, self.dtypes, self.worlds, self.devices

    def matches(self, key: CellKey) -> bool:
        """Returns whether the patterns match a cell. For many cells, ``demands`` is quicker."""
        return (
            any_fits(self.candidates, key.candidate)
            and any_fits(self.properties, key.property)
            and any_fits(self.layouts, key.layout)
            and any_fits(self.dtypes, key.dtype)
            and any_fits(self.worlds, key.world)
            and any_fits(self.devices, key.device)
        )

    def demands(self, known: KnownCells) -> Iterator[Demand]:
        """Yields the demands of the rule, each with the cells that meet it."""
        return demands(self.candidates, self.others, known)


class KnownFailureRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell that may disagree for a while, as its frozen example does: ``[[known_failure]]``."""

    candidate: Annotated[_Exact, _key("The exact name of the candidate.")]
    property: Annotated[_Exact, _key("The exact name of the property.")] = "agreement"
    layout: Annotated[_ExactLayout, _key("The layout, spelt as in evidence.")]
    dtype: Annotated[_Exact, _key("The dtype.")]
    world: Annotated[_Exact, _key("Where the ranks ran.")] = "simulated"
    device: Annotated[_Exact, _key("Where the ranks computed.")] = "cpu"
    name: Annotated[
        _Text, _key("The heading under which a document describes the failure, as its candidate declares it.")
    ]
    example: Annotated[_Text, _key("The failure file with the frozen example, relative to this file.")]
    issue: Annotated[
        _Address, _key("The address of the issue where it is followed up.", "https://example.com/issues/12")
    ]
    owner: Annotated[_Text, _key("Who mends it.")]
    expires: Annotated[_Day, _key("The last day on which it excuses the cell.", "2027-01-31")]

    @builtins.property
    def key(self) -> CellKey:
        return CellKey(self.candidate, self.property, self.layout, self.dtype, self.world, self.device)


class PolicyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which evidence a release needs: gate.toml, as lossgate gate reads it."""

    schema: Annotated[_Schema, _key("The version of this schema.")]
    evidence: Annotated[EvidenceRules, _key("Rules for all evidence."), Expected("a table")] = EvidenceRules()
    require: Annotated[
        tuple[Rule, ...],
        Meta(min_length=1),
        _key(
            "Each [[require]] asks for cells: for each candidate, at least one cell for every combination of the other "
            "lists."
        ),
        Expected(
            "at least one table [[require]], because a gate that needs nothing would pass anything; lossgate gate "
            "EVIDENCE --init writes a first policy"
        ),
    ]
    known_failure: Annotated[
        tuple[KnownFailureRule, ...],
        _key("Each [[known_failure]] excuses a cell until it expires, as long as its frozen example still disagrees."),
        Expected("tables that each begin with [[known_failure]]"),
    ] = ()
