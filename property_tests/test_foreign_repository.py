# SPDX-License-Identifier: Apache-2.0
"""What is published, in a folder that is not ours: the wheel with what it requires and nothing
else, and the workflow and the action of ``docs/how-to/ci.md``, run as GitHub's runner runs them.
"""

import ast
import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement

import lossgate
from property_tests.docs.markdown import ROOT, blocks_of

pytestmark = pytest.mark.xdist_group("wheel")  # it is built once

KERNEL = """
import lossgate, torch.nn.functional as F


@lossgate.candidate("nll", head="logits", dtypes=("float32",))
def my_kernel(inputs, options, mesh):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = F.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)
"""
WRONG = KERNEL.replace("inputs.valid_tokens.clamp(min=1)", "max(inputs.mask.numel(), 1)")
POLICY = """
schema = 1
[evidence]
unmodified = true
[[require]]
candidates = ["my_kernel"]
"""
PIP = """
import sys
from pathlib import Path
with Path(sys.prefix, "installs").open("a") as file:
    print(*sys.argv[1:], file=file)
"""
"""Stands for pip where there is no network: it notes what it is asked for."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def bare(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("bare") / "venv", built[1])


def environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Returns a virtual environment with a wheel, what it requires, and nothing else.

    What it requires is linked from this environment, by the names that pip would follow.
    """
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for name in required_by(wheel, extras):
        distribution = metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True, env=clean(folder))
    return folder


def clean(environment: Path, **more: str) -> dict[str, str]:
    """Returns the variables of a process in a virtual environment. None leads to this checkout."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    return {**kept, "PATH": path, "LOSSGATE_CACHE": "", "PYTHONDONTWRITEBYTECODE": "1", **more}


def required_by(wheel: Path, extras: tuple[str, ...]) -> set[str]:
    """Returns the names of all distributions that a wheel with extras leads to."""
    with ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        own = Parser().parsestr(file.read(name).decode()).get_all("Requires-Dist") or []
    found: set[str] = set()
    left = [(line, extras) for line in own]
    while left:
        line, asked = left.pop()
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (asked or ("",))):
            continue
        if requirement.name not in found:
            found.add(requirement.name)
            left += [(one, tuple(requirement.extras)) for one in metadata.requires(requirement.name) or ()]
    return found


def test_the_wheel_has_what_users_need_and_nothing_of_the_tests(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    with ZipFile(wheel) as file:
        names = file.namelist()
        sources = {name: file.read(name).decode() for name in names if name.endswith(".py")}
    own = f"lossgate-{lossgate.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"lossgate", "fused_losses", "dense_losses", own}
    assert {f"{own}/licenses/LICENSE", "lossgate/py.typed", "lossgate/inputs.pyi"} <= set(names)
    imported = {name for source in sources.values() for name in imports(source)}
    unused = {dotted(name) for name in sources if dotted(name) not in imported and not name.endswith("__init__.py")}
    # They are found by their files, named on the command line, or entry points.
    started = {"lossgate.__main__", "lossgate.tour", "lossgate.pytest_plugin.plugin"}
    by_file = ("lossgate.losses.", "lossgate.adapters.", "lossgate.findings.scripts.")
    assert {name for name in unused if not name.startswith(by_file)} == started
    with tarfile.open(sdist) as packed:
        tops = {name.split("/")[1] for name in packed.getnames()}
    assert {"harness", "kernels", "references", "pyproject.toml", "CHANGELOG.md", "README.md", "LICENSE"} <= tops
    assert not tops & {"property_tests", "distributed_tests", "benchmarks", "ci", ".ci"}


def dotted(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".")


def imports(source: str) -> Iterator[str]:
    """Yields the names that a module imports, each also as a part of what it is imported from."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def in_clean(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=clean(environment), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_without_extras_the_command_works_and_names_the_extra_that_it_lacks(bare: Path, tmp_path: Path) -> None:
    done = in_clean(bare, tmp_path, "lossgate", "verify", "lossgate.tour:chunked", "--layout", "single", "--dtype",
                    "float32", "--property", "agreement", "--evidence", "evidence.jsonl")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    page = in_clean(bare, tmp_path, "lossgate", "report", "evidence.jsonl", "--html", "page.html")
    assert page.returncode == 2
    assert "pip install 'lossgate[html]'" in page.stderr
    suite = in_clean(bare, tmp_path, "python", "-c", "from lossgate import suite, tour; suite(tour.chunked)")
    assert suite.stderr.splitlines()[-1].endswith("pip install 'lossgate[pytest]'")


@pytest.mark.slow
def test_with_extras_there_are_tests_and_pages(built: tuple[Path, Path], tmp_path: Path) -> None:
    full = environment(tmp_path / "venv", built[1], "pytest", "html")
    (tmp_path / "test_tour.py").write_text(
        "from lossgate import suite, tour\ntest_tour = suite(tour.chunked, profile='quick', layouts=['single'])\n"
    )
    done = in_clean(full, tmp_path, "python", "-m", "pytest", "-q", "--lossgate-evidence", "evidence.jsonl")
    assert done.returncode == 0, done.stdout
    assert in_clean(full, tmp_path, "lossgate", "report", "evidence.jsonl", "--html", "page.html").returncode == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


# A repository with one kernel, and what the runner does


