# SPDX-License-Identifier: Apache-2.0
"""Which code a failure file may have run: that of the working folder, unless the user says so."""

import importlib.util
import sys
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.engine.failure_files import FailureFile

_LOSSGATE = Path(__file__).resolve().parents[1]


def check_trusted(failure: FailureFile, file: Path) -> None:
    """Refuses a failure file that names code outside the working folder. Nothing is imported.

    Args:
        failure: what the file holds.
        file: for the message.

    Raises:
        UsageError: if the candidate lies elsewhere, or is an installed module.
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
    """Returns where the code of a candidate is, if that is outside the working folder.

    Packages that are installed in the working folder lie outside, too: nobody wrote them there.
    Those of lossgate itself do not, because that is the code which runs here.
    """
    place, here, installed = (
        _place(source.rpartition(":")[0] or source),
        Path.cwd().resolve(),
        Path(sys.prefix).resolve(),
    )
    if place is None or place.is_relative_to(_LOSSGATE):
        return None
    is_installed = installed != here and place.is_relative_to(installed) and installed.is_relative_to(here)
    return place if is_installed or not place.is_relative_to(here) else None


def _place(location: str) -> Path | None:
    """Returns the file of a location, or that of its package; None if there is none to run."""
    if location.endswith(".py"):
        return Path(location).resolve()
    try:
        spec = importlib.util.find_spec(location.partition(".")[0])  # that of a submodule would import its package
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return Path(spec.origin).resolve()
    return next((Path(folder).resolve() for folder in spec.submodule_search_locations or ()), None)
