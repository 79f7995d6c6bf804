# SPDX-License-Identifier: Apache-2.0
"""Reads ``[tool.lossgate]`` in pyproject.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.engine.setting_rules import refusal


@dataclass(frozen=True)
class Configured:
    """What pyproject.toml says: settings that may be what it says they are."""

    common: Mapping[str, Any] = field(default_factory=dict)
    """The settings of every profile."""
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings of each profile, by its name."""
    file: Path = Path("pyproject.toml")

    def places(self, profile: str) -> dict[str, str]:
        """Returns the file and the table in which each setting of a profile is, as messages name
        them.
        """
        own = dict.fromkeys(self.profiles.get(profile, {}), _table_of(self.file, profile))
        return {**dict.fromkeys(self.common, _table_of(self.file)), **own}


def _table_of(file: Path, profile: str = "") -> str:
    return f"{file}: [tool.lossgate{f'.profiles.{profile}' if profile else ''}] "


def read_pyproject(start: Path) -> Configured:
    """Reads the settings in the pyproject.toml of a folder, or of the nearest one above that has
    such a file.

    All profiles are checked, and not only the one that is used.

    Raises:
        UsageError: if the file cannot be read, or a setting may not be what it says. The message
            names the file, the table, the setting, its value, and what was expected.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.exists():
            return _configured(_table(_parsed(file), f"{file}: "), file)
    return Configured()


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start} is no UTF-8; save the file in UTF-8") from None
    except RecursionError:
        raise UsageError(f"{file}: its values are nested too deeply") from None
    except ValueError as error:  # those of TOML, and numbers of too many digits
        raise UsageError(f"{file}: {error}") from None


def _table(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the table of lossgate; an empty one if there is none."""
    tool = _as_table("tool", values.get("tool", {}), where)
    return _as_table("lossgate", tool.get("lossgate", {}), f"{where}[tool] ")


def _configured(table: Mapping[str, Any], file: Path) -> Configured:
    common = {name: value for name, value in table.items() if name != "profiles"}
    profiles = _as_table("profiles", table.get("profiles", {}), _table_of(file))
    _check(common, _table_of(file))
    for name, own in profiles.items():
        _check(_as_table(name, own, f"{file}: [tool.lossgate.profiles] "), _table_of(file, name))
    return Configured(common, profiles, file)


def _as_table(name: str, value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}{name}={shown(value)}: expected a table of settings, such as {{ examples = 30 }}")
    return value


def _check(settings: Mapping[str, Any], where: str) -> None:
    for name, value in settings.items():
        try:
            why = refusal(name, value)
        except UsageError as error:
            raise UsageError(f"{where}{error}") from None
        if why:
            raise UsageError(f"{where}{'' if why.startswith(f'{name}=') else f'{name}: '}{why}")
