# SPDX-License-Identifier: Apache-2.0
"""README.md says of losses and of known failures what the code and the files have."""

import re

from lossgate.declaration.loading import load_candidates
from lossgate.losses import SPECS

from .markdown import ROOT

TEXT = (ROOT / "README.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the table below a heading."""
    table = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_losses_and_where_their_kernels_start() -> None:
    stated = {name: heads for names, _, heads, _ in rows("Losses") for name in re.findall(r"`(\w+)`", names)}
    assert stated == {name: ", ".join(spec.inputs) for name, spec in SPECS.items()}


def test_losses_of_which_there_is_a_kernel() -> None:
    fused = {candidate.spec.name for candidate in load_candidates(str(ROOT / "ci/candidates/ours.py"))}
    stated = {name for names, _, _, has in rows("Losses") if has for name in re.findall(r"`(\w+)`", names)}
    assert stated == fused


def test_every_known_failure_has_its_command() -> None:
    """The page of known failures runs them."""
    page = (ROOT / "docs/reference/known-failures.md").read_text()
    commands = [cells[0].strip("`") for cells in rows("What it has found")]
    files = sorted((ROOT / "ci/candidates/known_failures").glob("*.json"))
    assert commands == [f"lossgate replay {file.relative_to(ROOT)}" for file in files]
    assert [command for command in commands if f"\n$ {command}\n" not in page] == []
