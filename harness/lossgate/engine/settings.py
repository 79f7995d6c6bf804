# SPDX-License-Identifier: Apache-2.0
"""How much to verify: profiles, and ``[tool.lossgate]`` in pyproject.toml.

A flag wins over the profile in pyproject.toml, which wins over the built-in profile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.engine.pyproject import read_pyproject
from lossgate.engine.setting_rules import refusal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run.

    Raises:
        UsageError: if one has a value that it may not have; see ``setting_rules``.
    """

    examples: int = 20
    """The least problems per cell: a candidate, held to a property, on a layout, in a dtype. A cell
    never agrees on fewer than 8."""
    rounds: int = 4
    """While the cell is inconclusive: how often that many more are tried, and some are looked for
    that show what is missing."""
    ranks: int = 4
    """Largest layout, where none is named."""
    matrix: str = "covering"
    """Where no layouts are named: ``covering`` for few that cover what differs, or ``full`` for
    every one of at most ``ranks`` ranks that the candidate's axes allow, in every dtype."""
    layouts: tuple[str, ...] = ()
    """The layouts to verify on; by default those of ``matrix``."""
    dtypes: tuple[str, ...] = ()
    """The dtypes to verify; by default all that the candidate takes."""
    sizes: tuple[str, ...] = ()
    """A problem of each of these sizes is tried in every cell, too: tokens, width of the hidden
    states, and vocabulary, such as ``4096x1024x32768``."""
    world: str = "simulated"
    """Where the ranks run: ``simulated`` all in one process, ``gloo`` or ``nccl`` in one each, or
    in those that ``torchrun`` has launched."""
    device: str = "cpu"
    """Where the ranks compute: ``cpu`` or ``cuda``."""
    seed: int = 0
    """Problems are the same from run to run, unless this differs."""
    timeout: float = 60.0
    """Seconds that a simulated rank may take to the next collective, and a process to return; then
    it is taken to hang. So long at most a failing problem is made smaller."""
    jobs: int = 1
    """Processes that verify cells side by side; 0 for one on each core."""
    shrink_calls: int = 200
    """Most problems tried to make a failing one smaller."""
    properties: tuple[str, ...] = ()
    """The properties to verify, by name; by default all that apply. All but agreement are checked
    on ``property_problems`` problems of each cell, or in cells of their own if agreement is not
    among them."""
    property_problems: int = 2
    """Problems of a cell on which each property beside agreement is checked."""
    property_ranks: int = 2
    """Ranks on an axis, at most, where these properties are checked. It does not hold for layouts
    or properties that are named, nor for properties of how ranks work together."""

    places: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)
    """Where pyproject.toml gives settings, by name: the file and the table. No setting itself."""

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if why := refusal(name, value):
                raise UsageError(why)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple[Any, ...](value))
        object.__setattr__(self, "timeout", float(self.timeout))

    @property
    def values(self) -> dict[str, Any]:
        """The settings, by name."""
        return {own.name: getattr(self, own.name) for own in fields(self) if own.name != "places"}

    def where(self, name: str) -> str:
        """Returns how a message about a setting begins: with the place that gives it, if that is
        pyproject.toml.
        """
        return f"{self.places[name]}{name}: " if name in self.places else ""


PROFILES: Mapping[str, Settings] = {
    "dev": Settings(),
    "ci": Settings(examples=12, rounds=8, ranks=8, jobs=0, property_problems=1, property_ranks=2),
    "nightly": Settings(examples=100, ranks=16, matrix="full", jobs=0, property_problems=8, property_ranks=16),
    "release": Settings(examples=300, ranks=16, matrix="full", jobs=0, property_problems=20, property_ranks=16),
}


def load_settings(profile: str = "dev", start: Path | None = None, **flags: Any) -> Settings:
    """Returns the settings of a profile.

    Args:
        profile: its name.
        start: where pyproject.toml is looked for; by default in the working folder.
        flags: settings that win over those of the profile, except those that are None.

    Raises:
        UsageError: if there is no such profile, or a setting may not be what a flag or
            pyproject.toml says.
    """
    configured = read_pyproject(start or Path.cwd())
    known = dict.fromkeys([*PROFILES, *configured.profiles])
    if profile not in known:
        raise UsageError(f"unknown profile {shown(profile)}; expected one of {', '.join(known)}")
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        if why := refusal(name, value):
            raise UsageError(why)
    values = {**configured.common, **configured.profiles.get(profile, {}), **given}
    places = {name: place for name, place in configured.places(profile).items() if name not in given}
    return replace(PROFILES.get(profile, Settings()), **values, places=places)
