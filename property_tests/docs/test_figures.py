# SPDX-License-Identifier: Apache-2.0
"""The figures that the docs state are those that the commands they name measure."""

import io
import re
from pathlib import Path

import fused
import originals
import pytest
from known_failures import Figure, figures
from rich.console import Console

from .markdown import ROOT

pytestmark = pytest.mark.xdist_group("figures")  # one worker makes what its tests share

KNOWN_FAILURES = ROOT / "docs/reference/known-failures.md"


@pytest.fixture(scope="module")
def measured() -> list[Figure]:
    return list(figures())


def sections(page: Path) -> dict[str, str]:
    """Maps each heading, up to its colon, to the text below it: no code blocks, on one line."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"^#+ (.*)\n", text, flags=re.MULTILINE)[1:]
    return {
        heading.partition(":")[0]: " ".join(body.split()) for heading, body in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.slow
def test_known_failures_states_what_is_measured(measured: list[Figure]) -> None:
    texts = sections(KNOWN_FAILURES)
    assert [figure for figure in measured if not figure.holds] == []
    assert [figure for figure in measured if figure.says not in texts[figure.failure]] == []


@pytest.mark.slow
def test_known_failures_states_no_other_percentages(measured: list[Figure]) -> None:
    for heading, text in sections(KNOWN_FAILURES).items():
        for figure in measured:
            text = text.replace(figure.says, "") if figure.failure == heading else text
        assert re.findall(r"[\d.]+%", text) == [], heading


@pytest.mark.slow
def test_the_weights_gradient_does_not_depend_on_the_chunk() -> None:
    printed = io.StringIO()
    fused.accuracy(Console(file=printed, width=160))
    errors = [float(number) for number in re.findall(r"(\d\.\d+)%", printed.getvalue().partition("┡")[2])]
    assert len(errors) == 15
    says = "is below 0.3% in one chunk and in chunks of one token alike"
    assert says in sections(ROOT / "docs/reference/kernels.md")["Memory"]
    assert max(errors) < 0.3


def table(page: Path, corner: str) -> dict[str, dict[str, str]]:
    """Maps the first cells of the table's rows to the other cells, by heading."""
    found = re.search(rf"^\| {corner} \|.*\n(?:\|.*\n)+", page.read_text(), flags=re.MULTILINE)
    assert found
    headings, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in found[0].splitlines())
    return {name: dict(zip(headings[1:], cells, strict=True)) for name, *cells in rows}


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["packing", "cp"])
def test_what_the_originals_claim(claim: str) -> None:
    """All figures but times are the same in every run; these claims are quick to measure."""
    measure, sizes = originals.CLAIMS[claim]
    stated = table(ROOT / "docs/reference/kernels.md", claim)
    measured = {
        name: {heading: originals.shown(heading, row[heading]) for heading in stated[name]}
        for name, row in measure(sizes, 1).items()
    }
    for row in (*stated.values(), *measured.values()):
        row.pop("time / first", None)
    assert stated == measured


@pytest.mark.parametrize("claim", originals.CLAIMS)
def test_tables_of_the_originals_have_every_row(claim: str) -> None:
    measure, _ = originals.CLAIMS[claim]
    small = originals.Sizes(sequences=2, length=16, hidden=4, vocab=8)
    assert list(table(ROOT / "docs/reference/kernels.md", claim)) == list(measure(small, 1))
