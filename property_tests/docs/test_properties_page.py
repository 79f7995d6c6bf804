# SPDX-License-Identifier: Apache-2.0
"""docs/properties.md describes each property as it is registered."""

import re

from lossgate.properties import PROPERTIES

from .markdown import ROOT

TEXT = (ROOT / "docs/properties.md").read_text()


def test_each_property_has_a_section_with_its_summary_and_its_cost() -> None:
    sections = {name: " ".join(text.split()) for name, text in re.findall(r"^### (\S+)\n\n((?:.+\n)+)", TEXT, re.M)}
    assert list(sections) == list(PROPERTIES)
    for name, held_to in PROPERTIES.items():
        assert sections[name].startswith(f"{held_to.summary}. "), name
        assert sections[name].endswith(f" Calls: {held_to.runs}."), name
