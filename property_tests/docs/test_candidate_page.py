# SPDX-License-Identifier: Apache-2.0
"""The pages of candidates and settings agree with the code: arguments, defaults, profiles."""

import ast
import re
import tomllib
from dataclasses import fields
from inspect import Parameter, signature

import pytest

import lossgate
from lossgate import Contract, Precision
from lossgate.base.layout import AXES
from lossgate.engine.settings import PROFILES, Settings
from lossgate.losses import SPECS
from lossgate.problems.partition import SHARDED_DIMS
from lossgate.specs.heads import HEADS
from lossgate.specs.option import COMMON_OPTIONS
from lossgate.specs.outputs import LOGPROBS, LOSS, Output, gradient_output

from .markdown import ROOT

PAGES = ("how-to/candidate", "reference/declaration", "reference/settings")
TEXT = "\n".join((ROOT / f"docs/{page}.md").read_text() for page in PAGES)


def table(*headings: str) -> list[list[str]]:
    """Returns the cells below a row of headings."""
    head = re.escape(f"| {' | '.join(headings)} |\n")
    (found,) = re.findall(rf"^{head}\|[-|]+\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found.splitlines()]


def test_arguments_of_a_candidate() -> None:
    parameters = signature(lossgate.candidate).parameters.values()
    rows = {name.strip("`"): default for name, default, _ in table("argument", "default", "meaning")}
    assert list(rows) == [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is Parameter.empty]
    assert [name for name, default in rows.items() if default == "required"] == required
    assert rows["dtypes"].split(", ") == list(signature(lossgate.candidate).parameters["dtypes"].default)


def test_fields_of_precision() -> None:
    rows = {row[0].strip("`"): row[1] for row in table("field", "default", "dtype to which the kernel rounds")}
    stated = {name: ast.literal_eval(default.strip("`")) for name, default in rows.items()}
    assert stated == {f.name: f.default for f in fields(Precision)}


def default_placements(output: Output) -> tuple[str, str]:
    """Returns what happens by default over dp and cp, and over tp, in the words of the page."""
    placements = Contract().placements(output)
    words = {a: "split" if set(SHARDED_DIMS[a]) & set(output.dims) else placements[a] for a in AXES}
    if words["dp"] != words["cp"]:
        return f"{words['dp']} over dp, {words['cp']} over cp", words["tp"]
    return words["dp"], words["tp"]


def test_defaults_of_the_contract() -> None:
    stated: dict[str, tuple[str, str]] = {}
    for row in table("output", "default over dp and cp", "default over tp"):
        stated |= dict.fromkeys(re.findall(r"`([^`]+)`", row[0]), (row[1], row[2]))
    assert {f.name for f in fields(Contract)} <= set(stated)
    assert stated["loss"] == default_placements(LOSS)
    of_leaves = {leaf: dims for head in HEADS.values() for leaf, dims in head.leaves.items()}
    gradients = {leaf: default_placements(gradient_output(leaf, dims)) for leaf, dims in of_leaves.items()}
    assert {leaf: stated[leaf] for leaf in gradients} == gradients
    assert stated["logprobs"] == default_placements(LOGPROBS)


def test_profiles() -> None:
    columns = ("examples", "rounds", "ranks", "jobs", "property_problems", "property_ranks")
    rows = table("profile", *(f"`{name}`" for name in columns))
    stated = {row[0].split()[0].strip("`"): [int(number) for number in row[1:]] for row in rows}
    assert stated == {name: [getattr(profile, c) for c in columns] for name, profile in PROFILES.items()}


_NOT_STATED = ("places", "layouts", "dtypes", "sizes", "properties", "property_problems", "property_ranks")


def test_settings_that_are_the_same_in_every_profile() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/reference/settings.md").read_text(), flags=re.DOTALL)
    stated = dict(re.findall(r'^(\w+) = "?([\w.]+)"?', block, flags=re.MULTILINE))
    named = {f.name for f in fields(Settings) if f.name not in _NOT_STATED}
    common = tomllib.loads(block)["tool"]["lossgate"]
    values = common | common["profiles"]["ci"]
    assert Settings(sizes=tuple(values["sizes"])).sizes
    assert list(stated) == ["seed", *(name for name in stated if name != "seed")]
    assert stated.keys() == named
    ci = PROFILES["ci"]
    assert {name: values[name] for name in named} == {name: getattr(ci, name) for name in named}


def test_losses_that_take_a_model_s_output_unshifted() -> None:
    """Other specs have fields that a token itself has, too, but none that a model gave it."""
    of_models = {"teacher_logits", "teacher_indices", "old_values"}
    named = sorted(name for name, spec in SPECS.items() if spec.unshifted & of_models)
    assert f"{', '.join(f'`{name}`' for name in named[:-1])} and `{named[-1]}` get of models stays" in " ".join(
        TEXT.split()
    )


def test_losses_that_ask_for_all_logits() -> None:
    named = [name for name, spec in SPECS.items() if "logits" in spec.uses]
    (said,) = re.findall(r"A loss may ask for all logits, as (.*?) do\.", " ".join(TEXT.split()))
    assert sorted(re.findall(r"`(\w+)`", said)) == sorted(named)


@pytest.mark.parametrize("option", COMMON_OPTIONS)
def test_common_options(option: str) -> None:
    assert f"`{option}` says" in TEXT
