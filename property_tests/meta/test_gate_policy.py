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
from lossgate.evidence.records import CellKey
from lossgate.gate.policy import load_policy
from lossgate.gate.rules import EvidenceRules, KnownFailureRule, Policy, Rule
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
    assert load(FULL) == Policy(
        file=FILE,
        sha256=sha256(FULL.encode()).hexdigest(),
        evidence=EvidenceRules(
            max_age=timedelta(hours=36), same_commit=False, unmodified=True, same_versions=("lossgate", "python")
        ),
        require=(
            Rule(
                line=10,
                candidates=("nll_*", "grpo"),
                properties=("agreement",),
                layouts=("single", "cp=2,tp=2", "tp=*"),
                dtypes=("float32", "bfloat1?"),
                worlds=("gloo",),
                devices=("cuda",),
                min_problems=12,
                max_mde=0.005,
            ),
            Rule(line=23, candidates=("*",)),
        ),
        known_failures=(
            KnownFailureRule(
                line=26,
                candidate="nll_hidden",
                property="metamorphic",
                layout="tp=2",
                dtype="bfloat16",
                world="gloo",
                device="cuda",
                name="Rounds twice",
                example=Path("ci/failures/a.json"),
                example_digest=sha256(EXAMPLE.encode()).hexdigest(),
                symptoms=("loss",),
                issue="https://example.com/issues/12",
                owner="kernels team",
                expires=date(2027, 1, 31),
            ),
        ),
    )


def test_what_a_policy_does_not_say_has_defaults() -> None:
    policy = load(LEAST)
    assert policy.evidence == EvidenceRules(
        max_age=None, same_commit=True, unmodified=False, same_versions=("lossgate", "torch")
    )
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
    assert load(f'{LEAST}[evidence]\nmax_age = "{text}"').evidence.max_age == age


@pytest.mark.parametrize(("value", "effect"), [("0.02", 0.02), ("1e-3", 0.001), ('"1%"', 0.01), ('"0.1 %"', 0.001)])
def test_an_effect_is_a_number_or_a_percentage(value: str, effect: float) -> None:
    assert load(f"{LEAST}max_mde = {value}").require[0].max_mde == effect


