# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, which profiles and ``[tool.lossgate]`` in pyproject.toml give.

A flag wins over the profile in pyproject.toml, which wins over the built-in profile.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from lossgate.base.argument import Argument
from lossgate.base.errors import UsageError
from lossgate.base.layout import MAX_RANKS, Layout
from lossgate.base.names import DEVICES, DTYPES, WORLD_NAMES, named, nearest_dtype
from lossgate.base.shape import Shape
from lossgate.base.spelling import shown
from lossgate.engine.toml_tables import Expected, each, one_of, parse_toml, read_field, read_fields

_MOST = 1_000_000
"""The largest count, and the longest time in seconds. A run with more would never end."""
_MOST_SEED = 2**63 - 1
"""The largest number that evidence can hold."""


def _check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {shown(name)}; {nearest_dtype(name)}")


_Count = Annotated[int, Meta(ge=1, le=_MOST), Expected(f"a positive whole number, at most {_MOST:,}")]
_Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS), Expected(f"a positive whole number of ranks, at most {MAX_RANKS}")]
_Seed = Annotated[int, Meta(ge=0, le=_MOST_SEED), Expected(f"a whole number from 0 to {_MOST_SEED}")]
_Seconds = Annotated[float, Meta(gt=0, le=_MOST), Expected(f"a positive number of seconds, at most {_MOST:,}")]
_Processes = Annotated[int, Meta(ge=0, le=_MOST), Expected("a number of processes, or 0 for one on each core")]
_Problems = Annotated[int, Meta(ge=0, le=_MOST), Expected("a number of problems, or 0 for none")]
_Flag = Annotated[bool, Expected("true or false, without quotes")]
_Layouts = Annotated[tuple[str, ...], Meta(examples=[["single", "tp=2,cp=2"]]), each("a list of layouts", Layout.parse)]
_Dtypes = Annotated[tuple[str, ...], Meta(examples=[["float32", "bfloat16"]]), each("a list of dtypes", _check_dtype)]
_Sizes = Annotated[tuple[str, ...], Meta(examples=[["4096x1024x32768"]]), each("a list of sizes", Shape.of_size)]
_Properties = Annotated[
    tuple[str, ...],
    Meta(examples=[["agreement", "frozen-inputs"]]),
    # The names are not checked here, because the files of candidates may register more properties.
    Expected("a list of names of properties"),
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run.

    Raises:
        UsageError: if a setting has a value that it may not have.
    """

    examples: _Count = 20
    """The fewest problems of a cell. A cell never agrees on fewer than 8."""
    rounds: _Count = 4
    """The most rounds of problems. While a cell is inconclusive, each further round tries
    ``examples`` more problems, and problems that may show what is missing."""
    ranks: _Ranks = 4
    """The ranks of the largest layout, if no layouts are named."""
    matrix: Annotated[str, one_of(("least", "covering", "full"))] = "covering"
    """The layouts, if none are named: ``covering`` for a few that cover what differs, ``full`` for
    all of at most ``ranks`` ranks that the candidate's axes allow, in every dtype, or ``least`` for
    one rank and the one of these few that splits most axes, in one dtype."""
    layouts: _Layouts = ()
    """The layouts to verify on; by default those of ``matrix``."""
    dtypes: _Dtypes = ()
    """The dtypes to verify; by default all that the candidate takes."""
    sizes: _Sizes = ()
    """Sizes of further problems. Every cell also tries a problem of each size: tokens, width of the
    hidden states, and vocabulary, such as ``4096x1024x32768``."""
    world: Annotated[str, one_of(WORLD_NAMES)] = "simulated"
    """Where the ranks run: ``simulated`` all in one process, ``gloo`` or ``nccl`` in one process
    each, or ``torchrun`` in the processes that it has launched."""
    device: Annotated[str, one_of(DEVICES)] = "cpu"
    """Where the ranks compute: ``cpu`` or ``cuda``."""
    seed: _Seed = 0
    """Another seed draws other problems. With the same seed, runs have the same problems."""
    timeout: _Seconds = 60.0
    """Seconds that a simulated rank may take until its next collective, and a process until its
    result. After that it is taken to hang. A failing problem is shrunk no longer than this."""
    jobs: _Processes = 1
    """Processes that verify cells side by side; 0 for one on each core."""
    shrink_calls: _Problems = 200
    """The most problems that are tried to make a failing one smaller."""
    properties: _Properties = ()
    """The properties to verify, by name; by default all that apply. All but agreement are checked
    on ``property_problems`` problems of each cell, or in cells of their own if agreement is not
    among them."""
    property_problems: _Count = 2
    """The fewest problems of a cell on which each property but agreement is checked. Up to three
    are taken for the choices of options, and more if mistakes that the property names need them."""
    property_ranks: _Ranks = 2
    """The most ranks on an axis of the layouts on which these properties are checked. It does not
    hold for layouts or properties that are named, nor for properties of how ranks work together."""
    numbers_only: _Flag = False
    """Whether a cell whose numbers agree passes although it breaks promises, which are the other
    properties. They are told all the same."""

    places: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)
    """The file and table of each setting that pyproject.toml gives, by name. It is no setting."""

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            object.__setattr__(self, name, read_field(Settings, name, value))

    @property
    def values(self) -> dict[str, Any]:
        """The settings, by name."""
        return {own.name: getattr(self, own.name) for own in fields(self) if own.name != "places"}

    def where(self, name: str) -> str:
        """Returns the beginning of a message about a setting: its place in pyproject.toml, or "" if
        it does not come from there.
        """
        return f"{self.places[name]}{name}: " if name in self.places else ""


PROFILES: Mapping[str, Settings] = {
    "dev": Settings(),
    "quick": Settings(examples=8, rounds=8, ranks=8, matrix="least", jobs=0, property_problems=1, property_ranks=1),
    "ci": Settings(examples=12, rounds=8, ranks=8, jobs=0, property_problems=1, property_ranks=2),
    "nightly": Settings(examples=100, ranks=16, matrix="full", jobs=0, property_problems=8, property_ranks=16),
    "release": Settings(examples=300, ranks=16, matrix="full", jobs=0, property_problems=20, property_ranks=16),
}


def names_of(call: str, argument: str, given: Iterable[Any] | Any) -> tuple[str, ...] | None:
    """Returns the names of layouts, dtypes or properties that a call is given; None if it is given
    none. A single one need not be in a list, and a dtype may be torch's own.

    Raises:
        UsageError: if they have no order.
    """
    alone = given if isinstance(given, str) else named(given)
    names = (alone,) if isinstance(alone, str) else Argument(call, argument, given or ()).several(argument)
    return tuple(str(named(one)) for one in names) or None


@dataclass(frozen=True)
class _Table:
    """A table of settings in pyproject.toml."""

    header: str = ""
    """The file and the table. Messages begin with it."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load_settings(profile: str = "dev", start: Path | None = None, **flags: Any) -> Settings:
    """Returns the settings of a profile.

    The file pyproject.toml is looked for in a folder, and then in the folders above. All its
    profiles are checked, and not only the one that is used.

    Args:
        profile: the name of the profile.
        start: the folder in which the search begins; by default the working folder.
        flags: settings that win over those of the profile. None leaves a setting as it is.

    Raises:
        UsageError: if there is no such profile, or if a flag or pyproject.toml gives a wrong value.
            The message names the setting, its value, what was expected, and the file and table.
    """
    common, profiles = _configured(start or Path.cwd())
    known = dict.fromkeys([*PROFILES, *profiles])
    if profile not in known:
        raise UsageError(f"unknown profile {shown(profile)}; expected one of {', '.join(known)}")
    given = {name: value for name, value in flags.items() if value is not None}
    values, places = dict[str, Any](), dict[str, str]()
    for table in (common, profiles.get(profile, _Table())):
        values.update(table.settings)
        places.update(dict.fromkeys(table.settings, table.header))
    for name in given:
        places.pop(name, None)
    return replace(PROFILES.get(profile, Settings()), **values | given, places=places)


def _configured(start: Path) -> tuple[_Table, Mapping[str, _Table]]:
    """Returns the settings in pyproject.toml: those that all profiles share, and those of each
    profile by name.
    """
    files = (folder / "pyproject.toml" for folder in (start, *start.parents))
    file = next((file for file in files if file.exists()), None)
    return (_Table(), {}) if file is None else _tables(file)


def _tables(file: Path) -> tuple[_Table, Mapping[str, _Table]]:
    header = f"{file}: [tool.lossgate"
    tool = _table("tool", _parsed(file), f"{file}: ")
    own = _table("lossgate", tool, f"{file}: [tool] ")
    profiles = _table("profiles", own, f"{header}] ")
    common = {name: value for name, value in own.items() if name != "profiles"}
    by_profile: dict[str, _Table] = {}
    for name in profiles:
        settings = _table(name, profiles, f"{header}.profiles] ")
        by_profile[name] = _checked(settings, f"{header}.profiles.{name}] ")
    return _checked(common, f"{header}] "), by_profile


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(file.read_bytes(), file)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from None


def _table(name: str, values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns a table of a file, or an empty table if the file has none of this name."""
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{where}{name}={shown(table)}: expected a table of settings, such as {{ examples = 30 }}")
    return table


def _checked(settings: Mapping[str, Any], header: str) -> _Table:
    return _Table(header, read_fields(Settings, settings, header))
