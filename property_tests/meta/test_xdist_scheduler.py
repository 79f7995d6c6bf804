# SPDX-License-Identifier: Apache-2.0
"""Tests of how tests are shared out between workers of pytest-xdist."""

from pathlib import Path

import pytest

from property_tests.xdist_scheduler import BY_WORD, SLOW, part_of

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
SPECS, WHOLE = "property_tests/test_specs.py", "property_tests/meta/test_whole_sequences.py"


@pytest.mark.parametrize(
    ("nodeid", "part"),
    [
        ("a/test_b.py::test_c", "a/test_b.py::test_c"),
        ("a/test_b.py::test_c[1-x]", "a/test_b.py::test_c"),
        ("a/test_b.py::test_c[x[0]::y-2]", "a/test_b.py::test_c"),
        ("a/test_b.py::TestD::test_c[1]", "a/test_b.py::TestD::test_c"),
        (f"{SPECS}::test_a_wrong_candidate_disagrees[nll]", f"{SPECS}[nll]"),
        (f"{SPECS}::test_a_correct_candidate_agrees[nll-hidden-single]", f"{SPECS}[nll]"),
        (f"{SPECS}::test_without_cases", f"{SPECS}::test_without_cases"),
        (f"{WHOLE}::test_a_right_candidate_agrees[rows-dpo]", f"{WHOLE}[dpo]"),
        (f"{WHOLE}::test_packing[rows]", f"{WHOLE}[rows]"),
    ],
)
def test_parts(nodeid: str, part: str) -> None:
    assert part_of(nodeid) == part


@pytest.mark.parametrize("name", [*SLOW, *BY_WORD])
def test_what_is_named_exists(name: str) -> None:
    module, _, test = name.partition("::")
    assert f"def {test}" in (ROOT / module).read_text()


def test_one_worker_runs_all_cases_of_a_test(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest(
        "from property_tests.xdist_scheduler import Parts\n"
        "def pytest_xdist_make_scheduler(config, log):\n    return Parts(config, log)\n"
    )
    pytester.makepyfile(
        "import pytest, os\n"
        "@pytest.mark.parametrize('case', range(6))\n"
        "def test_first(case, record_property):\n    record_property('worker', os.environ['PYTEST_XDIST_WORKER'])\n"
        "@pytest.mark.parametrize('case', range(6))\n"
        "def test_second(case, record_property):\n    record_property('worker', os.environ['PYTEST_XDIST_WORKER'])\n"
    )
    monkeypatch.syspath_prepend(str(ROOT))
    found = pytester.inline_run("-n2", "-p", "no:cacheprovider")
    reports = [r for r in found.getreports("pytest_runtest_logreport") if r.when == "call"]
    workers = {(r.nodeid.partition("[")[0], dict(r.user_properties)["worker"]) for r in reports}
    assert len(reports) == 12
    assert len(workers) == 2
