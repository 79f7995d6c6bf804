# SPDX-License-Identifier: Apache-2.0
"""docs/reference/properties.md describes each property as it is registered."""

import re

from lossgate.engine.settings import PROFILES
from lossgate.properties import PROPERTIES

from .markdown import ROOT

TEXT = (ROOT / "docs/reference/properties.md").read_text()


def test_each_property_has_a_section_with_its_summary_and_its_cost() -> None:
    sections = {name: " ".join(text.split()) for name, text in re.findall(r"^### (\S+)\n\n((?:.+\n)+)", TEXT, re.M)}
    assert list(sections) == list(PROPERTIES)
    for name, held_to in PROPERTIES.items():
        assert sections[name].startswith(f"{held_to.summary}. "), name
        assert sections[name].endswith(f" Calls: {held_to.runs}."), name


def test_each_page_says_what_is_checked_on_layouts_of_many_ranks() -> None:
    most, of_ranks = PROFILES["ci"].property_ranks, {name for name, held_to in PROPERTIES.items() if held_to.of_ranks}
    own, settings, gate = (
        " ".join((ROOT / f"docs/{name}.md").read_text().split())
        for name in ("reference/properties", "reference/settings", "how-to/release-gate")
    )
    (said,) = re.findall(r"Properties of how ranks work together are checked on all: (.*?)\.", own)
    (again,) = re.findall(r"with more than `property_ranks` ranks on an axis, only (.*?) are checked", settings)
    assert {*re.findall(r"`(\S+)`", said)} == {*re.findall(r"`(\S+)`", again)} == of_ranks
    assert f"with at most {most} ranks on an axis (`property_ranks`)" in own
    assert f"in one dtype with most axes split over {most} ranks" in gate