@dataclass
class Runner:
    """Runs steps as GitHub's runner does: in a clone, each script in a shell of its own."""

    workspace: Path
    environment: Path
    inputs: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    kept: list[str] = field(default_factory=list)
    """What was uploaded."""
    failed: bool = False

    def run(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            condition = step.get("if", "success()")
            if (self.failed and condition != "always()") or (condition == "inputs.policy != ''" and not self._policy):
                continue
            uses = step.get("uses", "").partition("@")[0]
            if uses == "OWNER/lossgate":
                action = yaml.safe_load((ROOT / "action.yml").read_text())
                self.inputs = {name: one.get("default", "") for name, one in action["inputs"].items()} | step["with"]
                self.run(action["runs"]["steps"])
            elif uses == "actions/upload-artifact":
                self.kept += [path for path in step["with"]["path"].split() if (self.workspace / path).exists()]
            elif uses:
                assert uses in ("actions/checkout", "actions/setup-python"), uses
            else:
                self._script(step)

    @property
    def _policy(self) -> str:
        return self.inputs["policy"]

    def _script(self, step: dict[str, Any]) -> None:
        summary = self.workspace.parent / "summary"
        summary.write_text("")
        own = {name: self._filled(text) for name, text in step.get("env", {}).items()}
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=self.workspace, capture_output=True, text=True, check=True
        )
        own |= {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_SHA": commit.stdout.strip()}
        flags = ["--noprofile", "--norc", "-eo", "pipefail"] if step.get("shell") == "bash" else ["-e"]
        done = subprocess.run(
            ["bash", *flags, "-c", self._filled(step["run"])],
            cwd=self.workspace,
            env=clean(self.environment, CI="true", **own),
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout, done.stderr)  # for who reads why this test fails
        self.summary += summary.read_text()
        self.failed |= done.returncode != 0

    def _filled(self, text: str) -> str:
        known = {f"inputs.{name}": value for name, value in self.inputs.items()} | {"github.action_path": "ACTION"}

        def value(found: re.Match[str]) -> str:
            return next((known[name] for name in found[1].split(" || ") if known[name]), "")

        return re.sub(r"\$\{\{ (.+?) \}\}", value, text)


@pytest.fixture
def runner(bare: Path, tmp_path: Path) -> Any:
    """Returns ``runner(kernel)``: a runner in a clone of a repository with this kernel."""
    (packages,) = (bare / "lib").glob("python*/site-packages")
    (packages / "pip.py").write_text(PIP)
    (bare / "installs").unlink(missing_ok=True)
    (bare / "bin/pip").write_text(f"#!{bare}/bin/python\n{PIP}")
    (bare / "bin/pip").chmod(0o755)

    def make(kernel: str) -> Runner:
        origin = tmp_path / "origin"
        origin.mkdir()
        (origin / "my_kernels.py").write_text(kernel)
        (origin / "gate.toml").write_text(POLICY)
        as_someone = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        for command in (["init", "-q"], ["add", "."], [*as_someone, "commit", "-qm", "A kernel"]):
            subprocess.run(["git", *command], cwd=origin, check=True)
        subprocess.run(["git", "clone", "-q", str(origin), str(tmp_path / "workspace")], check=True)
        return Runner(tmp_path / "workspace", bare)

    return make


def steps(name: str) -> list[dict[str, Any]]:
    """Returns the steps of a block of the page on CI."""
    (block,) = (one for one in blocks_of(ROOT / "docs/how-to/ci.md") if one.directives.get("file") == name)
    shown = yaml.safe_load(block.text)
    return shown["steps"] if "steps" in shown else shown["jobs"]["verify"]["steps"]


def installs(environment: Path) -> list[str]:
    return (environment / "installs").read_text().splitlines()


TORCH = "install torch --index-url https://download.pytorch.org/whl/cpu"


def test_the_workflow_has_20_lines_and_opens_the_gate(runner: Any, bare: Path) -> None:
    (block,) = (one for one in blocks_of(ROOT / "docs/how-to/ci.md") if one.directives.get("file") == "lossgate.yml")
    assert len(block.text.splitlines()) <= 20
    ran = runner(KERNEL)
    ran.run(steps("lossgate.yml"))
    assert not ran.failed
    assert ran.summary.startswith("## The gate is open")
    assert installs(bare) == [TORCH, "install lossgate"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "policy"),
    [(KERNEL, "gate.toml"), (WRONG, "gate.toml"), (WRONG, "")],
    ids=["right", "wrong", "wrong, without a policy"],
)
def test_the_action_does_the_same_and_keeps_evidence(runner: Any, bare: Path, kernel: str, policy: str) -> None:
    ran, wrong = runner(kernel), kernel == WRONG
    (_, action) = steps("with-action.yml")
    ran.run([action | {"with": action["with"] | {"policy": policy}}])
    assert ran.failed == wrong
    assert ("DISAGREE  my_kernel  float32  single" in ran.summary) == wrong
    assert ("## The gate is" in ran.summary) == bool(policy)
    assert ran.kept == ["lossgate-results/", *([".lossgate/"] if wrong else [])]
    assert installs(bare) == [TORCH, "install ACTION -r requirements.txt"]


@pytest.mark.slow
def test_the_workflow_fails_for_a_wrong_kernel_and_says_why(runner: Any) -> None:
    ran = runner(WRONG)
    ran.run(steps("lossgate.yml"))
    assert ran.failed
    assert "The gate is closed for 1 reason: disagree (1)" in ran.summary
