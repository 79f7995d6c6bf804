# SPDX-License-Identifier: Apache-2.0
"""How much to verify: profiles, and ``[tool.lossgate]`` in pyproject.toml.

A flag wins over the profile in pyproject.toml, which wins over the built-in profile.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lossgate.dtypes import DTYPES
from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run."""

    examples: int = 20
    """The least problems per cell: a candidate, held to a property, on a layout, in a dtype. A cell
    never agrees on fewer than 8."""
    rounds: int = 4
    """While the cell is inconclusive: how often that many more are tried, and some are looked for
    that show what is missing."""
    ranks: int = 4
    """Largest layout, where none is named."""
    layouts: tuple[str, ...] = ()
    """The layouts to verify on; by default every one of at most ``ranks`` ranks that the
    candidate's axes allow."""
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
    property_ranks: int = 4
    """Ranks on an axis, at most, where these properties are checked. It does not hold for layouts
    or properties that are named, nor for properties of how ranks work together."""

    def __post_init__(self) -> None:
        for name in ("examples", "rounds", "ranks", "timeout", "property_problems", "property_ranks"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}={getattr(self, name)}: expected a positive number")
        if self.shrink_calls < 0:
            raise UsageError(f"shrink_calls={self.shrink_calls}: expected a number of problems, or 0 for none")
        if self.jobs < 0:
            raise UsageError(f"jobs={self.jobs}: expected a number of processes, or 0 for one on each core")
        if unknown := [dtype for dtype in self.dtypes if dtype not in DTYPES]:
            raise UsageError(f"unknown dtype {unknown[0]!r}; expected any of {', '.join(DTYPES)}")
        for layout in self.layouts:
            Layout.parse(layout)
        for size in self.sizes:
            Shape.of_size(size)


PROFILES: Mapping[str, Settings] = {
    "dev": Settings(),
    "ci": Settings(examples=12, rounds=8, ranks=8, jobs=0, property_problems=1, property_ranks=3),
    "nightly": Settings(examples=100, ranks=16, jobs=0, property_problems=8, property_ranks=16),
    "release": Settings(examples=300, ranks=16, jobs=0, property_problems=20, property_ranks=16),
}


def load_settings(profile: str = "dev", start: Path | None = None, **flags: Any) -> Settings:
    """The settings of a profile, with ``flags`` that are not None on top.

    ``start`` is where pyproject.toml is looked for.
    """
    configured = _read_pyproject(start or Path.cwd())
    profiles = configured.get("profiles", {})
    if profile not in {*PROFILES, *profiles}:
        raise UsageError(
            f"unknown profile {profile!r}; expected one of {', '.join(dict.fromkeys([*PROFILES, *profiles]))}"
        )
    base = msgspec.to_builtins(PROFILES.get(profile, Settings()))
    common = {name: value for name, value in configured.items() if name != "profiles"}
    given = {name: value for name, value in flags.items() if value is not None}
    values = base | common | profiles.get(profile, {}) | given
    if unknown := set(values) - set(base):
        raise UsageError(f"settings: unknown setting {min(unknown)!r}; expected any of {', '.join(base)}")
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise UsageError(f"settings: {error}") from None


def _read_pyproject(start: Path) -> dict[str, Any]:
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                return tomllib.loads(file.read_text()).get("tool", {}).get("lossgate", {})
            except tomllib.TOMLDecodeError as error:
                raise UsageError(f"{file}: {error}") from None
    return {}
