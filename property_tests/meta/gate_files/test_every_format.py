# SPDX-License-Identifier: Apache-2.0
"""What holds for each file that a gate writes."""

import json
import subprocess
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import pytest

from lossgate.gate.gate_verdict import Blocker, GatedCell, GateReason, GateVerdict
from lossgate.reports.console import one_line, plain
from lossgate.reports.gate_files.junit import junit_xml
from lossgate.reports.gate_files.markdown import markdown
from lossgate.reports.gate_files.sarif import sarif
from lossgate.reports.gate_files.statement import statement
from property_tests.meta.gate_files.verdicts import (
    POLICY,
    SOURCE,
    VERDICTS,
    agreeing,
    blocked,
    failure,
    key,
    many,
    of_gate,
    summary,
    verdict,
)

MODULES = ("junit", "sarif", "markdown", "statement")


def about_sources(judged: GateVerdict) -> str:
    return statement(judged, [SOURCE])


FORMATS: dict[str, Callable[[GateVerdict], str]] = {
    "junit": junit_xml,
    "sarif": sarif,
    "markdown": markdown,
    "statement": about_sources,
}


@pytest.mark.parametrize("name", VERDICTS)
@pytest.mark.parametrize("form", FORMATS)
def test_the_same_verdict_gives_the_same_bytes_in_utf8(form: str, name: str) -> None:
    text = FORMATS[form](VERDICTS[name])
    assert text.encode() == FORMATS[form](VERDICTS[name]).encode()
    assert text.endswith("\n")


@pytest.mark.parametrize("form", FORMATS)
def test_no_character_of_a_hostile_verdict_is_hidden(form: str) -> None:
    text = FORMATS[form](VERDICTS["hostile"])
    assert plain(text) == text
    assert "\\x1b" in text.replace("\\\\", "\\")
    assert "\\u202e" in text.replace("\\\\", "\\")


def test_a_disagreement_begins_with_its_cause_and_what_to_do() -> None:
    """In the message of each format; statistics are in none."""
    told: dict[str, Any] = {"cause": "a sum is missing", "causes": ("cause: a sum is missing", "to do: add it")}
    found = summary(key(), "DISAGREE", **told, failure=failure(statistics=("loss: rounding explains 1",)))
    blocker = Blocker(reason=GateReason.DISAGREE, message="it disagrees", why=found.why, cell=key())
    judged = verdict([GatedCell(key=key(), summary=found, blockers=(blocker,))])
    for form in ("junit", "sarif", "markdown"):
        text = FORMATS[form](judged)
        assert "it disagrees: cause: a sum is missing; to do: add it; loss: 1.01 times the reference" in text, form
        assert "rounding explains" not in text
    assert "`:\n\n- `cause: a sum is missing`\n- `to do: add it`\n" in FORMATS["markdown"](judged)


@pytest.mark.parametrize("kind", GateReason)
@pytest.mark.parametrize("form", FORMATS)
def test_each_kind_shows_if_it_concerns_the_gate(form: str, kind: GateReason) -> None:
    judged = verdict([agreeing(key())], of_gate(kind, "This is wrong. Do that."))
    text = FORMATS[form](judged)
    assert {
        "junit": f'<testcase classname="lossgate.gate" name="{kind}"',
        "sarif": f'"ruleId": "{kind.replace(" ", "-")}"',
        "markdown": f"### {kind} (1)",
        "statement": f'"failedTests":["gate: {kind}"]',
    }[form] in text
    assert form == "statement" or "This is wrong. Do that." in text


@pytest.mark.parametrize("kind", GateReason)
@pytest.mark.parametrize("form", FORMATS)
def test_each_kind_shows_if_it_concerns_a_cell(form: str, kind: GateReason) -> None:
    text = FORMATS[form](verdict([blocked(key(), kind, "This is wrong. Do that.")]))
    assert {
        "junit": f' type="{kind}" message="This is wrong. Do that."',
        "sarif": f'"ruleId": "{kind.replace(" ", "-")}"',
        "markdown": f"### {kind} (1)",
        "statement": f'"failedTests":["{key()}"]',
    }[form] in text
    assert form == "statement" or "This is wrong. Do that." in text


@pytest.mark.parametrize("form", FORMATS)
def test_files_name_policy_and_evidence_by_digest(form: str) -> None:
    text = FORMATS[form](VERDICTS["open"])
    assert POLICY.file in text
    assert POLICY.sha256 in text
    assert "b" * 64 in text


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_thirty_thousand_blockers_are_written_quickly(form: str) -> None:
    """100,000 lines of evidence must gate in 20 s. Each file takes 1 to 3 s for a third of them."""
    judged = many()
    start = process_time()
    text = FORMATS[form](judged)
    assert process_time() - start < 15
    assert len(text) > 10_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("all is well, é 漢 😀\n\t", "all is well, é 漢 😀\n\t"),
        ("\x00\x1b[31m\r", r"\x00\x1b[31m\r"),
        ("\u202eevil\u200b", r"\u202eevil\u200b"),
        ("\ud800 \udcff \ufffe", r"\ud800 \udcff \ufffe"),
        ("\x7f\x85\u2028", r"\x7f\x85\u2028"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_one_line_is_one_line_and_says_that_it_was_cut() -> None:
    assert one_line(" a\n\n b\tc\r\nd") == "a b c\\r d"
    assert one_line("abcdef", 3) == "abc... (cut)"
    assert one_line("abc", 3) == "abc"


def test_json_is_json() -> None:
    for judged in VERDICTS.values():
        json.loads(sarif(judged))
        json.loads(about_sources(judged))


def test_writing_a_file_does_not_import_torch() -> None:
    modules = ", ".join(f"lossgate.reports.{name}" for name in ("written", *(f"gate_files.{name}" for name in MODULES)))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"], check=False, timeout=60
    )
    assert done.returncode == 0
