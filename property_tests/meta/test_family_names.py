# SPDX-License-Identifier: Apache-2.0
"""Only ``losses/``, the tour and what calls other people's losses know what is special about a
family of losses.

No other module of the harness names an option or a field of one. A loss is thus added in its own
file.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lossgate.losses import SPECS

HARNESS = Path(__file__).parents[2] / "harness/lossgate"
KNOWING = {"losses", "tour.py", "adapters", "plain_functions", "findings"}

SHARED = {
    "real_tokens": "the positions of a partition's tokens that are no padding; nll counts them under the same name",
    "reduction": "how a metric's parts are reduced over ranks; nll has an option of that name",
    "returns": "what an operation of torch returns, in its schema; value has a field of that name",
    "rewards": "a head and its input; clipped_pg has a field of that name",
    "scale": "the judge's statistic of a result as a whole; value has an option of that name",
    "softcap": "the stage that bounds the logits, which is shared by all losses that have it",
    "temperature": "the stage that divides the logits, which is shared by all losses that have it",
    "top_k": "the stage that filters the logits, which is shared by all losses that have it",
    "top_p": "the same",
    "valid_sequences": "a count by which callers weigh calls, as by valid_tokens; some losses have a field for it",
}
"""Names of the machinery that every loss shares, which a family happens to use too."""

NAMES = {option.name for spec in SPECS.values() for option in spec.options} | {
    field for spec in SPECS.values() for field in spec.fields
}


def family_names(source: str, names: set[str]) -> set[str]:
    """Returns which names stand in a module's code: as strings, attributes or keywords."""
    return names & set(_words(ast.parse(source)))


def _words(tree: ast.Module) -> Iterator[str]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                # A word of a message is a name only if it cannot be a word of English.
                yield from (text, *(word for word in re.findall(r"\w+", text) if "_" in word))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="option" | "field"))):
                yield name
            case ast.Attribute(attr=str(name)) | ast.keyword(arg=str(name)):
                yield name
            case _:
                pass


MODULES = [file for file in sorted(HARNESS.rglob("*.py")) if file.relative_to(HARNESS).parts[0] not in KNOWING]


def test_no_other_module_names_an_option_or_a_field_of_a_family() -> None:
    found = {str(file.relative_to(HARNESS)): family_names(file.read_text(), NAMES - SHARED.keys()) for file in MODULES}
    assert {file: names for file, names in found.items() if names} == {}


def test_every_shared_name_is_one_and_is_in_use() -> None:
    assert SHARED.keys() <= NAMES
    assert set().union(*(family_names(file.read_text(), set(SHARED)) for file in MODULES)) == SHARED.keys()


def test_the_search_looks_at_files_and_names() -> None:
    """It would find nothing if either were missing."""
    assert len(MODULES) > 80
    assert len(NAMES) > 60
    declaring = [*(HARNESS / "losses").rglob("*.py"), HARNESS / "specs" / "logit_filter.py"]
    known = " ".join(file.read_text() for file in declaring)
    assert set(re.findall(r"\w+", known)) >= NAMES


@pytest.mark.parametrize(
    "source",
    [
        "def f(options):\n    return options.use_cispo",
        "x = fields['advantages']",
        "options = {'kl_type': 'forward'}",
        "getattr(options, 'cliprange')",
        "replace(inputs, sample_mask=None)",
        "def f(**names): ...\nf(clip_higher=3)",
        "if name in ('beta', 'other'): ...",
        "print(f'{x}: set use_cispo to False')",
    ],
)
def test_a_name_of_a_family_is_found(source: str) -> None:
    assert len(family_names(source, NAMES - SHARED.keys())) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring may name use_cispo and sample_mask."""',
        "x = 1\n'''The docstring of a variable, such as beta.'''",
        "# a comment on use_cispo",
        "print('it returns a real beta')",
        "batch.partition.real_tokens",
    ],
)
def test_prose_and_shared_names_are_no_finding(source: str) -> None:
    assert family_names(source, NAMES - SHARED.keys()) == set()
