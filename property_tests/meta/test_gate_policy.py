# SPDX-License-Identifier: Apache-2.0
"""Tests of the policy of a gate: what is read from a file, and what is said of mistakes in it."""

import json
import subprocess
import sys
from datetime import date, timedelta
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import CellKey
from lossgate.gate.policy import FrozenExample, Policy, load_policy
from lossgate.gate.rules import EvidenceRules, KnownFailureRule, Rule
from lossgate.judge.pooling import LARGEST_MDE
from property_tests.meta.mutations import mutated, with_other_bytes

EXAMPLE = json.dumps({"candidate": "kernels.py:nll_hidden", "examples": [{"problem": {}, "symptoms": ["loss"]}]})
FILE = Path("ci/gate.toml")
FULL = """\
# A policy that uses every key.
schema = 1

[evidence]
max_age = "36 hours"
same_commit = false
unmodified = true
same_versions = ["lossgate", "python"]

[[require]]
candidates = [
    "nll_*",  # all of them
    "grpo",
]
properties = ["agreement"]
layouts = ["single", "cp=2,tp=2", "tp=*"]
dtypes = ["float32", "bfloat1?"]
worlds = ["gloo"]
devices = ["cuda"]
min_problems = 12
max_mde = "0.5%"

[[require]]
candidates = ["*"]

[[known_failure]]
candidate = "nll_hidden"
property = "metamorphic"
layout = "tp=2"
dtype = "bfloat16"
world = "gloo"
device = "cuda"
name = "Rounds twice"
example = "failures/a.json"
issue = "https://example.com/issues/12"
owner = "kernels team"
expires = 2027-01-31
"""
LEAST = 'schema = 1\n[[require]]\ncandidates = ["*"]\n'
KNOWN = FULL[FULL.index("[[known_failure]]") :]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a failure file in it."""
    (tmp_path / "ci/failures").mkdir(parents=True)
    (tmp_path / "ci/failures/a.json").write_text(EXAMPLE)
    (tmp_path / "ci/failures/text.json").write_text("no failure")
    (tmp_path / "ci/failures/none.json").write_text('{"examples": []}')
    (tmp_path / "ci/failures/deep.json").write_text('{"examples": ' + "[" * 100_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(content: str | bytes) -> Policy:
    FILE.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_policy(FILE)


def fault(content: str | bytes) -> str:
    with pytest.raises(UsageError) as raised:
        load(content)
    return str(raised.value)


def test_a_policy_says_all_that_its_file_says() -> None:
    rule = Rule(
        candidates=("nll_*", "grpo"),
        properties=("agreement",),
        layouts=("single", "cp=2,tp=2", "tp=*"),
        dtypes=("float32", "bfloat1?"),
        worlds=("gloo",),
        devices=("cuda",),
        min_problems=12,
        max_mde="0.5%",
    )
    known = KnownFailureRule(
        candidate="nll_hidden",
        property="metamorphic",
        layout="tp=2",
        dtype="bfloat16",
        world="gloo",
        device="cuda",
        name="Rounds twice",
        example="failures/a.json",
        issue="https://example.com/issues/12",
        owner="kernels team",
        expires=date(2027, 1, 31),
    )
    assert load(FULL) == Policy(
        file=FILE,
        sha256=sha256(FULL.encode()).hexdigest(),
        evidence=EvidenceRules(
            max_age="36 hours", same_commit=False, unmodified=True, same_versions=("lossgate", "python")
        ),
        require=(rule, Rule(candidates=("*",))),
        known_failures=(known,),
        examples={known.key: FrozenExample(sha256(EXAMPLE.encode()).hexdigest(), ("loss",))},
        lines={rule: 10, Rule(candidates=("*",)): 23, known: 26},
    )


def test_what_a_policy_does_not_say_has_defaults() -> None:
    policy = load(LEAST)
    assert policy.evidence == EvidenceRules(
        max_age=None, same_commit=True, unmodified=False, same_versions=("lossgate", "torch")
    )
    assert policy.evidence.oldest is None
    (rule,) = policy.require
    assert (rule.properties, rule.layouts, rule.dtypes) == (("*",), ("*",), ("*",))
    assert (rule.worlds, rule.devices) == (("simulated",), ("cpu",))
    assert (rule.min_problems, rule.max_mde) == (1, LARGEST_MDE)


def test_a_known_failure_has_the_key_of_a_cell() -> None:
    usual = "".join(line for line in KNOWN.splitlines(True) if not line.startswith(("property", "world", "device")))
    (rule,) = load(LEAST + usual).known_failures
    assert rule.key == CellKey("nll_hidden", "agreement", "tp=2", "bfloat16", "simulated", "cpu")


def test_a_rule_names_its_place() -> None:
    policy = load(FULL)
    assert policy.where(policy.require[1]) == "ci/gate.toml:23"
    assert policy.where(policy.known_failures[0]) == "ci/gate.toml:26"


def test_a_rule_whose_line_is_not_known_names_the_file() -> None:
    policy = load('schema = 1\nrequire = [{candidates = ["*"]}]')
    assert policy.where(policy.require[0]) == "ci/gate.toml"
    policy = load(f'{LEAST}keeps = ["""\n[[require]]\n"""]')
    assert policy.where(policy.require[0]) == "ci/gate.toml"


@pytest.mark.parametrize(
    "content",
    [
        LEAST.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + LEAST.encode(),
        b'schema = 1\nrequire = [{candidates = ["*"]}]',
        b"[[require]]\ncandidates = ['*']\n[evidence]\n".replace(b"[[", b"schema = 1\n[[", 1),
    ],
)
def test_other_spellings_of_a_policy_are_read(content: bytes) -> None:
    assert load(content).require[0].candidates == ("*",)


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("3 days", timedelta(days=3)),
        ("1 day", timedelta(days=1)),
        ("36 hours", timedelta(hours=36)),
        ("90 minutes", timedelta(minutes=90)),
        ("2weeks", timedelta(weeks=2)),
        ("1.5 days", timedelta(hours=36)),
    ],
)
def test_an_age_is_a_number_and_a_unit(text: str, age: timedelta) -> None:
    assert load(f'{LEAST}[evidence]\nmax_age = "{text}"').evidence.oldest == age


@pytest.mark.parametrize(
    ("value", "effect"), [("0.02", 0.02), ("1e-3", 0.001), ('"1%"', 0.01), ('"0.1 %"', 0.001), ('"1%\\n"', 0.01)]
)
def test_an_effect_is_a_number_or_a_percentage(value: str, effect: float) -> None:
    assert load(f"{LEAST}max_mde = {value}").require[0].largest_mde == effect


def test_a_rule_names_the_properties_that_cells_keep() -> None:
    assert load(LEAST).require[0].keeps == ()
    assert load(f"{LEAST}keeps = ['no-grad', 'microbatches']").require[0].keeps == ("no-grad", "microbatches")
    assert fault(f"{LEAST}keeps = 'no-grad'").endswith(
        "[[require]] number 1: keeps='no-grad': expected a list of names, such as ['frozen-inputs', 'no-grad']"
    )


EFFECT = "expected more than 0 and less than 1, as a number or a percentage, such as 0.01 or '1%'"
COUNT = "expected a whole number from 1 to 1000000, without quotes"
AGE = "expected a number over 0 and a unit, such as '3 days' or '36 hours' or '90 minutes' or '2 weeks'"
FLAG = "expected true or false, without quotes"
CANDIDATES = "expected a list of at least one shell pattern, such as ['nll_*']"
EXACT = "expected an exact name, without wildcards"
LAYOUT = "expected 'single' or sizes of dp, cp, tp such as 'tp=2,cp=2'"
DATE = "expected a date without a time, such as '2027-01-31'"


@pytest.mark.parametrize(
    ("before", "after", "table", "message"),
    [
        ('"0.5%"', '"1 percent"', "require", f"max_mde='1 percent': {EFFECT}"),
        ('"0.5%"', "1", "require", f"max_mde=1: {EFFECT}"),
        ('"0.5%"', "1.0", "require", f"max_mde=1.0: {EFFECT}"),
        ('"0.5%"', "nan", "require", f"max_mde=nan: {EFFECT}"),
        ('"0.5%"', "0.0", "require", f"max_mde=0.0: {EFFECT}"),
        ("= 12", "= 0", "require", f"min_problems=0: {COUNT}"),
        ("= 12", "= true", "require", f"min_problems=True: {COUNT}"),
        ("= 12", f"= 0x{'f' * 9000}", "require", f"min_problems=a number of thousands of digits: {COUNT}"),
        ('"36 hours"', '"3 dayz"', "evidence", f"max_age='3 dayz': {AGE}"),
        ('"36 hours"', '"0 days"', "evidence", f"max_age='0 days': {AGE}"),
        ('"36 hours"', "07:00:00", "evidence", f"max_age=datetime.time(7, 0): {AGE}"),
        ("= false", '= "no"', "evidence", f"same_commit='no': {FLAG}"),
        (
            '"python"',
            '"lossgate"',
            "evidence",
            "same_versions=['lossgate', 'lossgate']: 'lossgate' is listed twice; remove one of the two",
        ),
        (
            '"grpo"',
            '"nll_*"',
            "require",
            "candidates=['nll_*', 'nll_*']: 'nll_*' is listed twice; remove one of the two",
        ),
        ('"grpo"', '""', "require", f"candidates=['nll_*', '']: {CANDIDATES}"),
        ('"grpo"', "3", "require", f"candidates=['nll_*', 3]: {CANDIDATES}"),
        ('["agreement"]', '"agreement"', "require", "properties='agreement': expected a list of at least one shell"),
        ('["agreement"]', "[]", "require", "properties=[]: expected a list of at least one shell pattern"),
        ("tp=*", "tp2", "require", f"layouts=['single', 'cp=2,tp=2', 'tp2']: layout 'tp2': can't read 'tp2'; {LAYOUT}"),
        (
            "cp=2,tp=2",
            "tp=2,cp=2",
            "require",
            "layouts=['single', 'tp=2,cp=2', 'tp=*']: expected 'cp=2,tp=2', which is how evidence spells this layout",
        ),
        (
            "cp=2,tp=2",
            "tp=²",
            "require",
            f"layouts=['single', 'tp=²', 'tp=*']: layout 'tp=²': can't read 'tp=²'; {LAYOUT}",
        ),
        ("cp=2,tp=2", f"tp={'9' * 5000}", "require", "layouts=['single', 'tp=9999"),
        (
            'layout = "tp=2"',
            'layout = "dp=1"',
            "known_failure",
            "layout='dp=1': expected 'single', which is how",
        ),
        (
            'layout = "tp=2"',
            'layout = "tp=*"',
            "known_failure",
            "layout='tp=*': expected the exact name of a layout, without wildcards",
        ),
        ('"nll_hidden"', '"nll_*"', "known_failure", f"candidate='nll_*': {EXACT}"),
        ('"Rounds twice"', '" "', "known_failure", "name=' ': expected a text in quotes"),
        ("a.json", "b.json", "known_failure", "example='failures/b.json': there is no file 'ci/failures/b.json'; expe"),
        ("failures/a.json", "failures", "known_failure", "example='failures': there is no file"),
        ("a.json", "text.json", "known_failure", "example='failures/text.json': it is no failure file: "),
        ("a.json", "deep.json", "known_failure", "example='failures/deep.json': it is no failure file: "),
        ("a.json", "none.json", "known_failure", "example='failures/none.json': it holds no example; expected a fail"),
        ("a.json", "\\u0000", "known_failure", "example='failures/\\x00': there is no file"),
        (
            "https:",
            "issue ",
            "known_failure",
            "issue='issue //example.com/issues/12': expected the address of an issue, such as 'https://example.com/iss",
        ),
        ("2027-01-31", '"tomorrow"', "known_failure", f"expires='tomorrow': {DATE}"),
        ("2027-01-31", "2027-01-31T00:00:00Z", "known_failure", "expires=datetime.datetime(2027, 1, 31,"),
        ("schema = 1", "schema = 2", "", "schema=2: expected 1, the schema that this version of lossgate reads"),
        ("schema = 1", "schema = true", "", "schema=True: expected 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_reported_with_its_key_and_what_was_expected(
    before: str, after: str, table: str, message: str
) -> None:
    assert before in FULL
    header = {"": "", "evidence": "[evidence] "}.get(table, f"[[{table}]] number 1: ")
    assert fault(FULL.replace(before, after, 1)).startswith(f"ci/gate.toml: {header}{message}")


def test_the_table_of_several_is_numbered() -> None:
    assert fault(FULL.replace('["*"]', "[]")).startswith("ci/gate.toml: [[require]] number 2: candidates=[]: expected")


def test_a_date_may_stand_in_quotes() -> None:
    (rule,) = load(FULL.replace("2027-01-31", '"2027-01-31"')).known_failures
    assert rule.expires == date(2027, 1, 31)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LEAST + "max_mdes = 1", "[[require]] number 1: unknown key 'max_mdes'; did you mean 'max_mde'? (expected"),
        ("schema = 1\n\n[[requires]]", "unknown key 'requires'; did you mean 'require'?"),
        (LEAST + '"a\\nb" = 1', "[[require]] number 1: unknown key 'a\\nb'; expected one of candidates,"),
        ("schema = 1\n[evidence]\nmax_ages = 1", "[evidence] unknown key 'max_ages'; did you mean 'max_age'?"),
        ("[[require]]\ncandidates = ['*']", "schema is missing; expected 1, the schema"),
        ("", "schema is missing"),
        ("schema = 1", "require is missing; expected at least one table [[require]], because a gate that needs nothin"),
        ("schema = 1\nrequire = []", "require=[]: expected at least one table [[require]], because"),
        ("schema = 1\n[[require]]\nlayouts = ['*']", f"[[require]] number 1: candidates is missing; {CANDIDATES}"),
        ("schema = 1\n[require]\ncandidates = ['*']", "require={'candidates': ['*']}: expected at least one table"),
        ("schema = 1\nrequire = [1]", "[[require]] number 1: 1: expected a table"),
        ("schema = 1\n[[evidence]]", "evidence=[{}]: expected a table"),
        (LEAST + "[known_failure]", "known_failure={}: expected tables that each begin with [[known_failure]]"),
        (
            LEAST + KNOWN.replace("issue", "# issue"),
            "[[known_failure]] number 1: issue is missing; expected the address of an issue, such as 'https://exam",
        ),
        (
            LEAST + KNOWN + KNOWN,
            "[[known_failure]] number 2: an earlier one has the same cell, nll_hidden[metamorphic-tp=2-bfloat16] on",
        ),
        (
            LEAST + f"properties = {list(map(str, range(1001)))}\ndtypes = {list(map(str, range(1000)))}",
            "[[require]] number 1: it asks for 1001000 combinations; expected at most 1000000: split it up",
        ),
        ("schema = 1\nschema = 1", "Cannot overwrite a value (at end of document)"),
        ("schema = 1\n\n[evidence", "Expected ']' at the end of a table declaration (at end of document)"),
        ("schema = 1\n[evidence\n", "Expected ']' at the end of a table declaration (at line 2, column 10)"),
        (f"schema = {'9' * 5000}", "Exceeds the limit"),
        (b"schema = 1\n# caf\xe9\n", "byte 16 is no UTF-8; save the file in UTF-8"),
        ("schema = 1".encode("utf-16"), "byte 0 is no UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_structure_is_reported_with_the_way_out(content: str | bytes, message: str) -> None:
    assert fault(content).startswith(f"ci/gate.toml: {message}")


@pytest.mark.parametrize("content", ["a = " + "[" * 100_000, "a = " + "{a = " * 100_000], ids=["arrays", "tables"])
def test_deep_nesting_is_no_crash(content: str) -> None:
    assert fault(content) == "ci/gate.toml: its values are nested too deeply"


@pytest.mark.parametrize("table", ["schema", "require", "evidence", "x"])
def test_a_key_of_many_parts_is_no_crash(table: str) -> None:
    assert outcome(f"{table}{'.a' * 3000} = 1".encode()).startswith("ci/gate.toml: ")


@pytest.mark.parametrize("file", ["nowhere.toml", "ci", "\0"])
def test_a_file_that_cannot_be_read_is_reported(file: str) -> None:
    with pytest.raises(
        UsageError, match=r"^can't read the policy .*; lossgate gate EVIDENCE --init writes a first one$"
    ):
        load_policy(Path(file))


def outcome(content: bytes) -> str:
    """Returns the error of a policy; "" if it is read."""
    try:
        load(content)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("part", range(5))
def test_a_mutated_policy_is_read_or_refused_on_one_line(part: int) -> None:
    refused = 0
    for seed in range(100 * part, 100 * (part + 1)):
        random = Random(seed)
        text = mutated(FULL, random) if seed % 2 else FULL
        content = with_other_bytes(text.encode(), random) if seed % 3 else text.encode()
        error = outcome(content)
        assert error == "" or (error.startswith("ci/gate.toml: ") and error.isprintable()), content
        refused += bool(error)
    assert refused > 50


def test_reading_a_policy_needs_no_torch() -> None:
    code = "import sys, lossgate.gate.policy, lossgate.gate.init_policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