def test_a_rule_names_the_properties_that_cells_keep() -> None:
    assert load(LEAST).require[0].keeps == ()
    assert load(f"{LEAST}keeps = ['no-grad', 'microbatches']").require[0].keeps == ("no-grad", "microbatches")
    with pytest.raises(
        UsageError, match=r"4: require.keeps = \"no-grad\": expected a list of names of properties such"
    ):
        load(f"{LEAST}keeps = 'no-grad'")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"0.5%"', '"1 percent"', '21: require.max_mde = "1 percent": expected a number such as 0.01, or'),
        ('"0.5%"', "1", "21: require.max_mde = 1: expected a number such as 0.01"),
        ('"0.5%"', "1.0", "21: require.max_mde = 1.0: expected a number such as 0.01"),
        ('"0.5%"', "nan", "21: require.max_mde = nan: expected a number"),
        ('"0.5%"', "0.0", "21: require.max_mde = 0.0: expected a number"),
        ("= 12", "= 0", "20: require.min_problems = 0: expected a whole number from 1 to 1000000"),
        ("= 12", "= true", "20: require.min_problems = true: expected a whole number"),
        ("= 12", f"= 0x{'f' * 9000}", f"20: require.min_problems = 0x{'f' * 55}...: expected a whole number"),
        ('"36 hours"', '"3 dayz"', '5: evidence.max_age = "3 dayz": expected a number over 0 and a unit, such'),
        ('"36 hours"', '"0 days"', '5: evidence.max_age = "0 days": expected a number over 0'),
        ('"36 hours"', "07:00:00", "5: evidence.max_age = 07:00:00: expected a number over 0"),
        ("= false", '= "no"', '6: evidence.same_commit = "no": expected true or false, without quotes'),
        ('"python"', '"lossgate"', '8: "lossgate" in evidence.same_versions: expected each one once'),
        ('"grpo"', '"nll_*"', '13: "nll_*" in require.candidates: expected each one once; leave this one out'),
        ('"grpo"', '""', '13: "" in require.candidates: expected a list of shell patterns such as ["nll_*"]; each'),
        ('"grpo"', "3", "13: 3 in require.candidates: expected a list of shell patterns"),
        ('["agreement"]', '"agreement"', '15: require.properties = "agreement": expected a list of shell patterns'),
        ('["agreement"]', "[]", "15: require.properties = []: expected at least one shell pattern"),
        ("tp=*", "tp2", '16: "tp2" in require.layouts: expected a layout such as "single" or "cp=2,tp=2"'),
        ("cp=2,tp=2", "tp=2,cp=2", '16: "tp=2,cp=2" in require.layouts: expected "cp=2,tp=2", which is how evidence'),
        ("cp=2,tp=2", "tp=²", '16: "tp=²" in require.layouts: expected a layout'),
        ("cp=2,tp=2", f"tp={'9' * 5000}", '16: "tp=9999'),
        ('layout = "tp=2"', 'layout = "dp=1"', '29: known_failure.layout = "dp=1": expected "single", which is'),
        (
            'layout = "tp=2"',
            'layout = "tp=*"',
            '29: known_failure.layout = "tp=*": expected the exact name of a layout',
        ),
        ('"nll_hidden"', '"nll_*"', '27: known_failure.candidate = "nll_*": expected the exact name of a'),
        ('"Rounds twice"', '" "', '33: known_failure.name = " ": expected the heading under which a document'),
        ("a.json", "b.json", '34: known_failure.example = "failures/b.json": there is no file'),
        ("failures/a.json", "failures", '34: known_failure.example = "failures": there is no file'),
        ("a.json", "text.json", '34: known_failure.example = "failures/text.json": it is no failure file'),
        ("a.json", "deep.json", '34: known_failure.example = "failures/deep.json": it is no failure file'),
        ("a.json", "none.json", '34: known_failure.example = "failures/none.json": it holds no example'),
        ("a.json", "\\u0000", '34: known_failure.example = "failures/\\u0000": there is no file'),
        ("https:", "issue ", '35: known_failure.issue = "issue //example.com/issues/12": expected the address'),
        ("2027-01-31", '"2027-01-31"', '37: known_failure.expires = "2027-01-31": expected a date such as 2027-01-31'),
        ("2027-01-31", "2027-01-31T00:00:00Z", "37: known_failure.expires = 2027-01-31T00:00:00+00:00: expected"),
        ("schema = 1", "schema = 2", "2: schema = 2: expected 1, the schema that this version of lossgate reads"),
        ("schema = 1", "schema = true", "2: schema = true: expected 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_reported_with_line_and_way_out(before: str, after: str, message: str) -> None:
    assert before in FULL
    assert fault(FULL.replace(before, after, 1)).startswith(f"ci/gate.toml:{message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LEAST + "max_mdes = 1", "4: require.max_mdes: unknown key; did you mean 'max_mde'? (expected"),
        ("schema = 1\n\n[[requires]]", "3: requires: unknown key; did you mean 'require'?"),
        (LEAST + '"a\\nb" = 1', '4: require."a\\nb": unknown key'),
        ("schema = 1\n[evidence]\nmax_ages = 1", "3: evidence.max_ages: unknown key; did you mean 'max_age'?"),
        ("[[require]]\ncandidates = ['*']", "1: schema is missing; write schema = ... at the top: expected 1"),
        ("", "1: schema is missing"),
        ("schema = 1", "1: [[require]] is missing, and a gate that needs nothing would pass anything"),
        ("schema = 1\nrequire = []", "2: [[require]] is missing"),
        ("schema = 1\n[[require]]\nlayouts = ['*']", "2: require.candidates is missing; write candidates = ... below"),
        ("schema = 1\n[require]\ncandidates = ['*']", '2: require = {candidates = ["*"]}: expected tables'),
        ("schema = 1\nrequire = [1]", "2: require = 1: expected a table that begins with [[require]]"),
        ("schema = 1\n[[evidence]]", "2: evidence = [{}]: expected a table that begins with [evidence]"),
        (LEAST + "[known_failure]", "4: known_failure = {}: expected tables that each begin with [[known_failure]]"),
        (
            LEAST + KNOWN.replace("issue", "# issue"),
            "4: known_failure.issue is missing; write issue = ... below this line: expe",
        ),
        (LEAST + KNOWN + KNOWN, "16: known_failure of nll_hidden[metamorphic-tp=2-bfloat16] on gloo/cuda: line 4"),
        (
            LEAST + f"properties = {list(map(str, range(1001)))}\ndtypes = {list(map(str, range(1000)))}",
            "2: [[require]] asks for 1001000 combinations; expected at most 1000000: split it",
        ),
        ("schema = 1\nschema = 1", "2: this is no TOML: Cannot overwrite a value at the end"),
        ("schema = 1\n\n[evidence", "3: this is no TOML: Expected ']' at the end of a table declaration at the end"),
        ("schema = 1\n[evidence\n", "2: this is no TOML: "),
        ("schema = [\n1,\n", "2: this is no TOML: "),
        (f"schema = {'9' * 5000}", "1: this is no TOML: Exceeds the limit"),
        (b"schema = 1\n# caf\xe9\n", "2: byte 16 is no UTF-8; save the file as UTF-8"),
        ("schema = 1".encode("utf-16"), "1: byte 0 is no UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_structure_is_reported_with_line_and_way_out(content: str | bytes, message: str) -> None:
    assert fault(content).startswith(f"ci/gate.toml:{message}")


@pytest.mark.parametrize("content", ["a = " + "[" * 100_000, "a = " + "{a = " * 100_000], ids=["arrays", "tables"])
def test_deep_nesting_is_no_crash(content: str) -> None:
    assert fault(content) == "ci/gate.toml: its arrays or tables are nested too deep; a policy needs three levels"


@pytest.mark.parametrize("table", ["schema", "require", "evidence", "x"])
def test_a_key_of_many_parts_is_no_crash(table: str) -> None:
    assert outcome(f"{table}{'.a' * 3000} = 1".encode()).startswith("ci/gate.toml:1: ")


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
        assert error == "" or (error.startswith("ci/gate.toml:") and error.isprintable()), content
        refused += bool(error)
    assert refused > 50


def test_reading_a_policy_needs_no_torch() -> None:
    code = "import sys, lossgate.gate.policy, lossgate.gate.init_policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
