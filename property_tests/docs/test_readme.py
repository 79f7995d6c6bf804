# SPDX-License-Identifier: Apache-2.0
"""README.md and the page of losses say of losses and findings what the code has."""

import re

from lossgate.declaration.loading import load_candidates
from lossgate.findings import FINDINGS, Severity
from lossgate.losses import SPECS

from .markdown import ROOT

README = (ROOT / "README.md").read_text()
LOSSES = (ROOT / "docs/reference/losses.md").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """Returns the cells of the table below a heading."""
    table = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_losses_and_where_their_kernels_start() -> None:
    stated = {
        name: heads for names, _, heads, _ in rows(LOSSES, "Which there are") for name in re.findall(r"`(\w+)`", names)
    }
    assert stated == {name: ", ".join(spec.inputs) for name, spec in SPECS.items()}


def test_losses_of_which_there_is_a_kernel() -> None:
    fused = {candidate.spec.name for candidate in load_candidates(str(ROOT / "ci/candidates/ours.py"))}
    stated = {
        name for names, _, _, has in rows(LOSSES, "Which there are") if has for name in re.findall(r"`(\w+)`", names)
    }
    assert stated == fused


def test_the_findings_that_are_named_exist() -> None:
    named = [cells[0].strip("`") for cells in rows(README, "What it has found")]
    assert len(named) > 3
    assert {*named} <= {*FINDINGS}
    assert {FINDINGS[name].severity for name in named} <= {Severity.WRONG, Severity.PRECISION}


def test_every_known_failure_has_its_command() -> None:
    """The page of known failures runs them."""
    page = (ROOT / "docs/reference/known-failures.md").read_text()
    files = sorted((ROOT / "ci/candidates/known_failures").glob("*.json"))
    commands = [f"lossgate replay {file.relative_to(ROOT)}" for file in files]
    assert [command for command in commands if f"\n$ {command}\n" not in page] == []
