# SPDX-License-Identifier: Apache-2.0
"""Kernels stay on the device of their inputs and do not make the host wait for it.

So does the harness where it calls them. ``fake_device.py`` runs them on an accelerator that is
none; no GPU is needed.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from lossgate import Candidate
from lossgate.declaration.loading import load_candidates

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent.relative_to(ROOT)
OURS, MISTAKES = "ci/candidates/ours.py", str(HERE / "device_mistakes.py")

CANDIDATES = {candidate.name: candidate for candidate in load_candidates(str(ROOT / OURS))}
PACKS = ("Pack.from_rows", "Pack.labels", "Pack.split", "Pack.gather", "Pack.to_rows")
WAITS = {"Pack.of": "the lengths decide how many tokens there are, so how large its tensors are"}
"""What makes the host wait for the device, and why it must."""

MIXED, WAITED = "FakeTensorDeviceMismatchError", "DataDependentOutputException"
SEEN = {
    "tensor_on_the_cpu": MIXED,
    "tensor_on_the_cpu_in_backward": MIXED,
    "item": WAITED,
    "item_in_backward": WAITED,
    "branch": WAITED,
    "boolean_index": "DynamicOutputShapeException",
}
"""The mistakes of ``device_mistakes.py``, and the error that each raises."""

pytestmark = pytest.mark.xdist_group("fake_device")  # all tests share one run

Errors = dict[str, dict[str, set[str | None]]]
"""By name and layout: the errors of all runs, None for a run without one."""


@pytest.fixture(scope="module")
def errors() -> Errors:
    command = [sys.executable, str(HERE / "fake_device.py"), OURS, MISTAKES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: Errors = defaultdict(lambda: defaultdict(set))
    for run in map(json.loads, done.stdout.splitlines()):
        found[run["name"]][run["layout"]].add(run["error"])
    return found


@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)
def test_a_kernel_stays_on_its_device(errors: Errors, candidate: Candidate) -> None:
    layouts = ["single", *(f"{axis}=2" for axis in ("dp", "cp", "tp") if axis in candidate.axes)]
    assert errors[candidate.name] == {layout: {None} for layout in layouts}


@pytest.mark.parametrize("name", PACKS)
def test_a_pack_stays_on_its_device(errors: Errors, name: str) -> None:
    assert errors[name] == {"cp=2": {None}}


@pytest.mark.parametrize("name", WAITS)
def test_what_must_wait_for_the_device_does(errors: Errors, name: str) -> None:
    """If it no longer does, it leaves the list."""
    (error,) = errors[name]["cp=2"]
    assert error is not None
    assert error.startswith(WAITED)


@pytest.mark.parametrize("name", SEEN)
def test_a_mistake_is_seen(errors: Errors, name: str) -> None:
    (error,) = errors[name]["single"]
    assert error is not None
    assert error.startswith(SEEN[name])
    assert "device_mistakes.py" in error


def test_a_kernel_without_a_mistake_raises_nothing(errors: Errors) -> None:
    assert errors["no_mistake"] == {"single": {None}}


def test_nothing_else_was_run(errors: Errors) -> None:
    assert errors.keys() == {*CANDIDATES, *PACKS, *WAITS, *SEEN, "no_mistake"}
