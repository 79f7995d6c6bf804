# SPDX-License-Identifier: Apache-2.0
"""Says why a cell was not held to a property that a policy asks for, and how to mend that."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import CellKey
from lossgate.evidence.summary import CellSummary
from lossgate.gate.property_names import BUILT_IN

_AGREEMENT = "agreement"
"""The property in whose cells all others are checked."""


@dataclass(frozen=True)
class NotHeld:
    """Knows what evidence tells of the properties of cells.

    The settings of a cell's run say to which properties it was to be held. Whether one applies to a
    candidate is seen in the candidate's other cells.
    """

    evidence: Gathered

    def why(self, cell: CellSummary, name: str) -> str:
        """Returns why a cell that agrees was not held to a property, and what to do."""
        if reason := dict(cell.exempt).get(name):
            return f"the candidate is exempt, because {reason}. Take that back, or the property out of the policy"
        if name in cell.properties:
            return f"none of its {cell.problems} problems says anything about it; raise --examples"
        if cell.key.property != _AGREEMENT:
            flags = " ".join(f"--property {one}" for one in dict.fromkeys((_AGREEMENT, name)))
            return (
                f"it is a cell of {cell.key.property} alone, and only cells of {_AGREEMENT} are held to others. Verify "
                f'with {flags}, and write properties = ["{_AGREEMENT}"] in the rule'
            )
        return self._by_settings(cell, name, self._settings(cell))

    def _by_settings(self, cell: CellSummary, name: str, settings: Mapping[str, Any]) -> str:
        if "properties" not in settings or "property_ranks" not in settings:
            return "the evidence does not say why. Verify again with this version of lossgate"
        if settings["properties"] and name not in settings["properties"]:
            named = ", ".join(map(str, settings["properties"]))
            return (
                f"its run names the properties {named} alone. Verify with --property {name} beside these, or name none "
                "(--property, or properties in pyproject.toml)"
            )
        asked = self._asked[cell.key.candidate]
        applies = any(name in properties for properties in asked)
        if _is_large(cell.key, settings) and (applies or not asked):
            most = settings["property_ranks"]
            if settings.get("matrix") == "covering":
                return (
                    "its run checks it on few layouts. Verify with --matrix full, or leave such layouts and dtypes out "
                    "of the rule"
                )
            return (
                f"its run checks it on at most {most} ranks on an axis. Raise property_ranks = {most} in "
                "pyproject.toml, or leave such layouts out of the rule"
            )
        if applies:
            return "the evidence does not say why: other cells of the candidate were. Verify all of them again"
        unknown = "" if name in BUILT_IN else ", or the run did not load the file that registers it"
        return (
            f"it does not apply to this candidate{unknown}. Leave it out of keeps, or give the candidate its own rule"
        )

    def _settings(self, cell: CellSummary) -> Mapping[str, Any]:
        run = self.evidence.runs.get(cell.run)
        return {} if run is None else run.settings

    @cached_property
    def _asked(self) -> Mapping[str, list[tuple[str, ...]]]:
        """By candidate, the properties of each cell that agrees and is held to all that apply."""
        found: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
        for key, cell in self.evidence.newest.items():
            settings = self._settings(cell)
            everything = "property_ranks" in settings and not settings.get("properties")
            if everything and cell.verdict == "AGREE" and not _is_large(key, settings):
                found[key.candidate].append(cell.properties)
        return found


def _is_large(key: CellKey, settings: Mapping[str, Any]) -> bool:
    """Returns whether most properties are left out on a cell's layout."""
    if settings.get("layouts") or settings.get("properties"):
        return False
    try:
        layout = Layout.parse(key.layout)
        return layout.ranks > 1 if settings.get("matrix") == "covering" else _most(layout) > settings["property_ranks"]
    except (UsageError, ValueError, TypeError):  # evidence may hold anything
        return False


def _most(layout: Layout) -> int:
    """Returns the ranks on the axis that has most."""
    return max(layout.sizes.values())
