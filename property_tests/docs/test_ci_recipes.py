# SPDX-License-Identifier: Apache-2.0
"""The templates in ``ci/workflows`` are valid, name flags that exist, and fail closed."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from cyclopts import CycloptsError

from lossgate.cli import app

from .markdown import ROOT

WORKFLOWS = ROOT / "ci/workflows"
GITHUB, NIGHTLY, GITLAB = (WORKFLOWS / name for name in ("github.yml", "github-nightly.yml", "gitlab.yml"))
PUBLISH, CONFORMANCE = WORKFLOWS / "github-publish.yml", WORKFLOWS / "github-conformance.yml"
ACTION = ROOT / "action.yml"
RECIPES = [GITHUB, NIGHTLY, GITLAB]
SCHEMAS = {GITLAB: "vendor.gitlab-ci", ACTION: "vendor.github-actions"}
SCRIPTS = [ROOT / "ci/gate", ROOT / "ci/verify"]
VALUES = {
    "matrix.part": "1",
    "github.run_number": "7",
    "TARGETS": "ci/candidates/ours.py",
    "PROFILE": "ci",
    "POLICY": "ci/gate.toml",
    "CI_NODE_INDEX": "1",
    "CI_NODE_TOTAL": "4",
    "evidence": "evidence.jsonl",
    "{targets[@]}": "ci/candidates/ours.py",
}
"""What CI systems put in for variables."""


def by_name(path: Path) -> str:
    return path.name


def read(path: Path) -> dict[str, Any]:
    """Returns a workflow. YAML takes the key ``on`` for true."""
    loaded = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in loaded.items()}


def jobs_of(path: Path) -> dict[str, Any]:
    loaded = read(path)
    return loaded["jobs"] if "jobs" in loaded else {name: job for name, job in loaded.items() if "script" in job}


def scripts_of(path: Path) -> Iterator[str]:
    """Yields what the shell runs."""
    if path.suffix != ".yml":
        yield path.read_text()
        return
    for job in jobs_of(path).values():
        yield from (step["run"] for step in job.get("steps", ()) if "run" in step)
        yield from job.get("script", ())


def commands_in(script: str) -> Iterator[list[str]]:
    """Yields the arguments of each call of lossgate."""
    for line in re.sub(r"\\\n\s*", "", script).splitlines():
        for part in re.split(r"\|\||&&|[|;]", line):
            if found := re.match(r"\s*(?:lossgate|(?:torchrun|python) .*-m lossgate) (.*)", part):
                yield shlex.split(filled_in(found[1]), comments=True)


def filled_in(line: str) -> str:
    line = re.sub(r"\$\{\{\s*([\w.]+)\s*\}\}", lambda found: VALUES[found[1]], line)
    return re.sub(r"\$(\{targets\[@\]\}|[A-Za-z_]\w*)", lambda found: VALUES.get(found[1], found[0]), line)


def accepted(arguments: list[str]) -> bool:
    """Whether lossgate has the command and its flags."""
    try:
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError:
        return False
    return True


@pytest.mark.parametrize("path", [*RECIPES, PUBLISH, CONFORMANCE, ACTION], ids=by_name)
def test_recipes_follow_the_published_schemas(path: Path) -> None:
    assert valid(path, SCHEMAS.get(path, "vendor.github-workflows"))


def valid(path: Path, schema: str) -> bool:
    try:
        check_jsonschema(["--builtin-schema", schema, str(path)])
    except SystemExit as ended:
        return not ended.code
    return False


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        (GITHUB, "runs-on: ubuntu-24.04", "runs_on: ubuntu-24.04"),
        (GITHUB, "contents: read", "contents: reads"),
        (GITLAB, "parallel: 4", "parallel: four"),
        (ACTION, "required: true", "required: 1"),
    ],
)
def test_the_schemas_see_mistakes(tmp_path: Path, path: Path, right: str, wrong: str) -> None:
    changed = tmp_path / path.name
    changed.write_text(path.read_text().replace(right, wrong, 1))
    assert not valid(changed, SCHEMAS.get(path, "vendor.github-workflows"))


@pytest.mark.parametrize("path", [*RECIPES, *SCRIPTS], ids=by_name)
def test_commands_and_flags_exist(path: Path) -> None:
    commands = [arguments for script in scripts_of(path) for arguments in commands_in(script)]
    assert "verify" in {arguments[0] for arguments in commands}
    for arguments in commands:
        assert accepted(arguments), arguments


@pytest.mark.parametrize("line", ["lossgate verify $TARGETS --prof ci", "torchrun -m lossgate verified x.py"])
def test_commands_that_do_not_exist_are_seen(line: str) -> None:
    (arguments,) = commands_in(line)
    assert not accepted(arguments)


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "ci/gate"], ids=by_name)
def test_the_gate_is_the_last_command_of_its_script(path: Path) -> None:
    """So its exit code is that of the job."""
    scripts = jobs_of(path)["gate"]["script"] if path == GITLAB else scripts_of(path)
    (script,) = ["\n".join(scripts)] if path == GITLAB else [one for one in scripts if "lossgate gate" in one]
    last = re.sub(r"\\\n\s*", "", script).strip().splitlines()[-1]
    assert last.startswith("lossgate gate ")
    assert not re.search(r"[|;&]", last)


@pytest.mark.parametrize("path", [GITHUB, NIGHTLY], ids=by_name)
def test_parts_are_all_there_and_the_gate_runs_whatever_came_of_them(path: Path) -> None:
    jobs = jobs_of(path)
    numbers = jobs["verify"]["strategy"]["matrix"]["part"]
    (shard,) = re.findall(r"--shard \$\{\{ matrix\.part \}\}/(\d+)", path.read_text())
    assert numbers == [*range(1, int(shard) + 1)]
    assert jobs["verify"]["strategy"]["fail-fast"] is False
    assert jobs["gate"]["if"] == "always()"
    assert "verify" in jobs["gate"]["needs"]
    for name in ("verify", "torchrun"):
        uploads = [s for s in jobs.get(name, {}).get("steps", ()) if "upload-artifact" in s.get("uses", "")]
        assert all(step["if"] == "always()" for step in uploads)
    assert not any("continue-on-error" in step for name in ("verify", "gate") for step in jobs[name]["steps"])


@pytest.mark.parametrize("path", RECIPES, ids=by_name)
def test_the_gate_asks_for_the_commit_that_is_checked_out(path: Path) -> None:
    (gate,) = [words for script in scripts_of(path) for words in commands_in(script) if words[0] == "gate"]
    assert gate[gate.index("--commit") + 1] == "$(git rev-parse HEAD)"
    assert gate[gate.index("--policy") + 1] == "ci/gate.toml"
    checkouts = [s for job in jobs_of(path).values() for s in job.get("steps", ()) if "checkout" in s.get("uses", "")]
    assert not any("ref" in step["with"] for step in checkouts)


@pytest.mark.parametrize(("evidence", "code"), [("", 4), ("a line", 1)])
def test_a_torchrun_without_evidence_is_an_error(tmp_path: Path, evidence: str, code: int) -> None:
    """torchrun exits with 1, whatever happened. GitLab allows 1, and GitHub needs a success."""
    (tmp_path / "evidence-torchrun.jsonl").write_text(evidence)
    (gitlab,) = jobs_of(GITLAB)["torchrun"]["script"]
    (github,) = [run for run in runs_of(jobs_of(GITHUB)["torchrun"]) if "torchrun --nproc" in run]
    assert jobs_of(GITLAB)["torchrun"]["allow_failure"] == {"exit_codes": [1]}
    for script, expected in ((gitlab, code), (github, 0 if evidence else 1)):
        done = subprocess.run(["bash", "-ec", f"torchrun() {{ return 1; }}\n{script}"], cwd=tmp_path, check=False)
        assert done.returncode == expected


def test_parts_of_gitlab_are_all_there_and_the_gate_runs_whatever_came_of_them() -> None:
    jobs = jobs_of(GITLAB)
    assert jobs["verify"]["parallel"] > 1
    assert "--shard $CI_NODE_INDEX/$CI_NODE_TOTAL" in jobs["verify"]["script"][0]
    assert jobs["verify"]["allow_failure"] == {"exit_codes": [1, 3]}
    assert jobs["gate"]["when"] == "always"
    assert "allow_failure" not in jobs["gate"]
    assert {need["job"]: need.get("optional", False) for need in jobs["gate"]["needs"]} == {
        "verify": False,
        "torchrun": True,
    }
    assert all(jobs[name]["artifacts"]["when"] == "always" for name in ("verify", "torchrun", "gate"))


@pytest.mark.parametrize("path", [GITHUB, NIGHTLY, PUBLISH], ids=by_name)
def test_actions_are_pinned_and_permissions_are_the_least(path: Path) -> None:
    """A job that may write runs no code of the project."""
    assert read(path)["permissions"] == {"contents": "read"}
    for name, job in jobs_of(path).items():
        for step in job["steps"]:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@((release/)?v\d+|[0-9a-f]{40})", step.get("uses", "actions/x@v1")), (
                name
            )
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
        if "write" in job.get("permissions", {}).values():
            assert not re.search(r"\b(pip|pytest|lossgate (verify|gate)|ci/\w+)\b", "\n".join(runs_of(job))), name


def runs_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]
