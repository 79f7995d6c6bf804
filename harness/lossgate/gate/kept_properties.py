# SPDX-License-Identifier: Apache-2.0
"""Checks the names in ``keeps`` of a policy, and says why a cell was not held to a property."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.base.spelling import nearest
from lossgate.engine.cell_record import CellKey
from lossgate.evidence.gather import Gathered
from lossgate.evidence.summary import CellSummary
from lossgate.gate.policy import Policy
from lossgate.gate.rules import Rule

BUILT_IN = (
    "agreement",
    "bad-inputs",
    "same-call-twice",
    "after-another-shape",
    "gradients-add-up",
    "second-backward",
    "checkpointing",
    "device",
    "sequence-order",
    "vocabulary-order",
    "temperature",
    "extreme-logits",
    "suppressed-ids",
    "hopeless-labels",
    "frozen-inputs",
    "no-grad",
    "inputs-kept",
    "strided-inputs",
    "int32-ids",
    "masked-values",
    "masked-nan",
    "masked-ids",
    "autocast",
    "microbatches",
    "other-padding",
    "reduction-order",
    "idle-rank",
    "budgets",
    "no-leaks",
    "nothing-trained",
    "few-tokens",
    "upstream-scaled",
    "upstream-one",
    "upstream-zero",
)
"""The properties of lossgate. Their registry needs torch, but a gate must run without it."""
_AGREEMENT = "agreement"
"""All other properties are checked in cells of this one."""


def check_property_names(policy: Policy, evidence: Gathered) -> None:
    """Checks the names of properties that rules have in ``keeps``.

    Users register their own properties, but a gate does not load their files. It knows them from
    evidence. A cell that disagrees names no further property, because none was checked on it. So a
    rule is checked only if one of its cells agrees.

    Raises:
        UsageError: for the first name that is neither built in nor in the evidence.
    """
    known = dict.fromkeys([*BUILT_IN, *_named_by(evidence)])
    for rule in policy.require:
        for name in rule.keeps:
            if name not in known and _agrees_somewhere(rule, evidence):
                raise UsageError(
                    f"{policy.where(rule)}: [[require]] keeps={name!r}: neither lossgate nor the evidence has "
                    f"such a property; {nearest(name, known)}"
                )


def _named_by(evidence: Gathered) -> Iterator[str]:
    for run in evidence.runs.values():
        named = run.settings.get("properties")
        if isinstance(named, list | tuple):
            yield from (str(name) for name in named)
    for key, results in evidence.cells.items():
        yield key.property
        for cell in results:
            yield from cell.held_to


def _agrees_somewhere(rule: Rule, evidence: Gathered) -> bool:
    """Returns whether a cell that a rule asks for agrees."""
    return any(cell.verdict == "AGREE" and rule.matches(key) for key, cell in evidence.newest.items())


@dataclass(frozen=True)
class NotHeld:
    """Says why cells that agree were not held to a property.

    The settings of a run name the properties to which its cells were to be held. The other cells of
    a candidate show whether a property applies to it.
    """

    evidence: Gathered

    def why(self, cell: CellSummary, name: str) -> str:
        """Returns why a cell was not held to a property, and what to do."""
        if reason := cell.exempt.get(name):
            return f"the candidate is exempt, because {reason}. Remove the exemption, or the property from the policy"
        if name in cell.held_to:
            return f"none of its {cell.problems} problems says anything about it; raise --examples"
        if cell.key.property != _AGREEMENT:
            flags = " ".join(f"--property {one}" for one in dict.fromkeys((_AGREEMENT, name)))
            return (
                f"this cell was verified for {cell.key.property} alone; only cells of {_AGREEMENT} are held to further "
                f'properties. Verify with {flags}, and write properties = ["{_AGREEMENT}"] in the rule'
            )
        return self._by_settings(cell, name, self._settings(cell))

    def _by_settings(self, cell: CellSummary, name: str, settings: Mapping[str, Any]) -> str:
        if "properties" not in settings or "property_ranks" not in settings:
            return "the evidence does not say why. Verify again with this version of lossgate"
        if settings["properties"] and name not in settings["properties"]:
            named = ", ".join(map(str, settings["properties"]))
            return (
                f"its run checked only the properties {named}. Verify with --property {name} in addition, or name none "
                "(--property, or properties in pyproject.toml)"
            )
        asked = self._held_to[cell.key.candidate]
        applies = any(name in properties for properties in asked)
        if _is_large(cell.key, settings) and (applies or not asked):
            return _of_large(settings)
        if applies:
            return (
                "the evidence does not say why: other cells of the candidate were held to it. Verify all of them again"
            )
        unknown = "" if name in BUILT_IN else ", or the run did not load the file that registers it"
        return (
            f"it does not apply to this candidate{unknown}. Leave it out of keeps, or give the candidate its own rule"
        )

    def _settings(self, cell: CellSummary) -> Mapping[str, Any]:
        run = self.evidence.runs.get(cell.run)
        return {} if run is None else run.settings

    @cached_property
    def _held_to(self) -> Mapping[str, list[tuple[str, ...]]]:
        """For each candidate, the properties that each of its cells was held to. Only cells count
        that agree, that are not large, and whose run asked for all properties.
        """
        found: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
        for key, cell in self.evidence.newest.items():
            settings = self._settings(cell)
            asks_for_all = "property_ranks" in settings and not settings.get("properties")
            if asks_for_all and cell.verdict == "AGREE" and not _is_large(key, settings):
                found[key.candidate].append(cell.held_to)
        return found


def _is_large(key: CellKey, settings: Mapping[str, Any]) -> bool:
    """Returns whether the layout of a cell is so large that its run leaves out most properties."""
    if settings.get("layouts") or settings.get("properties"):
        return False
    try:
        layout = Layout.parse(key.layout)
        if settings.get("matrix") in ("least", "covering"):
            return layout.ranks > 1
        return max(layout.sizes.values()) > settings["property_ranks"]
    except (UsageError, ValueError, TypeError):  # evidence may hold anything
        return False


def _of_large(settings: Mapping[str, Any]) -> str:
    """Returns why a property was not checked on a large layout, and what to do."""
    if settings.get("matrix") in ("least", "covering"):
        return (
            "its run checks it on few layouts. Verify with --matrix full, or leave such layouts and dtypes out of the "
            "rule"
        )
    most = settings["property_ranks"]
    return (
        f"its run checks it on at most {most} ranks on an axis. Raise property_ranks = {most} in pyproject.toml, or "
        "leave such layouts out of the rule"
    )
