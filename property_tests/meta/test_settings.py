# SPDX-License-Identifier: Apache-2.0
"""Tests of settings: where they are looked for, and which wins."""

from pathlib import Path
from typing import Any

import pytest

from lossgate.engine.settings import PROFILES, Settings, load_settings
from lossgate.errors import UsageError


def test_a_flag_wins_over_the_profile_over_the_common_table_over_the_built_in_profile(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.lossgate]\nexamples = 2\nrounds = 2\nranks = 2\n"
        "[tool.lossgate.profiles.nightly]\nexamples = 3\nrounds = 3\n"
    )
    found = load_settings("nightly", tmp_path, examples=4, ranks=None)
    assert (found.examples, found.rounds, found.ranks, found.jobs) == (4, 3, 2, PROFILES["nightly"].jobs)
    other = load_settings("ci", tmp_path)
    assert (other.examples, other.rounds, other.ranks) == (2, 2, 2)


def test_pyproject_toml_is_found_from_a_folder_below_it(tmp_path: Path) -> None:
    below = tmp_path / "tests" / "kernels"
    below.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.lossgate]\nexamples = 7\n")
    assert load_settings(start=below).examples == 7
    (below.parent / "pyproject.toml").write_text("[tool.lossgate]\nexamples = 8\n")
    assert load_settings(start=below).examples == 8
    assert load_settings(start=tmp_path).examples == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeout": -1.0}, "timeout=-1.0: expected a positive number"),
        ({"examples": 0}, "examples=0: expected a positive number"),
        ({"shrink_calls": -1}, "shrink_calls=-1: expected a number of problems, or 0 for none"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Settings(**changes)
    assert str(error.value) == message
