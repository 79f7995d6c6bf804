# SPDX-License-Identifier: Apache-2.0
"""losses.md agrees with the code: options and defaults, metrics and reductions, defects."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dense_losses.filtering import filtered_token_logprobs
from dense_losses.nll import nll
from lossgate.losses import SPECS
from lossgate.losses.clipped_pg import ClippedPgLossOptions
from lossgate.losses.distill import DistillOptions
from lossgate.losses.dpo import DpoOptions
from lossgate.losses.grpo import GrpoLossOptions
from lossgate.losses.value import ValueOptions

from .markdown import ROOT

PAGE = ROOT / "docs/reference/losses.md"
TEXT = PAGE.read_text()

DEFINED_BY: dict[str, type | Callable[..., Any]] = {
    "nll": nll,
    "token_logprobs": filtered_token_logprobs,
    "dpo": DpoOptions,
    "clipped_pg": ClippedPgLossOptions,
    "grpo": GrpoLossOptions,
    "value": ValueOptions,
    "distill": DistillOptions,
    "divergence": SPECS["divergence"].options_type,
}
"""Where the options of each loss and their defaults are defined."""


def rows(loss: str, heading: str) -> Iterator[tuple[list[str], list[str]]]:
    """Rows of the tables of a loss's section whose first column has ``heading``.

    Yields:
        (the names in the first column, the items of the second).
    """
    section = next(part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if part.startswith(f"`{loss}`"))
    for table in re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE):
        first, _, *others = table.splitlines()
        if first.removeprefix("| ").startswith(heading):
            for row in others:
                names, items = row.split("|")[1:3]
                yield re.findall(r"`([^`]+)`", names), items.strip().split(", ")


def defaults(defined_by: type | Callable[..., Any]) -> dict[str, Any]:
    if isinstance(defined_by, type):
        return {field.name: field.default for field in dataclasses.fields(defined_by)}
    parameters = inspect.signature(defined_by).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("loss", DEFINED_BY)
def test_options_and_defaults(loss: str) -> None:
    stated = {
        name: ast.literal_eval(default.strip("`"))
        for names, items in rows(loss, "option")
        for name, default in zip(names, items, strict=True)
    }
    assert stated == defaults(DEFINED_BY[loss])


def test_options_of_regularisers() -> None:
    """They share a section, and so a table."""
    stated = {names[0]: ast.literal_eval(items[0].strip("`")) for names, items in rows("z_loss", "option")}
    specs = [SPECS[name] for name in ("z_loss", "label_smoothing", "softcap")]
    assert stated == {name: default for spec in specs for name, default in defaults(spec.options_type).items()}


def test_every_spec_has_a_section() -> None:
    headings = [line for line in TEXT.splitlines() if line.startswith("## ")]
    assert [name for name in SPECS if not any(f"`{name}`" in heading for heading in headings)] == []


@pytest.mark.parametrize("loss", [name for name, spec in SPECS.items() if spec.metrics and name != "preference"])
def test_metrics_and_reductions(loss: str) -> None:
    """A name such as ``_avg`` stands for all metrics that end so."""
    metrics = {name: metric.reduction for name, metric in SPECS[loss].metrics.items()}
    stated: dict[str, str] = {}
    for names, reductions in rows(loss, "metric"):
        each = reductions if len(reductions) > 1 else reductions * len(names)
        for name, reduction in zip(names, each, strict=True):
            meant = [m for m in metrics if m == name or (name[0] == "_" and m.endswith(name))]
            assert meant or name == "loss", name
            stated |= dict.fromkeys(meant, reduction)
    assert stated == metrics


def test_metrics_of_preference_are_among_those_of_dpo() -> None:
    assert SPECS["preference"].metrics.keys() <= SPECS["dpo"].metrics.keys()


SOURCES = ("benchmarks", "ci", "distributed_tests", "examples", "harness", "kernels", "property_tests", "references")
PLACES = ("*.md", "docs/**/*.md", *(f"{folder}/**/*.py" for folder in SOURCES))


def listed() -> list[str]:
    return re.findall(r"^\| (O\d+) \|", TEXT, flags=re.MULTILINE)


def cited(text: str) -> set[str]:
    """Returns the numbers of defects in a text, those of lists that no longer exist too."""
    return set(re.findall(r"(?<![\w-])[ALNOP]\d{1,2}(?!\w)", text))


def test_the_defects_are_listed_in_order() -> None:
    assert listed() == [f"O{number}" for number in range(1, 19)]


def test_citations_are_found() -> None:
    assert cited("O(n) of H2O: (O9), O12, P7; not Z-O3 or O3a") == {"O9", "O12", "P7"}


@pytest.mark.parametrize("place", PLACES)
def test_every_number_that_is_cited_is_in_the_list(place: str) -> None:
    files = [file for file in ROOT.glob(place) if file != Path(__file__)]
    assert files != []
    assert {file: missing for file in files if (missing := cited(file.read_text()) - set(listed()))} == {}
