# SPDX-License-Identifier: Apache-2.0
"""Tries versions of torch, and prints a table of what works with each.

    ci/test --torch 2.11.0 2.14.1

For each version it makes a virtual environment, ``.venv-torch-VERSION``, and runs in it the tests
that a release needs. Torch alone takes gigabytes, which pip fetches once. A version takes about ten
minutes on two cores. The exit code is 1 if anything failed; what it was is printed below the table.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PARTS = {
    "tour": ["property_tests/meta/test_tour.py"],
    "worlds": [
        "property_tests/meta/simulated_world",
        "property_tests/meta/test_torch_versions.py",
        "distributed_tests/test_ring_order.py",
        "distributed_tests/test_pool.py",
    ],
    "kernels": ["property_tests/kernels"],
    "references": ["property_tests/references"],
    "findings": ["property_tests/test_pytorch_kernels.py"],
}
"""The tests of each column. Slow ones do not run."""
_ITS_OWN = re.compile("(torch|triton|setuptools)==")
"""Constraints that each version of torch has of its own."""
_FINDING = re.compile(r"\[(torch-\d+)\]")
"""The end of the name of a test that holds while PyTorch has a defect."""


def main() -> None:
    """Prints the table of the versions that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, such as 2.11.0")
    versions = parser.parse_args().versions
    failures = list[str]()
    print(line(["torch", "install", *PARTS]), line(["---"] * (len(PARTS) + 2)), sep="\n", flush=True)
    for version in versions:
        cells = ["installed"]
        try:
            python = environment(version)
        except subprocess.CalledProcessError as error:
            cells = ["FAILED", *["-"] * len(PARTS)]
            failures.append(f"torch {version}: {' '.join(map(str, error.cmd))}")
        else:
            for part in PARTS:
                cell, failed = outcome(run(python, PARTS[part]))
                cells.append(cell)
                failures += [f"torch {version}, {part}: {name}" for name in failed]
        print(line([version, *cells]), flush=True)
    print(*failures, sep="\n")
    sys.exit(bool(failures))


def line(cells: list[str]) -> str:
    """Returns a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def environment(version: str) -> Path:
    """Makes the virtual environment of a version, unless it is up to date. Returns its Python.

    Raises:
        subprocess.CalledProcessError: if something can't be installed.
    """
    folder = ROOT / f".venv-torch-{version}"
    python, stamp = folder / "bin/python", folder / "installed"
    given = [ROOT / "pyproject.toml", ROOT / "ci/constraints.txt"]
    if stamp.exists() and all(file.stat().st_mtime < stamp.stat().st_mtime for file in given):
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(others(given[1].read_text()))
    wanted = [f"torch=={version}", "transformers", "peft", "accelerate", "--editable", f"{ROOT}[html,test]"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--constraint", constraints, *wanted], check=True)
    stamp.touch()
    return python


def others(constraints: str) -> str:
    """Returns the constraints on packages whose versions do not hang on torch's."""
    return "".join(each for each in constraints.splitlines(keepends=True) if not _ITS_OWN.match(each))


def run(python: Path, tests: list[str]) -> ElementTree.Element:
    """Runs tests in an environment, and returns what JUnit's file says of them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["--slow", "none", "-n", str((os.cpu_count() or 1) + 1), "--dist", "loadgroup", "--junitxml", report]
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # tests call the command lossgate
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PATH": path, "OMP_WAIT_POLICY": "passive"}, stdout=subprocess.PIPE
        )
        if report.exists():
            return ElementTree.parse(report).getroot()
    raise SystemExit(f"pytest could not run: {' '.join(map(str, command))}\n{done.stdout.decode()}")


def outcome(report: ElementTree.Element) -> tuple[str, list[str]]:
    """Returns what a cell of the table says of a report, and the names of the tests that failed."""
    failed, passed, findings = list[str](), 0, list[str]()
    for test in report.iter("testcase"):
        name = f"{test.get('classname')}::{test.get('name')}"
        if test.find("failure") is not None or test.find("error") is not None:
            failed.append(name)
        elif test.find("skipped") is None:
            passed += 1
            findings += _FINDING.findall(name)
    stand = f"; {', '.join(sorted(findings))} found" if findings else ""
    return (f"{len(failed)} of {len(failed) + passed} FAILED" if failed else f"{passed} passed") + stand, failed


if __name__ == "__main__":
    main()
