# SPDX-License-Identifier: Apache-2.0
"""Refuses failure files that would run code outside the working folder, unless they are trusted."""

import importlib.util
import sys
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.engine.failure_files import FailureFile

_LOSSGATE = Path(__file__).resolve().parents[1]


def check_trusted(failure: FailureFile, file: Path) -> None:
    """Refuses a failure file that names code outside the working folder. Nothing is imported.

    Raises:
        UsageError: if the candidate is outside the working folder, or in an installed module.
    """
    if (place := _outside(failure.candidate)) is not None:
        raise UsageError(
            f"{file} names the candidate {shown(failure.candidate)}, whose code is in {place}, outside the working "
            "folder; replaying it runs that code: add --trust if you trust the file, or name the candidate: "
            "--candidate file.py:name"
        )


def needs_trust(source: str) -> bool:
    """Returns whether a failure file of a candidate is replayed only with ``--trust``."""
    return _outside(source) is not None


def _outside(source: str) -> Path | None:
    """Returns the file of a candidate if it is outside the working folder; else None.

    Packages in a virtual environment within the working folder count as outside, because the user
    did not write them. lossgate itself counts as inside, because its code runs anyway.
    """
    place = _place(source.rpartition(":")[0] or source)
    here, installed = Path.cwd().resolve(), Path(sys.prefix).resolve()
    if place is None or place.is_relative_to(_LOSSGATE):
        return None
    is_installed = installed != here and place.is_relative_to(installed) and installed.is_relative_to(here)
    return place if is_installed or not place.is_relative_to(here) else None


def _place(location: str) -> Path | None:
    """Returns the file of a location, or that of its package; None if there is no code to run."""
    if location.endswith(".py"):
        return Path(location).resolve()
    try:
        # Looking for a submodule would import its package, so only the package is looked for.
        spec = importlib.util.find_spec(location.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return Path(spec.origin).resolve()
    folders = spec.submodule_search_locations or ()  # of a package without __init__.py
    return next((Path(folder).resolve() for folder in folders), None)
