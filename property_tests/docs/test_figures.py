# SPDX-License-Identifier: Apache-2.0
"""The figures that the docs state are those that the commands they name measure."""

import io
import re
from pathlib import Path

import fused
import pytest
from known_failures import Figure, figures
from rich.console import Console

from .markdown import ROOT

KNOWN_FAILURES = ROOT / "docs/known_failures.md"


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


def test_known_failures_states_what_is_measured(measured: list[Figure]) -> None:
    texts = sections(KNOWN_FAILURES)
    assert [figure for figure in measured if not figure.holds] == []
    assert [figure for figure in measured if figure.says not in texts[figure.failure]] == []


def test_known_failures_states_no_other_percentages(measured: list[Figure]) -> None:
    for heading, text in sections(KNOWN_FAILURES).items():
        for figure in measured:
            text = text.replace(figure.says, "") if figure.failure == heading else text
        assert re.findall(r"[\d.]+%", text) == [], heading


def test_the_weights_gradient_does_not_depend_on_the_chunk() -> None:
    printed = io.StringIO()
    fused.accuracy(Console(file=printed, width=160))
    errors = [float(number) for number in re.findall(r"(\d\.\d+)%", printed.getvalue().partition("┡")[2])]
    assert len(errors) == 15
    says = "is below 0.3% in one chunk and in chunks of one token alike"
    assert says in sections(ROOT / "docs/kernels.md")["Memory"]
    assert max(errors) < 0.3
