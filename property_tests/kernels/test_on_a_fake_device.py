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

from lossgate.declaration.loading import load_candidates

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent.relative_to(ROOT)
OURS, MISTAKES = "ci/candidates/ours.py", str(HERE / "device_mistakes.py")

PACKS = ("Pack.from_rows", "Pack.from_rows, packed", "Pack.labels", "Pack.split", "Pack.gather", "Pack.to_rows")
MIXED, WAITED = "FakeTensorDeviceMismatchError", "DataDependentOutputException"
WAITS = {"Pack.of": WAITED}
"""What makes the host wait. ``Pack.of`` must: the lengths of sequences decide how large its tensors
are. What no longer waits leaves the list.
"""
SEEN = {
    "tensor_on_the_cpu": MIXED,
    "tensor_on_the_cpu_in_backward": MIXED,
    "item": WAITED,
    "item_in_backward": WAITED,
    "branch": WAITED,
    "boolean_index": "DynamicOutputShapeException",
}
"""The mistakes of ``device_mistakes.py``, and the error that each raises."""


def test_kernels_stay_on_their_device_and_mistakes_are_seen() -> None:
    """All in one test, because the process takes half a minute."""
    expected: dict[str, dict[str, str | None]] = {}
    for candidate in load_candidates(str(ROOT / OURS)):
        sharded = (f"{axis}=2" for axis in ("dp", "cp", "tp") if axis in candidate.axes)
        expected[candidate.name] = dict.fromkeys(["single", *sharded])
    expected |= {name: {"single": error} for name, error in {"no_mistake": None, **SEEN}.items()}
    expected |= {name: {"cp=2": error} for name, error in {**dict.fromkeys(PACKS), **WAITS}.items()}
    assert errors() == expected


def errors() -> dict[str, dict[str, str | None]]:
    """Returns the type of the first error of each name and layout, None if no run raised."""
    command = [sys.executable, str(HERE / "fake_device.py"), OURS, MISTAKES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str | None]] = defaultdict(dict)
    for run in map(json.loads, done.stdout.splitlines()):
        of_name, error = found[run["name"]], run["error"]
        of_name[run["layout"]] = of_name.get(run["layout"]) or (error and error.partition(":")[0])
        if error is not None:
            print(run)  # pytest shows it if the test fails
    return found
