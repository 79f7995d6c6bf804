# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a policy, which editors use, says the same as what reads the policy."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from lossgate.base.errors import UsageError
from lossgate.gate.policy import SCHEMA_FILE, json_schema, load_policy

SCHEMA = json.loads(SCHEMA_FILE.read_text())
VALIDATOR = Draft202012Validator(SCHEMA, format_checker=FormatChecker(["date"]))
EVIDENCE, REQUIRE, KNOWN = (SCHEMA["$defs"][name] for name in ("EvidenceRules", "Rule", "KnownFailureRule"))

GOOD = {
    "schema": {"schema": "1"},
    "evidence": {"max_age": '"3 days"'},
    "require": {"candidates": '["nll"]'},
    "known_failure": {
        "candidate": '"nll"',
        "layout": '"tp=2"',
        "dtype": '"float32"',
        "name": '"Rounds twice"',
        "example": '"failure.json"',
        "issue": '"https://example.com/1"',
        "owner": '"me"',
        "expires": "2027-01-31",
    },
}
"""The TOML of a policy: the value of each key, by table."""


DATES = ("2027-01-31", "2027-01-31T00:00:00", "07:00:00")


def values() -> Iterator[str]:
    """Yields values in TOML."""
    yield from ("true", "1", "0", "-1", "2", "12", "1000000", "1000001", "1.5", "0.5", "0.0", "-0.5", "inf")
    yield from DATES
    texts = ["", " ", "x", "x*", "x?", "1%", "0%", "0.00%", "100%", "0.5%", "12.25 %", "1 percent", "3"]
    texts += [
        "3 days",
        "1 day",
        "0 days",
        "0.0 weeks",
        "1.5 weeks",
        "3days",
        "3   days",
        "1 month",
        "2027-01-31",
        "2027-13-31",
    ]
    texts += ["tp=2", "single", "https://a.b/c", "http://a", "https://", "ftp://a.b", "https://a b", "failure.json"]
    yield from (f'"{text}"' for text in texts)
    yield from ("[]", '["x"]', '["x", "x"]', '["x", "y"]', '[""]', "[1]", '["x", 1]', '["tp=2"]', '["tp=*"]')
    yield from ("{}", "{x = 1}", "[{}]", "[[]]", '[["x"]]')


def only_the_reader_can_tell(key: str, value: str) -> bool:
    """Returns whether a schema can't tell that a value is wrong: it knows no layouts and no files,
    and JSON has no dates.
    """
    if value in DATES:
        return True
    return {
        "layouts": value in ('["x"]', '["x", "y"]'),
        "layout": value not in ('"tp=2"', '"single"'),
        "example": value != '"failure.json"',
    }.get(key, False)


KEYS = [
    (table, key)
    for table, model in (("evidence", EVIDENCE), ("require", REQUIRE), ("known_failure", KNOWN))
    for key in model["properties"]
]


@pytest.mark.parametrize(("table", "key"), [("schema", "schema"), *KEYS])
def test_the_schema_allows_what_the_reader_allows(table: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"examples": [{"symptoms": []}]}')
    allowed, wrong = [], []
    for value in values():
        text = toml(GOOD | {table: GOOD[table] | {key: value}})
        read, valid = reads(tmp_path / "gate.toml", text), is_valid(text)
        if read:
            allowed.append(value)
        if read != valid and not (valid and only_the_reader_can_tell(key, value)):
            wrong.append((value, f"{read=}, {valid=}"))
    assert wrong == []
    assert 0 < len(allowed) < len(list(values()))


def toml(tables: Mapping[str, Mapping[str, str]]) -> str:
    lines: list[str] = []
    for name, table in tables.items():
        lines += {"schema": [], "evidence": ["[evidence]"]}.get(name, [f"[[{name}]]"])
        lines += [f"{key} = {value}" for key, value in table.items()]
    return "\n".join(lines)


def reads(file: Path, text: str) -> bool:
    file.write_text(text)
    try:
        load_policy(file)
    except UsageError:
        return False
    return True


def is_valid(text: str) -> bool:
    return VALIDATOR.is_valid(as_json(tomllib.loads(text)))


def as_json(value: Any) -> Any:
    match value:
        case date() | datetime() | time():
            return value.isoformat()
        case dict():
            return {key: as_json(item) for key, item in value.items()}
        case list():
            return [as_json(item) for item in value]
        case _:
            return value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "schema = 1",
        "schema = 1\nrequire = []",
        "schema = 1\n[require]\ncandidates = ['*']",
        "schema = 1\n[[require]]\nlayouts = ['*']",
        "schema = 1\n[[require]]\ncandidates = ['*']\nmax_mdes = 0.01",
        "schema = 1\n[[require]]\ncandidates = ['*']\n[evidences]",
        "schema = 1\n[[require]]\ncandidates = ['*']\n[evidence]\nx = 1",
        "schema = 1\n[[require]]\ncandidates = ['*']\n[[evidence]]",
        "schema = 1\n[[require]]\ncandidates = ['*']\n[known_failure]",
        *(
            toml(GOOD | {"known_failure": {k: v for k, v in GOOD["known_failure"].items() if k != left_out}})
            for left_out in GOOD["known_failure"]
        ),
    ],
)
def test_the_schema_refuses_other_structures(text: str, tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"examples": [{"symptoms": []}]}')
    assert not is_valid(text)
    assert not reads(tmp_path / "gate.toml", text)


def test_the_published_schema_is_that_of_the_rules() -> None:
    """If it is not, write ``json_schema()`` into the file."""
    assert SCHEMA_FILE.read_text() == json_schema()


def test_the_schema_is_one_and_tells_what_each_key_is() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for table in (SCHEMA["$defs"]["PolicyFile"], EVIDENCE, REQUIRE, KNOWN):
        assert table["description"]
        assert all(key["description"].endswith(".") for key in table["properties"].values())
    for key in [one for table in (EVIDENCE, REQUIRE, KNOWN) for one in table["properties"].values()]:
        for example in [*key.get("examples", ()), *([key["default"]] if "default" in key else ())]:
            assert Draft202012Validator(key).is_valid(example)
