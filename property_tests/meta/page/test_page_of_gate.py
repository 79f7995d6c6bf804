# SPDX-License-Identifier: Apache-2.0
"""Writes the page by ``lossgate gate --html``, with history that holds the evidence itself too."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lossgate.cli.app import main
from lossgate.evidence.sealed import seal
from property_tests.meta.page.made import RUN, record
from property_tests.meta.page.test_page_html import embedded

POLICY = """schema = 1
[[require]]
candidates = ["kernel"]
properties = ["agreement"]
layouts = ["single"]
dtypes = ["float32"]
"""


def test_the_page_of_a_gate_has_the_runs_of_history_and_the_current_one_once(tmp_path: Path) -> None:
    cell, then = record(), "2026-01-30T12:00:00+00:00"
    old = replace(RUN, run="old", commit="00" * 20, started=then)
    now, history, policy, html = (tmp_path / name for name in ("now.jsonl", "old.jsonl", "gate.toml", "page.html"))
    policy.write_text(POLICY)
    now.write_bytes(seal(RUN) + b"\n" + seal(cell) + b"\n")
    history.write_bytes(now.read_bytes() + seal(old) + b"\n" + seal(replace(cell, run="old", time=then)) + b"\n")
    with pytest.raises(SystemExit) as exit_:
        main(["gate", str(now), "--policy", str(policy), "--html", str(html), "--history", str(history)])
    assert exit_.value.code == 3  # the made record has no numbers, so that it contradicts itself
    details = embedded(html.read_text(encoding="utf-8"), "details")
    (shown,) = details["cells"]
    commits = [details["texts"][number] for number in shown["trend"]["commits"]]
    assert commits == ["00" * 6, "4f" * 6]
