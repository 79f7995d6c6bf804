# SPDX-License-Identifier: Apache-2.0
"""Reads the policy of a gate from ``gate.toml``: which evidence does a release need?

``policy.schema.json`` describes the file for editors.
"""

import math
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

import lossgate.gate.policy_values as values
from lossgate.base.errors import UsageError
from lossgate.evidence.records import CellKey
from lossgate.gate.policy_text import PolicyText, shown
from lossgate.gate.rules import EvidenceRules, KnownFailureRule, Policy, Rule

MOST_DEMANDS = 1_000_000
"""The most combinations of patterns in one rule: ten times the cells of a large release. Without a
limit, a slip could keep a gate busy for hours."""


def load_policy(file: Path) -> Policy:
    """Reads a policy.

    Raises:
        UsageError: for the first fault. The message names file, line, key and value.
    """
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"can't read the policy {file}: {why}; lossgate gate EVIDENCE --init writes a first one"
        ) from None
    text = PolicyText(file, content)
    top = text.read_table((), text.values, _TOP, ("schema",))
    policy = Policy(
        file=file,
        sha256=sha256(content).hexdigest(),
        evidence=EvidenceRules(**text.read_table(("evidence",), top.get("evidence", {}), _EVIDENCE, ())),
        require=tuple(_rules(text)),
        known_failures=tuple(_known_failures(text)),
    )
    if not policy.require:
        raise text.error(
            ("require",),
            "[[require]] is missing, and a gate that needs nothing would pass anything; "
            "add one, or write a first policy with lossgate gate EVIDENCE --init",
        )
    return policy


_TOP: dict[str, values.Read] = {
    "schema": values.schema,
    "evidence": lambda value: value,
    "require": lambda value: value,
    "known_failure": lambda value: value,
}
_EVIDENCE: dict[str, values.Read] = {
    "max_age": values.age,
    "same_commit": values.flag,
    "unmodified": values.flag,
    "same_versions": values.names,
}
_RULE: dict[str, values.Read] = {
    "candidates": values.patterns('["nll_*"]'),
    "properties": values.patterns('["agreement"], or ["*"] for all'),
    "layouts": values.layout_patterns,
    "dtypes": values.patterns('["float32", "bfloat16"], or ["*"] for all'),
    "worlds": values.patterns('["simulated"]'),
    "devices": values.patterns('["cpu"]'),
    "min_problems": values.count,
    "max_mde": values.effect,
    "keeps": values.property_names,
}
_KNOWN_FAILURE: dict[str, values.Read] = {
    "candidate": values.name("a candidate"),
    "property": values.name("a property"),
    "layout": values.layout,
    "dtype": values.name("a dtype"),
    "world": values.name("a world"),
    "device": values.name("a device"),
    "name": values.text("the heading under which a document describes the failure"),
    "example": values.text("the path of a failure file that lossgate verify wrote, relative to the policy"),
    "issue": values.url,
    "owner": values.text("who mends it"),
    "expires": values.day,
}
_NOT_IN_FILE = ("line", "example_digest", "symptoms")


def _needed(model: type[Any]) -> list[str]:
    """Returns the keys of a table that have no default."""
    return [f.name for f in fields(model) if f.default is NO_DEFAULT and f.name not in _NOT_IN_FILE]


def _rules(text: PolicyText) -> Iterator[Rule]:
    for path, element in text.elements("require"):
        read = text.read_table(path, element, _RULE, _needed(Rule))
        lines = tuple(text.line((*path, "keeps", i)) for i in range(len(read.get("keeps", ()))))
        rule = Rule(line=text.line(path), lines_of_keeps=lines, **read)
        combinations = math.prod(map(len, (rule.candidates, *rule.others)))
        if combinations > MOST_DEMANDS:
            raise text.error(
                path, f"[[require]] asks for {combinations} combinations; expected at most {MOST_DEMANDS}: split it"
            )
        yield rule


def _known_failures(text: PolicyText) -> Iterator[KnownFailureRule]:
    seen: dict[CellKey, int] = {}
    for path, element in text.elements("known_failure"):
        read = text.read_table(path, element, _KNOWN_FAILURE, _needed(KnownFailureRule))
        example, digest, symptoms = _example(text, (*path, "example"), read.pop("example"))
        rule = KnownFailureRule(line=text.line(path), example=example, example_digest=digest, symptoms=symptoms, **read)
        if rule.key in seen:
            raise text.error(
                path, f"known_failure of {rule.key}: line {seen[rule.key]} has one of the same cell; leave one of them"
            )
        seen[rule.key] = rule.line
        yield rule


class _FrozenCase(msgspec.Struct):
    symptoms: tuple[str, ...]


class _Example(msgspec.Struct):
    """What tells a failure file from other files. The engine reads the rest, and needs torch."""

    examples: list[_FrozenCase]
    symptoms: tuple[str, ...] = ()


def _example(text: PolicyText, path: tuple[str | int, ...], name: str) -> tuple[Path, str, tuple[str, ...]]:
    """Returns the path of a failure file, its digest, and what disagrees in it."""
    file = text.file.parent / name

    def fault(why: str) -> UsageError:
        return text.error(
            path, f"known_failure.example = {shown(name)}: {why}; expected a failure file that lossgate verify wrote"
        )

    try:
        if not file.is_file():
            raise fault(f"there is no file {str(file)!r}")
        content = file.read_bytes()
        example = msgspec.json.decode(content, type=_Example)
    except OSError as error:
        raise fault(f"can't read it: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise fault(f"it is no failure file: {error}") from None
    if not example.examples:
        raise fault("it holds no example")
    symptoms = tuple(dict.fromkeys([*example.examples[0].symptoms, *example.symptoms]))
    return file, sha256(content).hexdigest(), symptoms
