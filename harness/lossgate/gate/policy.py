# SPDX-License-Identifier: Apache-2.0
"""Reads the policy of a gate from ``gate.toml``: which evidence does a release need?"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.engine.cell_record import CellKey
from lossgate.engine.toml_tables import parse_toml, read_table
from lossgate.gate.rules import EvidenceRules, KnownFailureRule, PolicyFile, Rule

SCHEMA_FILE = Path(__file__).with_name("policy.schema.json")
"""The published schema, for editors. A test holds it to the rules."""


class FrozenExample(NamedTuple):
    """The failure file that a known failure names."""

    digest: str
    """Its SHA-256, as ``KnownFailureRecord.example`` has it."""
    symptoms: tuple[str, ...]
    """What identifies the disagreement, such as the outputs it shows in."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a release needs."""

    file: Path
    sha256: str
    evidence: EvidenceRules
    require: tuple[Rule, ...]
    known_failures: tuple[KnownFailureRule, ...] = ()
    examples: Mapping[CellKey, FrozenExample] = field(default_factory=dict[CellKey, FrozenExample])
    """The frozen example of each known failure, by its cell."""
    lines: Mapping[Rule | KnownFailureRule, int] = field(default_factory=dict[Rule | KnownFailureRule, int])
    """The line at which each rule begins in the file. Rules whose line is unknown are missing."""

    def where(self, rule: Rule | KnownFailureRule) -> str:
        """Returns the place of a rule, as ``ci/gate.toml:12``."""
        return f"{self.file}:{self.lines[rule]}" if rule in self.lines else str(self.file)


def load_policy(file: Path) -> Policy:
    """Reads a policy.

    Raises:
        UsageError: for the first fault. The message names file, table, key and value.
    """
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"can't read the policy {file}: {why}; lossgate gate EVIDENCE --init writes a first one"
        ) from None
    tables = read_table(PolicyFile, parse_toml(content, file), f"{file}: ")
    return Policy(
        file=file,
        sha256=sha256(content).hexdigest(),
        evidence=tables.evidence,
        require=tables.require,
        known_failures=tables.known_failure,
        examples=_examples(tables.known_failure, file),
        lines={
            **_lines(content, "require", tables.require),
            **_lines(content, "known_failure", tables.known_failure),
        },
    )


def _lines(content: bytes, name: str, rules: tuple[Rule | KnownFailureRule, ...]) -> dict[Rule | KnownFailureRule, int]:
    """Returns the line of the header ``[[name]]`` of each rule.

    The library that reads TOML gives no line numbers. If there are not as many headers as rules,
    because a rule is written in another way, the lines are unknown and the result is empty.
    """
    header = re.compile(rf"\s*\[\[\s*{name}\s*\]\]".encode())
    found = [number for number, line in enumerate(content.split(b"\n"), 1) if header.match(line)]
    if len(found) != len(rules):
        return {}
    return dict(zip(rules, found, strict=True))


class _FrozenCase(msgspec.Struct):
    symptoms: tuple[str, ...]


class _FailureFile(msgspec.Struct):
    """Fields that tell a failure file from other files. The engine reads the rest, with torch."""

    examples: list[_FrozenCase]
    symptoms: tuple[str, ...] = ()


def _examples(rules: Iterable[KnownFailureRule], policy: Path) -> dict[CellKey, FrozenExample]:
    found: dict[CellKey, FrozenExample] = {}
    for number, rule in enumerate(rules, 1):
        where = f"{policy}: [[known_failure]] number {number}: "
        if rule.key in found:
            raise UsageError(f"{where}an earlier one has the same cell, {rule.key}; remove one of the two")
        found[rule.key] = _example(rule.example, policy, where)
    return found


def _example(name: str, policy: Path, where: str) -> FrozenExample:
    def fault(why: str) -> UsageError:
        return UsageError(
            f"{where}example={shown(name)}: {why}; expected a failure file that lossgate verify wrote, relative to the "
            "policy"
        )

    file = policy.parent / name
    try:
        if not file.is_file():
            raise fault(f"there is no file {str(file)!r}")
        content = file.read_bytes()
        failure = msgspec.json.decode(content, type=_FailureFile)
    except OSError as error:
        raise fault(f"can't read it: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise fault(f"it is no failure file: {error}") from None
    if not failure.examples:
        raise fault("it holds no example")
    symptoms = dict.fromkeys([*failure.examples[0].symptoms, *failure.symptoms])
    return FrozenExample(sha256(content).hexdigest(), tuple(symptoms))


def json_schema() -> str:
    """Returns the JSON Schema of a policy, as the published file has it."""
    schema = msgspec.json.schema(PolicyFile)
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Policy of lossgate gate"}
    return json.dumps(top | schema, indent=2) + "\n"
