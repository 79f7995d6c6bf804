# SPDX-License-Identifier: Apache-2.0
"""docs/losses.md agrees with the code: options and defaults, metrics and reductions, defects."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dense_losses.clipped_pg import ClippedPGOptions
from dense_losses.distill import DistillOptions
from dense_losses.filtering import filtered_token_logprobs
from dense_losses.grpo import GrpoOptions
from dense_losses.nll import nll
from dense_losses.preference import DpoOptions
from dense_losses.value import ValueOptions
from lossgate.specs import SPECS

from .markdown import ROOT

PAGE = ROOT / "docs/losses.md"
TEXT = PAGE.read_text()

DEFINED_BY: dict[str, type | Callable[..., Any]] = {
    "nll": nll,
    "token_logprobs": filtered_token_logprobs,
    "dpo": DpoOptions,
    "clipped_pg": ClippedPGOptions,
    "grpo": GrpoOptions,
    "value": ValueOptions,
    "distill": DistillOptions,
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


DEFECT = r"(?<![\w-])[ANOP]\d{1,2}(?!\w)"


def listed() -> list[str]:
    return re.findall(rf"^\| ({DEFECT}) \|", TEXT, flags=re.MULTILINE)


def test_every_citation_of_a_defect_is_in_the_list() -> None:
    numbers = listed()
    assert len(numbers) == len(set(numbers))
    assert {f"O{n}" for n in range(1, 19)} <= set(numbers)
    folders = ("README.md", "benchmarks", "ci", "distributed_tests", "docs", "examples", "harness", "kernels")
    folders += ("property_tests", "references")
    files = [file for name in folders for file in [ROOT / name, *(ROOT / name).rglob("*")]]
    for file in files:
        if file.suffix in (".py", ".md"):
            assert set(re.findall(DEFECT, file.read_text())) <= set(numbers), file


def test_every_defect_of_the_list_is_cited_by_a_test_of_the_kernels() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "property_tests/kernels").glob("test_*.py"))
    assert set(listed()) - set(re.findall(DEFECT, tests)) == set()
